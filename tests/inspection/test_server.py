"""The server: exact tiles at every size of blocks, one address with a secret, and nothing else behind it."""

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from page_traces import make_case, trace_of
from regard import inspection, masks, scores
from regard.inspection.explorer import exact_tiles, server
from regard.inspection.explorer.server import serve
from regard.inspection.traces.calls import Call

H, T, S = 2, 150, 331
OFFSET = S - T
EMPTY = (13, 17)  # rows that may attend to nothing
ALLOWED = np.tri(T, S, OFFSET, dtype=bool) & ~np.isin(np.arange(T), range(*EMPTY))[:, None]


@pytest.fixture(scope="module")
def cases():
    capped = {"score": scores.softcap(5.0), "change": lambda s, _: 5 * np.tanh(s / 5)}
    large = make_case(T, S, H, mask=masks.from_array(ALLOWED), query_offset=OFFSET, **capped)
    return large, make_case(11, heads=H, mask=masks.causal(), score=scores.alibi(H))


@pytest.fixture(scope="module")
def trace(cases):
    return trace_of(cases, title="</title> & more")


@pytest.fixture(scope="module")
def page(trace):
    with serve(trace) as serving:
        yield serving


def root(page):
    return page.url.partition(str(page.port))[2]


def ask(page, path, **headers):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)) as connection:
        connection.request("GET", root(page) + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def ask_raw(page, path, *lines, method="GET"):
    """A request as bytes, with nothing made right on the way."""
    lines = lines or (f"Host: 127.0.0.1:{page.port}",)
    text = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as connection:
        connection.sendall(text.encode("latin-1"))
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else None), body, head


def numbers(page, path):
    status, body, headers = ask(page, path)
    assert status == 200, body
    assert headers["Content-Type"] == "application/octet-stream"
    return np.frombuffer(body, "<f4")


def check_tile(tile, dense):
    """Blocks of the matrix, and beyond its edge nothing but NaN."""
    padded = np.pad(dense, [(0, 256 - size) for size in dense.shape], constant_values=np.nan)
    np.testing.assert_allclose(tile.reshape(256, 256), padded, rtol=3e-5, atol=1e-7)


@pytest.mark.slow
def test_tiles_are_those_of_the_definition(page, cases):
    for blocks in ((1, 1), (3, 5), (512, 512)):
        for channel, dense in zip(("mass", "max"), cases[0].level(1, *blocks), strict=False):
            for start in range(0, dense.shape[1], 256):
                path = f"tile/0/0/1/{blocks[0]}/{blocks[1]}/0/{start // 256}?channel={channel}"
                check_tile(numbers(page, path), dense[:, start : start + 256])


def test_rows_and_columns_are_exact_also_for_many_at_once(page, cases):
    weights = cases[0].weights
    found = [numbers(page, f"column/0/0/0/{column}") for column in (0, S - 1)]
    np.testing.assert_allclose(found, weights[0, :, [0, S - 1]], rtol=3e-5, atol=1e-8)
    paths = [f"row/0/0/{n % 2}/{n}" for n in (0, EMPTY[0], T - 1, *range(20, 40))] * 2
    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(lambda path: numbers(page, path), paths))
    for path, row in zip(paths, rows, strict=True):
        head, index = (int(part) for part in path.split("/")[3:])
        np.testing.assert_allclose(row, weights[head, index], rtol=3e-5, atol=1e-8)


def test_scores_are_split(page, cases):
    content, bias, both = numbers(page, "split/0/1/1/3/8/2/11").reshape(3, 5, 9)
    expected = (cases[1].query[1] @ cases[1].key[1].T / math.sqrt(5))[3:8, 2:11]
    distance = np.arange(3.0, 8)[:, None] - np.arange(2, 11)
    distance[distance < 0] = np.nan
    for found, wanted in ((content, expected + 0 * distance), (both, expected - 2.0**-8 * distance)):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(bias, -(2.0**-8) * distance, rtol=1e-3, atol=1e-6)


def test_tiles_of_a_file_come_from_its_own_blocks(trace, cases, tmp_path):
    with serve(inspection.load(trace.save(tmp_path / "s.regard"))) as page:
        document = read_document(ask(page, "")[1])
        assert "saved without queries and keys" in document["notes"][0]
        head = document["traces"][0]["calls"][0]["head"][0]
        assert (document["exact"], head["weights"], head["last_row"]) == ("none", None, None)
        level = head["levels"][-1]
        up, across = level["query_block"], level["key_block"]
        for blocks in ((up, across), (3 * up, 2 * across)):
            tile = numbers(page, f"tile/0/0/0/{blocks[0]}/{blocks[1]}/0/0?channel=max")
            check_tile(tile, cases[0].level(0, *blocks)[1])
        for path in ("tile/0/0/0/1/1/0/0", f"tile/0/0/0/{up}/{across + 1}/0/0", "row/0/0/0/0"):
            status, body, _ = ask(page, path)
            assert status == 404
            assert b"not kept" in body
    small = trace.__class__(calls=trace.calls[1:])
    with serve(small, compare=small) as page:
        assert len(read_document(ask(page, "")[1])["traces"]) == 2
        np.testing.assert_allclose(numbers(page, "row/1/0/1/4"), trace[1].window(heads=[1])[0, 4], rtol=1e-6)
        assert ask(page, "row/2/0/0/1")[0] == 404


