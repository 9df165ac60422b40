"""The explorer's page: what is in it besides weights, its size, and that it is safe to open."""

import base64
import functools
import html
import itertools
import math
import re
import zlib
from unittest import mock

import numpy as np

from page_traces import opened, small, watch
from refusals import assert_refused
from regard import attend, inspection, masks, scores
from regard.inspection.explorer import pages, thumbnails
from regard.inspection.explorer.mask_outlines import draw_tiles, find_borders, find_reach
from regard.inspection.tokens import Tokens
from regard.inspection.traces.calls import KnownPositions
from regard.positions import Rotary, YaRN


@functools.cache
def middling():
    return watch(131, mask=masks.causal())[0]


def test_the_mask_is_drawn(bare):
    mask = masks.causal() & masks.sliding_window(9) & masks.segments(np.repeat(np.arange(3), [3, 3, 5]))
    assert np.array_equal(draw_tiles(mask, 11, 11)[0], np.where(mask.dense(11), 2, 0))
    assert (find_borders(mask), find_reach(mask)) == ([3, 6], (9, 0))
    document, chunks = opened(pages.html(small()))
    call = document["traces"][0]["calls"][0]
    assert np.array_equal(chunks[call["mask_picture"]], 2 * np.tri(11))
    assert (call["tile_rows"], call["mask"]) == (1, "causal()")
    tiles, rows, keys = draw_tiles(masks.causal(), 521, 521)
    assert (rows, keys, find_reach(masks.causal()), find_borders(masks.causal())) == (4, 4, (None, 0), None)
    # On the diagonal, tiles are cut in two; the last one is a single cell.
    assert np.array_equal(tiles, np.tril(np.full((131, 131), 2)) - np.diag([1] * 130 + [0]))


def test_positions_are_drawn(bare):
    trace = small(score=scores.alibi(3))
    turn = Rotary(base=100.0, width=4, scaling=YaRN(4.0, 2048))
    object.__setattr__(trace.calls[0], "positions", KnownPositions(rotary=turn))
    table = np.random.default_rng(0).normal(size=(13, 7))
    table[5] = 0
    document, chunks = opened(pages.html(trace, positions={"mine": table}))
    rotary, bias, drawn, split = document["positions"]
    assert [place["kind"] for place in document["positions"]] == ["rotary", "bias", "table", "split"]
    turned = np.asarray(turn(np.ones((4097, 5), np.float32)), np.float64)
    kernel = chunks[rotary["kernel"]]
    assert rotary["trained_length"] == 2048
    # Every pair of features has the same share of a vector of ones: q . k / |q|^2.
    assert np.allclose(kernel, (turned[rotary["distances"]] @ turned[0]) / 5, atol=1e-4)
    assert bias["distances"] == list(range(11))
    slope = 2.0 ** -np.array([4.0, 8.0, 2.0])  # of three heads
    assert np.allclose(chunks[bias["values"]], -np.arange(11) * slope[:, None])
    unit = table / np.where(np.arange(13) == 5, np.nan, np.linalg.norm(table, axis=-1))[:, None]
    assert np.allclose(chunks[drawn["similarity"]], unit @ unit.T, atol=2 / 500, equal_nan=True)
    assert np.allclose(chunks[drawn["norms"]], np.linalg.norm(table, axis=-1))
    parts = {name: chunks[split[name]].astype(np.float64) for name in ("content", "bias", "both")}
    distance = np.subtract.outer(np.arange(11), np.arange(11))
    assert np.array_equal(np.isnan(parts["bias"]), distance < 0)
    added = np.where(distance < 0, np.nan, -slope[split["head"]] * distance)
    assert np.allclose(parts["bias"], added, atol=3e-3, equal_nan=True)
    assert np.allclose(parts["content"] + parts["bias"], parts["both"], atol=2e-2, equal_nan=True)


HOSTILE = ["</script><script>alert(1)</script>", "<!--", "\u2028\u2029", "\0", "\ud800", "x" * 10_000]
HOSTILE += ["&lt;", '"', "]]>", "\u05e9\u200f", "\U0001f469\u200d\U0001f467"]


def test_hostile_texts_stay_texts(bare):
    trace = small(tokens=Tokens(HOSTILE), title="</script><img src=x onerror=alert(1)>\u2028\ud800\0")
    page = pages.html(trace)
    data = page.split("</title>")[1]
    assert data.count("</script") == data.count("<script")
    assert "<img" not in page
    assert "\0" not in page
    assert page.isascii() or not re.search("[\u2028\u2029]", data)
    document, chunks = opened(page)
    assert chunks[document["traces"][0]["sequences"][0]["tokens"]] == HOSTILE
    assert document["title"] == trace.title
    assert "&lt;/script&gt;" in page.split("</title>")[0]


def test_pictures_of_patches_are_kept_small(bare):
    picture = np.zeros((1030, 7, 3), np.uint8)
    picture[:3, :3] = 90
    tokens = Tokens(11, patch_grid=(2, 5), first_patch=1, picture=picture)
    document, chunks = opened(pages.html(small(tokens=tokens)))
    sequence = document["traces"][0]["sequences"][0]
    shown = chunks[sequence["picture"]]
    assert (sequence["kind"], sequence["patch_grid"], sequence["first_patch"]) == ("patches", [2, 5], 1)
    assert (shown.shape, shown[0, 0, 0], shown[1:].any()) == ((344, 3, 3), 90, False)
    assert "A picture of 7 x 1030 pixels is shown in 3 x 344." in document["notes"]


def test_what_is_not_a_number_is_said(bare):
    query = np.full((1, 3, 11, 5), np.nan, np.float32)
    with inspection.capture() as trace:
        attend(query, query, query, mask=masks.causal(), scale=1.5)
    document, chunks = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert call["trust"] == [None] * 3
    assert "attention 0: some weights are not numbers; they are drawn as 0." in document["notes"]
    assert not chunks[call["head"][0]["levels"][0]["mass"]].any()


