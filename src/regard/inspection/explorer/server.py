"""The explorer's page served to this machine alone: what is too fine for a file is formed when looked at."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Unpack

from regard.inspection.explorer.exact_tiles import AbandonedError
from regard.inspection.explorer.page_document import PageOptions
from regard.inspection.explorer.sites import Explorer, RefusalError, Site, check_port

ADDRESS = "127.0.0.1"
IDLE_SECONDS = 60
SECONDS_TO_CLOSE = 0.1
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Content-Type": "text/plain; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}  # where an answer has no others


class Serving(AbstractContextManager["Serving"]):
    """An explorer page that is being served; as a context manager it stops at the end of the block.

    Its `url` is where the page is, with the secret that opens it, its `port` the one it listens on.
    """

    def __init__(self, site: Site, port: int):
        self._server = _Server((ADDRESS, port), _Handler)
        self._server.site = site
        self.port: int = self._server.server_address[1]
        self.url = f"http://{ADDRESS}:{self.port}/{site.token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(SECONDS_TO_CLOSE,), name="regard-explorer", daemon=True
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
    name of another host, are refused: no other site can read the trace through the browser, and no file.

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
    check_port(port)
    traces = [recorded for recorded in (trace, options.pop("compare", None)) if recorded is not None]
    return Serving(Site(Explorer(traces, **options).read), port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    site: Site

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback for a browser that goes away in the middle of an answer."""


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
                raise RefusalError("nothing is taken", headers={"Connection": "close"})
            # Another host's name may belong to a site that points it here.
            port, named = self.server.server_address[1], self.headers.get_all("Host", [])
            hosts = {f"{host}:{port}" for host in (ADDRESS, "localhost")}
            hosts |= {host.removesuffix(":80") for host in hosts}  # as browsers write it
            if len(named) != 1 or named[0] not in hosts:
                raise RefusalError(f"open this page as http://{ADDRESS}:{port}/...", 403)
            body, headers = self.server.site.answer(self.path, self._is_waited)
        except AbandonedError:
            self.close_connection = True
            return
        except RefusalError as refusal:
            status, body, headers = refusal.status, refusal.reason.encode(), refusal.headers
        except Exception as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            body = f"{type(error).__name__}: this could not be formed".encode()
        self._send(status, body, headers)

    def _is_waited(self) -> bool:
        """Return whether the browser is still there: it closes the connection of what it gives up."""
        try:
            with selectors.DefaultSelector() as selector:  # `select` takes no file beyond the 1,024th
                selector.register(self.connection, selectors.EVENT_READ)
                if not selector.select(0):
                    return True
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _send(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**HEADERS, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