def read_document(body):
    text = body.decode()
    start = text.index(">", text.index('id="regard-document"')) + 1
    return json.loads(text[start : text.index("</script>", start)])


def test_the_page_names_its_chunks_and_the_server_has_them(page):
    status, body, headers = ask(page, "")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    document = read_document(body)
    assert document["exact"] == "served"
    for name, entry in document["chunks"].items():
        status, data, _ = ask(page, f"chunk/{name}")
        assert status == 200
        assert entry.get("deflate") or len(data) == entry["bytes"]
    assert b"</title> &" not in body, "titles are text"
    # The address without its slash leads to the page.
    status, _, head = ask_raw(page, root(page)[:-1])
    assert (status, f"Location: {root(page)}".encode() in head) == (308, True)


def test_answers_may_be_used_by_the_page_alone(page):
    for path in ("", "chunk/c0", "nothing"):
        _, _, headers = ask(page, path)
        names = ("X-Content-Type-Options", "Cache-Control", "Referrer-Policy")
        assert [headers[name] for name in names] == ["nosniff", "no-store", "no-referrer"]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert not [name for name in headers if name.lower().startswith("access-control-")]
        assert "Python" not in headers.get("Server", "")
        got, head = (ask_raw(page, root(page) + path, method=method) for method in ("GET", "HEAD"))
        assert head == (got[0], b"", got[2]), "HEAD is GET without the body"
        assert f"Content-Length: {len(got[1])}".encode() in head[2]
    assert "script-src 'sha256-" in ask(page, "")[2]["Content-Security-Policy"]


def test_without_the_secret_there_is_nothing(page, trace):
    token = root(page).strip("/")
    assert len(token) == 32
    with serve(trace.__class__(calls=trace.calls[1:])) as other:
        assert root(other) != root(page)
    wrong = ["/", f"/{token[:-1]}/", f"/{token}x/", f"/{token.swapcase()}/", "*", "/%00/", "/é/"]
    wrong += [f"http://127.0.0.1:{page.port}/{token}/", f"/{'a' * 32}/tile/0/0/0/1/1/0/0"]
    for path in wrong:
        status, body, headers = ask_raw(page, path)
        assert status == 404, path
        assert b"text/plain" in headers
        assert token.encode() not in body + headers


def test_other_names_of_the_host_other_methods_and_bodies_are_refused(page):
    path, port = root(page), page.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask_raw(page, path, f"Host: {host}")[0] == 200
    hosts = [f"evil.example:{port}", "127.0.0.1", "", f"127.0.0.1:{port + 1}"]
    for host in (*hosts, f"127.0.0.1:{port}.evil.example", f"0.0.0.0:{port}"):
        status, body, _ = ask_raw(page, path, f"Host: {host}")
        assert status == 403, host
        assert b"regard-document" not in body
    own = f"Host: 127.0.0.1:{port}"
    assert ask_raw(page, path, "Accept: */*")[0] == 403, "no name at all"
    assert ask_raw(page, path, own, "Host: evil.example")[0] == 403
    for method in ("POST", "OPTIONS", "CONNECT", "BREW"):
        status, _, headers = ask_raw(page, path, method=method)
        assert status == 405
        assert b"Allow: GET, HEAD" in headers
    assert ask_raw(page, path, own, "Content-Length: 5")[0] == 400
    assert ask_raw(page, path, own, "Transfer-Encoding: chunked")[0] == 400
    # A line without end.
    assert ask_raw(page, "/" + "a" * 70000)[0] == 414
    assert ask_raw(page, "/", "X: " + "a" * 70000)[0] == 431


