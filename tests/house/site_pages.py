"""The built site as data: every page's addresses, names and anchors."""

import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs"


@dataclass
class Page(HTMLParser):
    """What one page refers to, and what may be referred to in it."""

    path: Path
    links: list[str] = field(default_factory=list)  # that a reader may follow
    parts: list[str] = field(default_factory=list)  # that the browser fetches to show the page
    anchors: set[str] = field(default_factory=set)
    frames: int = 0  # pages within the page

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Keep what counts of a tag."""
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.frames += tag == "iframe" and "srcdoc" in given
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.parts.append(given.get("href", ""))
        elif "src" in given:
            self.parts.append(given["src"])


def read_site(folder: Path = SITE) -> dict[Path, Page]:
    """Every page below a folder, by its path."""
    paths = (path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts)
    return {path.resolve(): Page(path) for path in paths}


def is_elsewhere(address: str) -> bool:
    """Whether an address leads out of the site."""
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def find_broken(pages: dict[Path, Page]) -> list[str]:
    """Links within the site that lead nowhere: no such file, or no such place in it."""
    broken = []
    for path, page in pages.items():
        for address in filter(lambda address: not is_elsewhere(address), (*page.links, *page.parts)):
            parts = urlsplit(address)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = pages.get(target)
            if not target.is_file():
                broken.append(f"{path.name}: no file {address}")
            elif parts.fragment and there and unquote(parts.fragment) not in there.anchors:
                broken.append(f"{path.name}: no place {address}")
    return broken


def read_inventory(path: Path) -> list[str]:
    """Documented functions, classes and constants, from objects.inv, whose head has four lines."""
    rows = zlib.decompress(path.read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    kinds = ("py:function", "py:class", "py:exception", "py:data")
    return [name for name, kind, *_ in (row.split(" ", 2) for row in rows) if kind in kinds]
