"""The explorer's page served to this machine alone: what is too fine for a file is formed when looked at."""

from __future__ import annotations

import hmac
import re
import secrets
import select
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Unpack
from urllib.parse import parse_qsl

import numpy as np

from regard.inspection.explorer.documents import PageOptions
from regard.inspection.explorer.pages import fill_page
from regard.inspection.explorer.shell import load_shell
from regard.inspection.explorer.tiles import AbandonedError, Tiles

ADDRESS = "127.0.0.1"
LARGEST_NUMBER = 2**31 - 1
IDLE_SECONDS = 60
# How many numbers follow each kind of data.
ROUTES = {"tile": 7, "row": 4, "column": 4, "split": 7}
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
NO_CONTENT_POLICY = "default-src 'none'; frame-ancestors 'none'"


class Serving(AbstractContextManager["Serving"]):
    """An explorer page that is being served; as a context manager it stops at the end of the block.

    Attributes:
        url: where the page is, with the secret that opens it.
        port: the one it listens on.
    """

    def __init__(self, site: _Site, port: int):
        self._server = _Server((ADDRESS, port), _Handler)
        self._server.site = site
        self.port: int = self._server.server_address[1]
        self.url = f"http://{ADDRESS}:{self.port}/{site.token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="regard-explorer", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and form nothing more, without waiting. Closing twice does nothing."""
        self._server.site.is_open = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def is_busy(self, seconds: float = 0.0) -> bool:
        """Return whether answers are still being formed after so many seconds."""
        return not self._server.site.wait(seconds)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Serving({self.url!r})"