FILES = ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "//etc/passwd", "%2e%2e/", "chunk/../c0", "chunk/"]
FILES += ["chunk/c0/", "chunk/C0", "chunk/%63%30", "page.html", "explorer/main.js"]
# What is at the end of tile/0/0/0/1/1/0/ and answered 400.
ENDS = ["0/0", "", "-1", "0x1", "+1", "1e3", "%31", "\xb2", 2**31, 10**30, "9" * 30000]
ENDS += [f"0?{end}" for end in ("channel=sum", "channel=", "channel=mass&channel=max", "x=1")]
TILES = {"0/0/0/0/1/0/0": 400, "0/0/0/1/0/0/0": 400, "0/0/0/1/1/2/0": 404}
TILES |= {"1/0/0/1/1/0/0": 404, "0/2/0/1/1/0/0": 404, "0/0/2/1/1/0/0": 404}
TILES |= {f"0/0/0/{2**31 - 1}/{2**31 - 1}/0/{n}": status for n, status in ((0, 200), (1, 404))}
OTHERS = {f"row/0/0/0/{T}": 404, f"row/0/0/0/{T - 1}": 200, "row/0/0/0": 400, f"column/0/0/0/{S}": 404}
OTHERS |= {"split/0/0/0/0/10/0/10": 404, "split/0/1/1/3/12/2/11": 404, "split/0/1/1/8/3/2/11": 404}


def test_there_are_no_files_and_numbers_out_of_range_are_refused(page):
    paths = dict.fromkeys(FILES, 404) | {f"tile/{path}": status for path, status in TILES.items()} | OTHERS
    paths |= {f"tile/0/0/0/1/1/0/{end}": 400 for end in ENDS}
    for path, status in paths.items():
        found, body, headers = ask_raw(page, root(page) + path)
        assert found == status, (path, body)
        if status != 200:
            assert b"text/plain" in headers
            assert len(body) < 300


def test_what_goes_wrong_inside_says_nothing_of_the_inside(page, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(exact_tiles.Tiles, "row", fail)
    status, body, _ = ask(page, "row/0/0/0/0")
    assert (status, body) == (500, b"RuntimeError: this could not be formed")
    assert ask(page, "column/0/0/0/0")[0] == 200


def request_only(page, path):
    connection = socket.create_connection(("127.0.0.1", page.port))
    connection.sendall(f"GET {root(page)}{path} HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode())
    return connection


@pytest.fixture
def slow_windows(monkeypatch):
    """Windows of few rows, each of which is noted, and takes a while."""
    monkeypatch.setattr(exact_tiles, "_STRIP_CELLS", 1000)
    formed, window = [], Call.window

    def wait(*arguments, **options):
        formed.append(options)
        time.sleep(0.05)
        return window(*arguments, **options)

    monkeypatch.setattr(Call, "window", wait)
    return formed


def test_what_nobody_waits_for_is_given_up_and_a_server_that_closes_forms_nothing_more(
    trace, slow_windows, capfd
):
    strips = math.ceil(T / (1000 // S))
    with serve(trace) as page:
        slow_windows.clear()
        gone = [request_only(page, f"tile/0/0/{head}/2/2/0/0?channel=mass") for head in (0, 1)]
        while not slow_windows:
            time.sleep(0.01)
        for connection in gone:
            connection.close()
        assert ask(page, "row/0/0/1/5")[0] == 200
        assert len(slow_windows) < strips // 2, "of the first head, and nothing of the second"
        assert {tuple(options["heads"]) for options in slow_windows[:-1]} in ({(0,)}, {(1,)})
        assert not page.is_busy()
        # It is formed for the next one that asks, until the server closes.
        slow_windows.clear()
        waiting = request_only(page, "tile/0/0/0/2/2/0/0?channel=mass")
        while not slow_windows:
            time.sleep(0.01)
        assert page.is_busy()
    assert not page.is_busy(5)
    assert len(slow_windows) < strips / 2
    waiting.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_large_heads_are_swept_once_for_coarse_tiles_and_exact_ones_do_not_wait(trace, cases, monkeypatch):
    monkeypatch.setattr(exact_tiles, "_FEW_CELLS", 0)
    monkeypatch.setattr(exact_tiles, "_STRIP_CELLS", 10_000)
    begun, go_on = threading.Event(), threading.Event()
    readout = Call.readout

    def wait(self, grid=64, **options):
        if grid == 512:
            begun.set()
            assert go_on.wait(60)
        return readout(self, grid=grid, **options)

    with serve(trace) as page, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(Call, "readout", wait)
        coarse = pool.submit(numbers, page, "tile/0/0/0/2/8/0/0?channel=mass")
        assert begun.wait(60)
        for path in ("tile/0/0/0/1/1/0/0", "row/0/0/0/7"):
            assert ask(page, path)[0] == 200
        assert not coarse.done()
        go_on.set()
        mass, largest, _ = cases[0].level(0, 2, 8)
        check_tile(coarse.result(), mass)
        check_tile(numbers(page, "tile/0/0/0/2/8/0/0?channel=max"), largest)


def test_closing_frees_the_port_of_this_machine_alone(trace):
    before = threading.active_count()
    page = serve(trace)
    assert page._server.server_address[0] == server.ADDRESS == "127.0.0.1"
    page.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port), timeout=5)
    with serve(trace, port=page.port) as again:
        assert again.port == page.port
        with pytest.raises(OSError, match="in use"):
            serve(trace, port=page.port)
    assert threading.active_count() <= before + 1
