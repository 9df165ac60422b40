"""docs/seeds.md keeps its word: every item is on it, and so is what became of it."""

import re

from test_documents import DOCS, PAGES, quoted

PAGE = PAGES[DOCS / "seeds.md"]
FEATURES = {"000": 26, "001": 6, "002": 5, "003": 14, "004": 6}
MISTAKES = {"000": 14, "001": 7, "002": 5, "003": 12, "004": 4}


def test_every_item_has_one_row_with_something_in_it():
    rows = re.findall(r"^\| ([FB]\d{3}-\d+) \|[^|]+\|(.+)\|$", PAGE, re.M)
    assert [item for item, _ in rows] == [
        f"{kind}{document}-{number}"
        for kind, counts in (("F", FEATURES), ("B", MISTAKES))
        for document, count in counts.items()
        for number in range(1, count + 1)
    ]
    assert [item for item, told in rows if len(told.strip()) < 5] == []
    # Tests that it names are there, as those of all pages are: there are many.
    assert len([piece for piece in quoted(PAGE) if re.fullmatch(r"test_\w+", piece)]) > 50