def serve(trace: Any, *, port: int = 0, **options: Unpack[PageOptions]) -> Serving:
    """Serve the page of a trace to browsers on this machine; every zoom is exact, at any length.

    Only 127.0.0.1 is listened on. The address holds a random secret, and requests without it, or under the
    name of another host, are refused: no other site can read the trace through the browser. There are no
    files behind the address, only the page and numbers of the trace.

    Args:
        trace: of `capture` or `load`.
        port: to listen on; 0 takes one that is free.
        **options: compare, title, pinned, training and positions, as in `pages.write`.

    Returns:
        A `Serving`, already listening, in threads of its own.

    Raises:
        OSError: the port is taken, or not allowed.
        ValueError: a port outside 0..65535.

    Example:
        >>> import jax.numpy as jnp, urllib.request
        >>> from regard import attend, inspection, masks
        >>> from regard.inspection.explorer.server import serve
        >>> x = jnp.eye(4)[None]
        >>> with inspection.capture() as trace:
        ...     _ = attend(x, x, x, mask=masks.causal(), scale=0.0)
        >>> with serve(trace) as page:
        ...     row = urllib.request.urlopen(page.url + "row/0/0/0/1").read()
        >>> [f"{weight:.2f}" for weight in jnp.frombuffer(row, jnp.float32)]
        ['0.50', '0.50', '0.00', '0.00']
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port: expected a number in 0..65535, got {port}")
    traces = [one for one in (trace, options.get("compare")) if one is not None]
    # Statistics alone are no finer on a server: such a page carries all there is.
    finer = any(call.problem is not None for one in traces for call in one.calls)
    payload, page = fill_page(trace, max_mb=None, served=finer, **options)
    policy = load_shell().policy("'self'" if finer else "'none'") + "; frame-ancestors 'none'"
    return Serving(_Site(page, policy, payload.chunks, Tiles(traces)), port)


class _RefusalError(Exception):
    """An answer other than what was asked for."""

    def __init__(self, status: HTTPStatus, reason: str, headers: Mapping[str, str] | None = None):
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


class _Site:
    """The page, its chunks and its tiles behind a secret address."""

    def __init__(self, page: bytes, policy: str, chunks: Mapping[str, bytes], tiles: Tiles):
        self.token = secrets.token_urlsafe(24)
        self._page, self._policy, self._chunks, self._tiles = page, policy, chunks, tiles
        self.is_open = True
        self._forming, self._formed = 0, threading.Condition()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is being formed; return whether that is so."""
        with self._formed:
            return self._formed.wait_for(lambda: not self._forming, seconds)

    def answer(self, target: str, is_waited: Callable[[], bool]) -> tuple[bytes, dict[str, str]]:
        """Return the body and its headers, or raise a refusal; what nobody waits for is given up."""
        path, _, query = target.partition("?")
        secret, _, rest = path.removeprefix("/").partition("/")
        if not (path.startswith("/") and hmac.compare_digest(secret.encode(), self.token.encode())):
            raise _RefusalError(
                HTTPStatus.NOT_FOUND, "there is nothing here; open the whole address that was printed"
            )
        if not path.endswith(self.token) and not rest:
            return self._page, {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Security-Policy": self._policy,
            }
        if not rest:
            there = {"Location": f"/{self.token}/"}
            raise _RefusalError(HTTPStatus.PERMANENT_REDIRECT, "the address ends with a slash", there)
        kind, *words = rest.split("/")
        data = {"Content-Type": "application/octet-stream", "Content-Security-Policy": NO_CONTENT_POLICY}
        if kind == "chunk" and len(words) == 1:
            if words[0] not in self._chunks:
                raise _RefusalError(HTTPStatus.NOT_FOUND, "there is no such chunk")
            return self._chunks[words[0]], data
        if kind not in ROUTES:
            raise _RefusalError(HTTPStatus.NOT_FOUND, "there is nothing of this kind")
        numbers = _read_numbers(kind, words)
        channel = _read_channel(query) if kind == "tile" else ""
        with self._formed:
            self._forming += 1
        try:
            array = self._form(kind, numbers, channel, lambda: self.is_open and is_waited())
        except (LookupError, ValueError) as error:
            raise _RefusalError(HTTPStatus.NOT_FOUND, str(error.args[0])) from error
        finally:
            with self._formed:
                self._forming -= 1
                self._formed.notify_all()
        return np.ascontiguousarray(array, "<f4").tobytes(), data

    def _form(self, kind: str, numbers: list[int], channel: str, is_wanted: Callable[[], bool]) -> np.ndarray:
        trace, call, head, *rest = numbers
        if kind == "tile":
            names = ("query_block", "key_block", "row", "column")
            chosen = dict(zip(names, rest, strict=True))
            return self._tiles.tile(trace, call, head, **chosen, channel=channel, is_wanted=is_wanted)
        if kind == "split":
            return self._tiles.split(trace, call, head, (rest[0], rest[1]), (rest[2], rest[3]), is_wanted)
        form = self._tiles.row if kind == "row" else self._tiles.column
        return form(trace, call, head, rest[0], is_wanted)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    site: _Site

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that goes away in the middle of an answer."""
        # The default prints a traceback; what goes wrong in an answer is answered.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server: _Server

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send refusals of http.server itself as plain text; methods without a function are not allowed."""
        self.close_connection = True
        status, text, headers = HTTPStatus(code), HTTPStatus(code).phrase, {"Connection": "close"}
        if status == HTTPStatus.NOT_IMPLEMENTED:
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered"
            headers["Allow"] = "GET, HEAD"
        self._send(status, text.encode(), headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        status, headers = HTTPStatus.OK, {}
        try:
            if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                raise _RefusalError(HTTPStatus.BAD_REQUEST, "nothing is taken", {"Connection": "close"})
            self._check_host()
            body, headers = self.server.site.answer(self.path, self._is_waited)
        except AbandonedError:
            self.close_connection = True
            return
        except _RefusalError as refusal:
            status, body, headers = refusal.status, refusal.reason.encode(), dict(refusal.headers)
        except Exception as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            body = f"{type(error).__name__}: this could not be formed".encode()
        self._send(status, body, headers)

    def _is_waited(self) -> bool:
        """Return whether the browser is still there: it closes the connection of what it gives up."""
        try:
            if not select.select([self.connection], [], [], 0)[0]:
                return True
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _check_host(self) -> None:
        """Refuse requests under another host name: such a name may belong to a site that points it here."""
        port = self.server.server_address[1]
        named = self.headers.get_all("Host", [])
        if len(named) != 1 or named[0] not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            raise _RefusalError(HTTPStatus.FORBIDDEN, f"open this page as http://{ADDRESS}:{port}/...")

    def _send(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        plain = {"Content-Type": "text/plain; charset=utf-8", "Content-Security-Policy": NO_CONTENT_POLICY}
        self.send_response_only(status)
        for name, value in {**HEADERS, **plain, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _read_numbers(kind: str, words: list[str]) -> list[int]:
    if len(words) != ROUTES[kind]:
        raise _RefusalError(
            HTTPStatus.BAD_REQUEST, f"{kind}: expected {ROUTES[kind]} numbers, got {len(words)}"
        )
    # Ten digits at most: longer ones are not worth turning into numbers.
    numbers = [int(word) if re.fullmatch(r"[0-9]{1,10}", word) else LARGEST_NUMBER + 1 for word in words]
    if max(numbers) > LARGEST_NUMBER:
        raise _RefusalError(HTTPStatus.BAD_REQUEST, f"{kind}: expected numbers in 0..{LARGEST_NUMBER}")
    if kind == "tile" and 0 in numbers[3:5]:
        raise _RefusalError(HTTPStatus.BAD_REQUEST, "tile: expected blocks of at least one row and one key")
    return numbers


def _read_channel(query: str) -> str:
    given = parse_qsl(query, keep_blank_values=True)
    if given not in ([], [("channel", "mass")], [("channel", "max")]):
        raise _RefusalError(
            HTTPStatus.BAD_REQUEST, "tile: expected channel=mass or channel=max and nothing else"
        )
    return given[0][1] if given else "mass"
