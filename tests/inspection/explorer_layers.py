"""A small page that most tests of the explorer open, as a plugin of pytest."""

import numpy as np
import pytest

from explorer_pages import WORDS, make_case, trace_of
from regard import masks


@pytest.fixture(scope="module")
def layers() -> list:
    """Three layers of two causal heads over the words."""
    n, causal = len(WORDS), np.tri(len(WORDS), dtype=bool)
    return [
        make_case(f"layer {c}", n, n, 2, 2, 20 + c, causal, spread=3.0, mask=masks.causal()) for c in range(3)
    ]


@pytest.fixture(scope="module")
def layers_page(layers, tmp_path_factory):
    """Their page."""
    folder = tmp_path_factory.mktemp("layers")
    return trace_of(layers, list(WORDS), "keys & <files>").explore(folder / "page.html")


@pytest.fixture
def open_page(browser, layers_page):
    """Opens that page with a part of an address; what it complains of fails the test."""
    opened, address = [], layers_page.as_uri()

    def visit(part="", **settings):
        opened.append(browser.visit(address + part, allowed=address, **settings))
        return opened[-1]

    yield visit
    for one in opened:
        one.check()
        assert one.requests == [address]
        browser.close(one)
