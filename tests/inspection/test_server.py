"""The server: exact tiles at every size of blocks, one address with a secret, and nothing else behind it."""

import http.client
import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from page_traces import watch
from regard import attend, inspection, masks, scores
from regard.inspection.explorer import server, tiles
from regard.inspection.explorer.server import serve

H, T, S, D = 2, 300, 331, 7
OFFSET = S - T
EMPTY = (13, 17)  # rows that may attend to nothing


def allow():
    """Causal, and a few rows that read nothing."""
    rows = np.arange(T)[:, None]
    return (np.arange(S)[None] <= rows + OFFSET) & ~((rows >= EMPTY[0]) & (rows < EMPTY[1]))


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(3)
    query, key = (jnp.asarray(rng.normal(size=(1, H, n, D)), jnp.float32) for n in (T, S))
    with inspection.capture(title="</title> & more") as found:
        attend(query, key, key, mask=jnp.asarray(allow()), score=scores.softcap(5.0), query_offset=OFFSET)
        attend(query[:, :, :3], key[:, :1, :5], key[:, :1, :5])
    return found


@pytest.fixture(scope="module")
def weights(trace):
    """In float64, by the definition."""
    problem = trace.calls[0].problem
    logits = np.asarray(problem.query, np.float64) @ np.asarray(problem.key, np.float64).swapaxes(-1, -2)
    logits = np.where(allow(), 5.0 * np.tanh(logits / math.sqrt(D) / 5.0), -np.inf)
    shares = np.exp(logits - np.where(np.isfinite(logits.max(-1)), logits.max(-1), 0)[..., None])
    total = shares.sum(-1, keepdims=True)
    return np.divide(shares, total, where=total > 0, out=np.zeros_like(shares))


@pytest.fixture(scope="module")
def page(trace):
    with serve(trace) as serving:
        yield serving