def test_a_page_that_would_be_too_large_leaves_things_out_and_says_so(long, tmp_path, caplog):
    trace = middling()
    whole = pages.html(trace)
    assert opened(whole)[0]["notes"] == []
    seen, size = [], len(whole)
    while True:
        try:
            page = pages.html(trace, max_mb=(size - 1) / 1e6)
        except ValueError as error:
            least = float(re.search(r"max_mb: expected at least ([\d.]+) for", str(error))[1])
            break
        assert len(page) < size
        size, (document, chunks) = len(page), opened(page)
        seen.append(document["notes"])
        heads = document["traces"][0]["calls"][0]["head"]
        assert sum(len(head["levels"]) == 2 for head in heads) == len(document["pinned"])
    assert max(chunks[heads[0]["levels"][-1]["mass"]].shape) <= 32, "the atlas"
    assert all(a == b[: len(a)] and len(a) < len(b) for a, b in itertools.pairwise(seen))
    words = [note.removeprefix("To keep the file small, ").split(" ")[1] for note in seen[-1]]
    assert words == ["8", "and", "along", "atlas", "largest", "1", "head"]
    assert pages.html(trace, max_mb=math.inf, pinned=np.int64(8)) == whole
    pages.html(trace, max_mb=least)
    # What was left out is logged.
    pages.write(trace, tmp_path / "a.html", max_mb=(len(whole) - 1) / 1e6)
    assert "a.html: To keep the file small, the 8 largest weights" in caplog.text


def test_pinned_heads_are_the_clearest_or_those_asked_for(long):
    far = np.zeros((1, 3, 11, 11), np.float32)
    far[0, 1] = 30 * np.eye(11, k=-1)  # to the token before
    keys = np.broadcast_to(np.eye(11, dtype=np.float32), far.shape)
    trace = inspection.Trace.from_arrays(query=[far], key=[keys], mask=masks.causal(), scale=1.0)
    for pinned, chosen in ((1, [[0, 1]]), ([(0, 2), (0, 2), (0, 0)], [[0, 2], [0, 0]]), (0, [])):
        assert opened(pages.html(trace, pinned=pinned))[0]["pinned"] == chosen
    table, fill = [[1.0], [1.0, 2.0]], functools.partial(pages.html, trace)
    assert_refused(
        (lambda: fill(pinned=[(0, 3)]), r"pinned: expected pairs .*got \(0, 3\)"),
        (lambda: fill(cut=[(1, 0)]), r"cut: expected pairs of a call in 0..0 .*got \(1, 0\)"),
        (lambda: fill(pinned=-1), "pinned: expected a number of heads of at least 0"),
        (lambda: fill(max_mb=0), "max_mb: expected more than 0"),
        (lambda: fill(pinned="ab"), "pinned: expected a number of heads, or pairs .*; got 'ab'", TypeError),
        (lambda: fill(pin=2), "pin: expected an option among compare, .*mean 'pinned'", TypeError),
        (lambda: fill(positions={"learned": table}), "table 'learned': .*of one length", TypeError),
    )


def test_a_page_is_written_whole_and_other_files_are_not_replaced(bare, tmp_path, monkeypatch):
    write = functools.partial(pages.write, inspection.Trace())
    thesis, empty = tmp_path / "thesis.html", tmp_path / "empty.html"
    thesis.write_text("<html>years of work</html>")
    empty.touch()
    assert write(str(empty)) == empty
    whole = empty.read_bytes()
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=OSError("the disk is full")))
    assert_refused((lambda: pages.write(small(), empty), "the disk is full", OSError))
    assert empty.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.html", "thesis.html"]
    assert_refused(
        (lambda: write(thesis), "something else: name another file, or remove it first", FileExistsError),
        (lambda: write(tmp_path), "the folder", FileExistsError),
        (lambda: write(tmp_path / "nowhere" / "page.html"), "none is there; make it", FileNotFoundError),
    )
    assert thesis.read_text() == "<html>years of work</html>"


def test_notebooks_get_a_frame_a_picture_and_characters(bare):
    trace = small(tokens=[*"abcdefghij", '"><script>'], title='a "title"')
    shown = pages.bundle(trace)
    frame = r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts allow-downloads" title="a &quot;title&quot;"'
    assert opened(html.unescape(re.match(frame, shown["text/html"])[1]))[0]["title"] == 'a "title"'
    assert base64.b64decode(shown["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    lines = shown["text/plain"].split("\n")
    assert lines[2].startswith("|")
    assert "3 heads" in lines[0]
    # Causal: the first row attends to the first key alone, the darkest there is.
    assert all(one.startswith("█") and one.endswith(" ") for one in lines[2].strip("|").split("|  |"))
    assert "too large to be shown here" in pages.bundle(trace, max_mb=0.001)["text/html"]
    assert pages.bundle(inspection.Trace()).keys() == shown.keys()


def test_anything_has_a_thumbnail(bare):
    for trace in (watch(0, 3)[0], middling()):
        png = thumbnails.draw_png(trace)
        assert png.endswith(b"IEND\xaeB`\x82")
        assert thumbnails.draw_text(trace).count("\n") == 5
    width, height = np.frombuffer(png[16:24], ">u4")
    data = zlib.decompress(png[png.index(b"IDAT") + 4 : -16])
    pixels = np.frombuffer(data, np.uint8).reshape(height, 1 + 3 * width)
    assert not pixels[:, 0].any()
    assert len(np.unique(pixels[:, 1:].reshape(height, width, 3)[6:30, 6:30].reshape(-1, 3), axis=0)) > 10
