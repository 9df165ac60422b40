"""Pages of the explorer: of data alone, and those that a browser opens."""

import pytest

from explorer_pages import WORDS, make_layers
from page_traces import trace_of
from regard.inspection.explorer import budgets, pages
from regard.inspection.explorer.shell import Shell

SLOTS = '<title><!--TITLE--></title><script id="regard-document"><!--DOCUMENT--></script>\n<!--CHUNKS-->'


@pytest.fixture
def bare(monkeypatch):
    monkeypatch.setattr(pages, "load_shell", lambda: Shell(SLOTS, "", "", ""))


@pytest.fixture
def long(monkeypatch, bare):
    """Short calls are treated as if they were long."""
    monkeypatch.setattr(budgets, "LARGEST_EXACT", -1)


@pytest.fixture(scope="module")
def layers():
    return make_layers()


@pytest.fixture(scope="module")
def page(layers, tmp_path_factory):
    """Their page; most files with a browser have one of their own."""
    return trace_of(layers, WORDS, "keys & <files>").explore(tmp_path_factory.mktemp("layers") / "page.html")


@pytest.fixture
def open_page(browser, request):
    """Open the file's page, or another, with a part of an address; its complaints fail the test."""
    opened = []

    def visit(part="", path=None, **settings):
        path = path or request.getfixturevalue("page")
        address = path if isinstance(path, str) else path.as_uri()
        opened.append(browser.visit(address + part, allowed=address, **settings))
        return opened[-1]

    yield visit
    for one in opened:
        one.check()
        assert all(url.startswith(one.allowed) for url in one.requests)
        browser.close(one)