def ask(page, path, *, method="GET", headers=None, whole=False):
    """One request, with the right secret unless the path is whole."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    token = page.url.split("/")[3]
    try:
        connection.request(method, path if whole else f"/{token}/{path}", headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def numbers(page, path):
    status, body, headers = ask(page, path)
    assert status == 200, body
    assert headers["Content-Type"] == "application/octet-stream"
    return np.frombuffer(body, "<f4")


def reduce_dense(weights, rows, keys):
    """Mass and max of all blocks, in float64."""
    starts, across = np.arange(0, T, rows), np.arange(0, S, keys)
    living = np.maximum(np.add.reduceat(allow().any(-1).astype(int), starts), 1)
    mass, largest = (
        join.reduceat(join.reduceat(weights, starts, 0), across, 1) for join in (np.add, np.maximum)
    )
    return mass / living[:, None], largest


# Numbers


@pytest.mark.parametrize(
    "blocks", [(1, 1), (1, 2), (2, 2), (4, 1), (3, 5), (8, 8), (16, 32), (512, 512)], ids=str
)
def test_tiles_are_those_of_the_definition(page, weights, blocks):
    """Whole matrices put together from tiles; beyond the edge there is nothing but NaN."""
    expected = reduce_dense(weights[1], *blocks)
    for channel, dense in zip(("mass", "max"), expected, strict=True):
        grid = [-(-size // 256) for size in dense.shape]
        found = np.full([256 * n for n in grid], -1.0)
        for i, j in np.ndindex(*grid):
            tile = numbers(page, f"tile/0/0/1/{blocks[0]}/{blocks[1]}/{i}/{j}?channel={channel}")
            found[256 * i : 256 * i + 256, 256 * j : 256 * j + 256] = tile.reshape(256, 256)
        inside = found[: dense.shape[0], : dense.shape[1]]
        np.testing.assert_allclose(inside, dense, rtol=3e-5, atol=1e-7)
        assert np.isnan(found).sum() == found.size - inside.size


def test_a_coarse_tile_says_the_same_from_weights_and_from_blocks(trace):
    call = trace.calls[0]
    part = tiles._Part(0, 16, 32, (0, min(16 * tiles.SIDE, call.rows)), (0, min(32 * tiles.SIDE, call.keys)))
    from_blocks = tiles._join_blocks(call, part)
    from_weights = tiles._join_weights(call, part)
    for one, other in zip(from_blocks, from_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_large_heads_are_swept_once_for_coarse_tiles(trace, weights, monkeypatch):
    """With little time for weights, tiles come from a finer readout, and strips are short."""
    monkeypatch.setattr(tiles, "_FEW_CELLS", 0)
    monkeypatch.setattr(tiles, "_STRIP_CELLS", 1000)
    found = tiles.Tiles([trace])
    for blocks in ((1, 1), (2, 2), (2, 1), (4, 8)):
        mass, largest = reduce_dense(weights[0], *blocks)
        for channel, dense in (("mass", mass), ("max", largest)):
            tile = found.tile(
                0, 0, 0, query_block=blocks[0], key_block=blocks[1], row=0, column=0, channel=channel
            )
            inside = tile[: min(256, dense.shape[0]), : min(256, dense.shape[1])]
            np.testing.assert_allclose(inside, dense[:256, :256], rtol=3e-5, atol=1e-7)


def test_empty_rows_weigh_nothing(page):
    tile = numbers(page, "tile/0/0/0/1/1/0/0").reshape(256, 256)
    assert (tile[slice(*EMPTY)] == 0).all()
    assert (tile[EMPTY[1], : EMPTY[1] + OFFSET + 1] > 0).all()


def test_rows_and_columns_are_exact(page, weights):
    for row in (0, EMPTY[0], T - 1):
        np.testing.assert_allclose(numbers(page, f"row/0/0/1/{row}"), weights[1, row], rtol=3e-5, atol=1e-8)
    for column in (0, 97, S - 1):
        np.testing.assert_allclose(
            numbers(page, f"column/0/0/0/{column}"), weights[0, :, column], rtol=3e-5, atol=1e-8
        )


def test_small_calls_are_served_with_nan_beyond_their_edge(page, trace):
    tile = numbers(page, "tile/0/1/1/1/1/0/0").reshape(256, 256)
    np.testing.assert_allclose(tile[:3, :5], trace.calls[1].window(heads=[1])[0], rtol=1e-6)
    assert np.isnan(tile).sum() == 256 * 256 - 15


@pytest.mark.slow
def test_scores_are_split(weights):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(1, 2, 11, 3)), jnp.float32)
    with inspection.capture() as trace:
        attend(x, x, x, mask=masks.causal(), score=scores.alibi(2))
    with serve(trace) as page:
        content, bias, both = numbers(page, "split/0/0/1/3/8/2/11").reshape(3, 5, 9)
        assert ask(page, "split/0/0/1/3/12/2/11")[0] == 404
        assert ask(page, "split/0/0/1/8/3/2/11")[0] == 404
    array = np.asarray(x[0, 1], np.float64)
    expected = (array @ array.T / math.sqrt(3))[3:8, 2:11]
    slope = 2.0**-8
    distance = np.arange(3, 8)[:, None] - np.arange(2, 11)[None]
    kept = distance >= 0
    assert (np.isnan(content) == ~kept).all()
    np.testing.assert_allclose(content[kept], expected[kept], rtol=1e-4)
    np.testing.assert_allclose(bias[kept], (-slope * distance)[kept], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(both[kept], (expected - slope * distance)[kept], rtol=1e-4)


@pytest.mark.slow
def test_what_is_not_a_number_is_drawn_as_0():
    x = jnp.ones((1, 1, 5, 3)).at[0, 0, 2].set(jnp.nan)
    with inspection.capture() as trace:
        attend(x, x, x, mask=masks.causal())
    with serve(trace) as page:
        tile = numbers(page, "tile/0/0/0/1/1/0/0").reshape(256, 256)[:5, :5]
    assert np.isfinite(tile).all()
    assert tile[1, :2].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.slow
def test_without_queries_and_keys_there_is_what_was_saved(trace, tmp_path):
    trace.save(tmp_path / "s.regard", keep="statistics")
    with serve(inspection.load(tmp_path / "s.regard")) as page:
        document = read_document(ask(page, "")[1])
        assert document["exact"] != "served"
        level = document["traces"][0]["calls"][0]["head"][0]["levels"][-1]
        blocks = level["query_block"], level["key_block"]
        tile = numbers(page, f"tile/0/0/0/{blocks[0]}/{blocks[1]}/0/0")
        mine = tiles.Tiles([trace]).tile(0, 0, 0, query_block=blocks[0], key_block=blocks[1], row=0, column=0)
        np.testing.assert_allclose(tile.reshape(256, 256), mine, rtol=1e-2, atol=1e-6)
        for path in ("tile/0/0/0/1/1/0/0", "row/0/0/0/0", "column/0/0/0/0"):
            status, body, _ = ask(page, path)
            assert status == 404
            assert b"not kept" in body


def test_tiles_of_a_file_come_from_its_own_blocks(tmp_path):
    """Of few queries and many keys, and of the most detail that the file holds."""
    found, weights, *_ = watch(61, 149, heads=1)
    loaded = inspection.load(found.save(tmp_path / "s.regard", grid=128, top_k=3))
    for blocks in ((1, 2), (1, 4), (2, 4), (6, 2)):
        starts, across = np.arange(0, 61, blocks[0]), np.arange(0, 149, blocks[1])
        largest = np.maximum.reduceat(np.maximum.reduceat(weights[0], starts, 0), across, 1)
        tile = tiles.Tiles([loaded]).tile(0, 0, 0, *blocks, row=0, column=0, channel="max")
        np.testing.assert_allclose(tile[: largest.shape[0], : largest.shape[1]], largest, rtol=3e-5)
        assert np.isnan(tile).sum() == tile.size - largest.size
    for blocks in ((1, 1), (2, 3)):
        with pytest.raises(ValueError, match="not kept"):
            tiles.Tiles([loaded]).tile(0, 0, 0, *blocks, row=0, column=0)


@pytest.mark.slow
def test_a_second_trace_is_served_beside_the_first(trace):
    x = jnp.eye(3)[None]
    with inspection.capture() as other:
        attend(x, x, x)
    with serve(trace, compare=other) as page:
        np.testing.assert_allclose(numbers(page, "row/1/0/0/1"), other.calls[0].window()[0, 1], rtol=1e-6)
        assert ask(page, "row/2/0/0/1")[0] == 404
        assert len(read_document(ask(page, "")[1])["traces"]) == 2


# The page


def read_document(body):
    text = body.decode()
    start = text.index('id="regard-document"')
    start = text.index(">", start) + 1
    return json.loads(text[start : text.index("</script>", start)])


def test_the_page_names_its_chunks_and_the_server_has_them(page):
    status, body, headers = ask(page, "")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    document = read_document(body)
    assert document["exact"] == "served"
    assert document["chunks"]
    for name, entry in document["chunks"].items():
        status, data, _ = ask(page, f"chunk/{name}")
        assert status == 200
        assert entry.get("deflate") or len(data) == entry["bytes"]
    assert b"</title> &" not in body, "titles are text"


def test_answers_may_be_used_by_the_page_alone(page):
    for path in ("", "chunk/c0", "tile/0/0/0/1/1/0/0", "nothing"):
        _, _, headers = ask(page, path)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert not [name for name in headers if name.lower().startswith("access-control-")]
        assert "Python" not in headers.get("Server", "")
    assert "script-src 'sha256-" in ask(page, "")[2]["Content-Security-Policy"]


def test_head_is_get_without_the_body(page):
    for path in ("", "chunk/c0", "row/0/0/0/3", "nothing"):
        whole = page.url.partition(str(page.port))[2] + path
        got, head = ask_raw(page, whole), ask_raw(page, whole, method="HEAD")
        assert head == (got[0], b"", got[2])
        assert f"Content-Length: {len(got[1])}".encode() in head[2]


def test_the_address_without_its_slash_leads_to_the_page(page):
    status, _, headers = ask(page, page.url.removesuffix("/").partition(str(page.port))[2], whole=True)
    assert (status, headers["Location"]) == (308, page.url.partition(str(page.port))[2])


# Refusals


def test_without_the_secret_there_is_nothing(page, trace):
    token = page.url.split("/")[3]
    assert len(token) == 32
    with serve(trace.__class__(calls=trace.calls[1:])) as other:
        assert other.url.split("/")[3] != token
    wrong = [
        "/",
        f"/{token[:-1]}/",
        f"/{token}x/",
        f"/{token.swapcase()}/",
        "/favicon.ico",
    ]
    wrong += [
        f"http://127.0.0.1:{page.port}/{token}/",
        "*",
        f"/{'a' * 32}/tile/0/0/0/1/1/0/0",
        "/%00/",
        "/é/",
    ]
    for path in wrong:
        status, body, headers = ask_raw(page, path)
        assert status == 404, path
        assert b"text/plain" in headers
        assert token.encode() not in body + headers


def ask_raw(page, path, *lines, method="GET"):
    """A request as bytes, with nothing made right on the way."""
    lines = lines or (f"Host: 127.0.0.1:{page.port}",)
    text = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as connection:
        connection.sendall(text.encode("latin-1"))
        data = b""
        while part := connection.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else None), body, head


def test_other_names_of_the_host_are_refused(page):
    path = page.url.partition(str(page.port))[2]
    for host in (f"127.0.0.1:{page.port}", f"localhost:{page.port}"):
        assert ask_raw(page, path, f"Host: {host}")[0] == 200
    hosts = [
        "evil.example",
        f"evil.example:{page.port}",
        "127.0.0.1",
        "localhost",
        "",
        f"127.0.0.1:{page.port + 1}",
    ]
    hosts += [f"127.0.0.1:{page.port}.evil.example", f"0.0.0.0:{page.port}", f"[::1]:{page.port}"]
    for host in hosts:
        status, body, _ = ask_raw(page, path, f"Host: {host}")
        assert status == 403, host
        assert b"regard-document" not in body
    assert ask_raw(page, path, "Accept: */*")[0] == 403, "no name at all"
    twice = (f"Host: 127.0.0.1:{page.port}", "Host: evil.example")
    assert ask_raw(page, path, *twice)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_not_allowed(page, method):
    status, _, headers = ask_raw(page, page.url.partition(str(page.port))[2], method=method)
    assert status == 405
    assert b"Allow: GET, HEAD" in headers


def test_nothing_is_taken(page):
    path = page.url.partition(str(page.port))[2]
    host = f"Host: 127.0.0.1:{page.port}"
    assert ask_raw(page, path, host, "Content-Length: 5")[0] == 400
    assert ask_raw(page, path, host, "Transfer-Encoding: chunked")[0] == 400


FILES = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "chunk/../c0",
    "chunk/..",
    "chunk/",
    "chunk/c0/",
    "chunk/C0",
]
FILES += [
    "chunk/%63%30",
    "/etc/passwd",
    "//etc/passwd",
    "page.html",
    "explorer/main.js",
    "%2e%2e/",
    "./",
    "chunk/c0\\",
]


@pytest.mark.parametrize("path", FILES)
def test_there_are_no_files(page, path):
    status, body, _ = ask_raw(page, page.url.partition(str(page.port))[2] + path)
    assert status == 404
    assert len(body) < 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("tile/0/0/0/1/1/0", 400),
        ("tile/0/0/0/1/1/0/0/0", 400),
        ("tile/0/0/0/1/1/0/", 400),
        ("tile/0/0/0/1/1/0/-1", 400),
        ("tile/0/0/0/1/1/0/0x1", 400),
        ("tile/0/0/0/1/1/0/+1", 400),
        ("tile/0/0/0/1/1/0/1e3", 400),
        ("tile/0/0/0/1/1/0/%31", 400),
        ("tile/0/0/0/1/1/0/\xb2", 400),
        ("tile/0/0/0/0/1/0/0", 400),
        ("tile/0/0/0/1/0/0/0", 400),
        (f"tile/0/0/0/1/1/0/{10**9}", 404),
        (f"tile/0/0/0/1/1/0/{2**31}", 400),
        (f"tile/0/0/0/1/1/0/{10**30}", 400),
        (f"tile/0/0/0/{'9' * 30000}/1/0/0", 400),
        ("tile/0/0/0/1/1/0/0?channel=sum", 400),
        ("tile/0/0/0/1/1/0/0?channel=", 400),
        ("tile/0/0/0/1/1/0/0?channel=mass&channel=max", 400),
        ("tile/0/0/0/1/1/0/0?other=1", 400),
        ("tile/1/0/0/1/1/0/0", 404),
        ("tile/0/2/0/1/1/0/0", 404),
        ("tile/0/0/2/1/1/0/0", 404),
        ("tile/0/0/0/1/1/2/0", 404),
        ("tile/0/0/0/1/1/0/2", 404),
        ("tile/0/0/0/2147483647/2147483647/0/0", 200),
        ("tile/0/0/0/2147483647/2147483647/0/1", 404),
        (f"row/0/0/0/{T}", 404),
        (f"row/0/0/0/{T - 1}", 200),
        ("row/0/0/0", 400),
        (f"column/0/0/0/{S}", 404),
        ("split/0/0/0/0/10/0/10", 404),
        ("rows/0/0/0/0", 404),
    ],
)
def test_numbers_out_of_range_are_refused(page, path, status):
    found, body, headers = ask_raw(page, page.url.partition(str(page.port))[2] + path)
    assert found == status, body
    if status != 200:
        assert b"text/plain" in headers
        assert len(body) < 300


def test_a_line_without_end_is_refused(page):
    assert ask_raw(page, "/" + "a" * 70000)[0] == 414
    assert ask_raw(page, "/", "X: " + "a" * 70000)[0] == 431


def test_what_goes_wrong_inside_says_nothing_of_the_inside(trace, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(tiles.Tiles, "row", fail)
    with serve(trace) as page:
        status, body, _ = ask(page, "row/0/0/0/0")
        assert (status, body) == (500, b"RuntimeError: this could not be formed")
        assert ask(page, "column/0/0/0/0")[0] == 200


# Many at once, and the end


@pytest.mark.slow
def test_many_requests_at_once(page, weights):
    paths = [f"row/0/0/{n % 2}/{n}" for n in range(20, 60)] * 2
    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(lambda path: numbers(page, path), paths))
    for path, row in zip(paths, rows, strict=True):
        head, index = (int(part) for part in path.split("/")[3:])
        np.testing.assert_allclose(row, weights[head, index], rtol=3e-5, atol=1e-8)


def test_one_connection_serves_many_requests(page):
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    path = page.url.partition(str(page.port))[2]
    for kind, status in (("row/0/0/0/1", 200), ("nothing", 404), ("", 200), ("row/0/0/0/2", 200)):
        connection.request("GET", path + kind)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def test_a_reader_that_leaves_is_no_trouble(page, capfd):
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", page.port)) as connection:
            connection.sendall(f"GET {page.url.partition(str(page.port))[2]} HTTP/1.1\r\n".encode())
    assert ask(page, "")[0] == 200
    assert capfd.readouterr() == ("", "")


def request_only(page, path):
    """Send a request, and wait for no answer."""
    connection = socket.create_connection(("127.0.0.1", page.port))
    host = f"127.0.0.1:{page.port}"
    secret = page.url.split("/")[3]
    connection.sendall(f"GET /{secret}/{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return connection


@pytest.fixture
def slow_windows(trace, monkeypatch):
    """Windows of few rows, each of which is noted, and takes a while."""
    monkeypatch.setattr(tiles, "_STRIP_CELLS", 1000)
    formed, window = [], trace.calls[0].__class__.window

    def wait(*arguments, **options):
        formed.append(options)
        time.sleep(0.05)
        return window(*arguments, **options)

    monkeypatch.setattr(trace.calls[0].__class__, "window", wait)
    return formed


@pytest.mark.slow
def test_what_nobody_waits_for_is_given_up(trace, slow_windows, capfd):
    with serve(trace) as page:
        slow_windows.clear()
        gone = [request_only(page, f"tile/0/0/{head}/2/2/0/0?channel=mass") for head in (0, 1)]
        while not slow_windows:
            time.sleep(0.01)
        for connection in gone:
            connection.close()
        assert ask(page, "row/0/0/1/5")[0] == 200
        rows = math.ceil(T / (1000 // S))
        assert len(slow_windows) < rows // 2, "of the first head, and nothing of the second"
        assert {tuple(options["heads"]) for options in slow_windows[:-1]} in ({(0,)}, {(1,)})
        assert not page.is_busy()
        # It is formed for the next one that asks.
        assert ask(page, "tile/0/0/0/2/2/0/0?channel=mass")[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_server_that_closes_forms_nothing_more(trace, slow_windows):
    page = serve(trace)
    slow_windows.clear()
    waiting = request_only(page, "tile/0/0/0/2/2/0/0?channel=mass")
    while not slow_windows:
        time.sleep(0.01)
    assert page.is_busy()
    page.close()
    assert not page.is_busy(5)
    assert len(slow_windows) < T / (1000 // S) / 2
    waiting.close()


@pytest.mark.slow
def test_exact_tiles_do_not_wait_for_a_sweep(trace, monkeypatch):
    monkeypatch.setattr(tiles, "_FEW_CELLS", 0)
    begun, go_on = threading.Event(), threading.Event()
    readout = trace.calls[0].__class__.readout

    def wait(self, grid=64, **options):
        if grid == 512:
            begun.set()
            assert go_on.wait(30)
        return readout(self, grid=grid, **options)

    with serve(trace) as page, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(trace.calls[0].__class__, "readout", wait)
        coarse = pool.submit(ask, page, "tile/0/0/0/2/2/0/0?channel=mass")
        assert begun.wait(30)
        for path in ("tile/0/0/0/1/1/0/0", "row/0/0/0/7"):
            assert ask(page, path)[0] == 200
        assert not coarse.done()
        go_on.set()
        assert coarse.result()[0] == 200


def test_the_cache_forgets_what_was_asked_for_the_longest_ago(trace, monkeypatch):
    monkeypatch.setattr(tiles, "CACHE_BYTES", 5 * 4 * S)
    found = tiles.Tiles([trace])
    formed = []
    monkeypatch.setattr(
        trace.calls[0].__class__, "window", count_calls(trace.calls[0].__class__.window, formed)
    )
    for row in (0, 1, 2, 3, 4, 0, 5, 0, 1):
        found.row(0, 0, 0, row)
    assert len(formed) == 7, "row 1 was forgotten when row 5 came, row 0 was not"
    assert found._bytes <= 5 * 4 * S


def count_calls(function, calls):
    def counted(*arguments, **options):
        calls.append(options)
        return function(*arguments, **options)

    return counted


def test_a_tile_is_formed_once_for_both_channels(trace, monkeypatch):
    found, formed = tiles.Tiles([trace]), []
    monkeypatch.setattr(
        trace.calls[0].__class__, "window", count_calls(trace.calls[0].__class__.window, formed)
    )
    for channel in ("mass", "max", "mass"):
        found.tile(0, 0, 0, query_block=1, key_block=1, row=1, column=0, channel=channel)
    assert len(formed) == 1


def test_closing_frees_the_port_and_may_be_done_twice(trace):
    before = threading.active_count()
    page = serve(trace)
    page.close()
    page.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port), timeout=5)
    with serve(trace, port=page.port) as again:
        assert again.port == page.port
        with pytest.raises(OSError, match="in use"):
            serve(trace, port=page.port)
    assert threading.active_count() <= before + 1


def test_only_this_machine_is_listened_to(page):
    assert page._server.server_address[0] == "127.0.0.1"
    assert server.ADDRESS == "127.0.0.1"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_named(trace, port):
    with pytest.raises(ValueError, match=f"port: expected a number in 0..65535, got {port}"):
        serve(trace, port=port)
