"""Sites behind an address with a secret: a page, and numbers of its traces."""

import hmac
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from regard.inspection.explorer.exact_tiles import IsWanted, Tiles
from regard.inspection.explorer.pages import fill_page
from regard.inspection.explorer.shell import load_shell

LARGEST_NUMBER = 2**31 - 1
# How many numbers follow each kind of data.
ROUTES = {"tile": 7, "row": 4, "column": 4, "split": 7, "rollout": 3}
Answer = tuple[bytes, dict[str, str]]


class RefusalError(Exception):
    """An answer other than what was asked for."""

    def __init__(self, reason: str, status: int = HTTPStatus.BAD_REQUEST, headers: Mapping[str, str] = {}):
        super().__init__(reason)
        self.reason, self.status, self.headers = reason, HTTPStatus(status), dict(headers)


class Site:
    """A site behind a secret address; `read` answers what comes after it: a path, a query, who waits."""

    def __init__(self, read: Callable[[str, str, IsWanted], Answer]):
        self._read = read
        self.token = secrets.token_urlsafe(24)
        self.is_open = True
        self._forming, self._formed = 0, threading.Condition()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is being formed; return whether that is so."""
        with self._formed:
            return self._formed.wait_for(lambda: not self._forming, seconds)

    def answer(self, target: str, is_waited: IsWanted) -> Answer:
        """Return the body and its headers, or raise a refusal; what nobody waits for is given up."""
        path, _, query = target.partition("?")
        secret, _, rest = path.removeprefix("/").partition("/")
        if not (path.startswith("/") and hmac.compare_digest(secret.encode(), self.token.encode())):
            raise RefusalError("there is nothing here; open the whole address that was printed", 404)
        if path.endswith(self.token):
            raise RefusalError("the address ends with a slash", 308, {"Location": f"/{self.token}/"})
        with self._formed:
            self._forming += 1
        try:
            return self._read(rest, query, lambda: self.is_open and is_waited())
        finally:
            with self._formed:
                self._forming -= 1
                self._formed.notify_all()


class Explorer:
    """The page of one trace, or of two to compare, its chunks and its tiles; `framed` within another page."""

    def __init__(self, traces: Sequence[Any], framed: bool = False, **options: Any):
        # Statistics alone are no finer on a server: such a page carries all there is.
        has_queries = any(call.problem is not None for trace in traces for call in trace.calls)
        self.traces = traces
        self.options = {**options, "compare": traces[1] if len(traces) > 1 else None}
        payload, self._page = fill_page(traces[0], max_mb=None, served=has_queries, **self.options)
        around = "'self'" if framed else "'none'"
        policy = load_shell().policy("'self'" if has_queries else "'none'") + f"; frame-ancestors {around}"
        self._headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
        if framed:
            self._headers["X-Frame-Options"] = "SAMEORIGIN"
        self._chunks, self._tiles = payload.chunks, Tiles(traces)

    def read(self, path: str, query: str, is_wanted: IsWanted) -> Answer:
        """Return the page at an empty path, or numbers, and headers, or raise a refusal."""
        if not path:
            return self._page, self._headers
        kind, *words = path.split("/")
        data = {"Content-Type": "application/octet-stream"}
        if kind == "chunk" and len(words) == 1:
            if words[0] not in self._chunks:
                raise RefusalError("there is no such chunk", 404)
            return self._chunks[words[0]], data
        if kind not in ROUTES:
            raise RefusalError("there is nothing of this kind", 404)
        numbers = _read_numbers(kind, words)
        chosen = {"channel": _read_channel(query)} if kind == "tile" else {}
        pairs = [tuple(numbers[3:5]), tuple(numbers[5:])] if ROUTES[kind] == 7 else numbers[3:]
        try:
            array = getattr(self._tiles, kind)(*numbers[:3], *pairs, **chosen, is_wanted=is_wanted)
        except (LookupError, ValueError) as error:
            raise RefusalError(str(error.args[0]), 404) from error
        return np.ascontiguousarray(array, "<f4").tobytes(), data


def check_port(port: int) -> None:
    """Raise a ValueError for what is no port, before anything is computed."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port: expected a number in 0..65535, got {port}")


def _read_numbers(kind: str, words: list[str]) -> list[int]:
    if len(words) != ROUTES[kind]:
        raise RefusalError(f"{kind}: expected {ROUTES[kind]} numbers, got {len(words)}")
    # Ten digits at most: longer ones are not worth turning into numbers.
    numbers = [int(word) if re.fullmatch(r"[0-9]{1,10}", word) else LARGEST_NUMBER + 1 for word in words]
    if max(numbers) > LARGEST_NUMBER:
        raise RefusalError(f"{kind}: expected numbers in 0..{LARGEST_NUMBER}")
    if kind == "tile" and 0 in numbers[3:5]:
        raise RefusalError("tile: expected blocks of at least one row and one key")
    return numbers


def _read_channel(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    if pairs not in ([], [("channel", "mass")], [("channel", "max")]):
        raise RefusalError("tile: expected channel=mass or channel=max and nothing else")
    return pairs[0][1] if pairs else "mass"
