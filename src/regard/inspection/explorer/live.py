"""A live page: texts that are typed are read by a model, and what it attends to is shown."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from regard.inspection.explorer.documents import write_json
from regard.inspection.explorer.server import Serving
from regard.inspection.explorer.shell import (
    fill_places,
    join_modules,
    load_shell,
    read_source,
    shrink_style,
    write_policy,
)
from regard.inspection.explorer.sites import Answer, Explorer, IsWanted, RefusalError, Site, check_port
from regard.inspection.explorer.tiles import demand_reader
from regard.inspection.visible_text import show_text

MOST_TRACES, MOST_VIEWS = 16, 4  # that are kept
_POLL_SECONDS = 0.05


def serve_live(
    record: Callable[[str], Any], *, text: str = "", title: str = "attention", port: int = 0, **options: Any
) -> Serving:
    """Serve a page with a box for a text, and one for a changed text that it is compared with.

    Only this machine is served, as by `serve`. One text is read at a time; what the page has given up
    waiting for is not begun.

    Args:
        record: gives the `Trace` of a text, or a ValueError that is shown in the page.
        text: what stands in the box at first.
        title: of the page.
        port: to listen on; 0 takes one that is free.
        **options: training and positions, as in `pages.write`.

    Returns:
        A `Serving`, already listening.

    Raises:
        OSError: the port is taken, or not allowed.
        ValueError: a port outside 0..65535.

    Example:
        >>> import jax.numpy as jnp, json, urllib.request
        >>> from regard import attend, inspection
        >>> from regard.inspection.explorer.live import serve_live
        >>> def record(text):
        ...     x = jnp.eye(len(text))[None]
        ...     with inspection.capture(tokens=list(text), title=text) as trace:
        ...         attend(x, x, x)
        ...     return trace
        >>> with serve_live(record) as page:
        ...     answer = json.load(urllib.request.urlopen(page.url + "read?text=abc&text=abd"))
        >>> answer["view"], answer["tokens"]
        ('view/1-2/', [3, 3])
    """
    check_port(port)
    return Serving(Site(_LiveExplorer(record, text, title, options).read), port)


class _TextError(Exception):
    """A text that the model cannot read."""


class _LiveExplorer:
    """The live page, and explorers of what was read."""

    def __init__(self, record: Callable[[str], Any], text: str, title: str, options: dict[str, Any]):
        self._record, self._options = record, options
        self._page, self._policy = _fill_page(text, title)
        self._turn = threading.Lock()
        self._numbers = itertools.count(1)
        self._find_trace = functools.lru_cache(MOST_TRACES)(self._record_text)
        self._views: OrderedDict[str, Explorer] = OrderedDict()

    def read(self, path: str, query: str, is_wanted: IsWanted) -> Answer:
        """Return the page, what a text became, or what the explorer of some texts answers."""
        if not path:
            html = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": self._policy}
            return self._page, html
        kind, _, rest = path.partition("/")
        if kind == "read" and not rest:
            try:
                answer: dict[str, Any] = self._read_texts(_parse_texts(query), is_wanted)
            except _TextError as error:
                answer = {"refused": str(error)}
            return json.dumps(answer).encode(), {"Content-Type": "application/json"}
        name, _, inner = rest.partition("/")
        explorer = self._views.get(name) if kind == "view" else None
        if explorer is None or "/" not in rest:
            raise RefusalError(HTTPStatus.NOT_FOUND, "there is nothing here, or no more")
        return explorer.read(inner, query, is_wanted)

    def _read_texts(self, texts: list[str], is_wanted: IsWanted) -> dict[str, Any]:
        with self._take_turn(is_wanted):
            found = []
            for text in texts:
                found.append(self._find_trace(text))
                demand_reader(is_wanted)
            name = "-".join(str(number) for number, _ in found)
            if name not in self._views:
                options = self._options if len(found) == 1 else {}
                # Few heads are carried in detail: the server has them all.
                traces = [trace for _, trace in found]
                self._views[name] = Explorer(traces, framed=True, pinned=0, **options)
            self._views.move_to_end(name)
            while len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        lengths = [max((call.keys for call in trace.calls), default=0) for _, trace in found]
        return {"view": f"view/{name}/", "tokens": lengths}

    def _record_text(self, text: str) -> tuple[int, Any]:
        try:
            trace = self._record(text)
        except ValueError as error:
            raise _TextError(str(error)) from error
        return next(self._numbers), trace

    @contextmanager
    def _take_turn(self, is_wanted: IsWanted) -> Iterator[None]:
        """Wait for those before; whoever is gone by then gives up the turn."""
        while not self._turn.acquire(timeout=_POLL_SECONDS):
            demand_reader(is_wanted)
        try:
            demand_reader(is_wanted)
            yield
        finally:
            self._turn.release()


def _parse_texts(query: str) -> list[str]:
    given = parse_qsl(query, keep_blank_values=True)
    if len(given) not in (1, 2) or any(name != "text" for name, _ in given):
        raise RefusalError(HTTPStatus.BAD_REQUEST, "read: expected text=... once or twice, nothing else")
    return [text for _, text in given]


def _fill_page(text: str, title: str) -> tuple[bytes, str]:
    """Return the page and its content policy."""
    script = f'(()=>{{"use strict";\n{join_modules("live.js")}}})();\n//# sourceURL=regard-live.js\n'
    parts = {
        "TITLE": escape(show_text(title)),
        "STYLE": load_shell().style + shrink_style(read_source("live.css")),
        "SETTINGS": write_json({"text": text}),
        "SCRIPT": script,
    }
    policy = write_policy("'self'", script) + "; frame-src 'self'; frame-ancestors 'none'"
    return fill_places(read_source("live.html"), parts).encode(), policy
