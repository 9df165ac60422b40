"""The explorer's page: what is in it besides weights, its size, and that it is safe to open."""

import base64
import html
import itertools
import json
import math
import re
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from page_traces import BARE, opened, small, watch
from regard import attend, inspection, masks, scores
from regard.inspection.explorer import pages, payload, thumbnails
from regard.inspection.explorer.budgets import Plan, degrade
from regard.inspection.explorer.mask_outlines import draw_tiles, find_band, find_borders
from regard.inspection.tokens import Tokens
from regard.inspection.traces.calls import KnownPositions
from regard.positions import Rotary, YaRN


@pytest.fixture
def bare(monkeypatch):
    """Pages of data alone."""
    monkeypatch.setattr(pages, "load_shell", lambda: BARE)


@pytest.fixture
def long(monkeypatch, bare):
    """Short calls are treated as if they were long."""
    monkeypatch.setattr(payload, "LARGEST_EXACT", -1)


@pytest.mark.slow
def test_the_mask_is_drawn(bare):
    ids = jnp.asarray(np.repeat(np.arange(3), [3, 3, 5]))
    mask = masks.causal() & masks.sliding_window(9) & masks.segments(ids)
    document, chunks = opened(pages.html(small(mask=mask)))
    call = document["traces"][0]["calls"][0]
    dense = np.asarray(mask.dense(11))
    assert np.array_equal(chunks[call["mask_picture"]], np.where(dense, 2, 0))
    assert (call["tile_rows"], call["borders"], call["window"]) == (1, [3, 6], [9, 0])
    assert "sliding_window(9" in call["mask"]
    tiles, rows, keys = draw_tiles(masks.causal(), 521, 521)
    assert (rows, keys, find_band(masks.causal()), find_borders(masks.causal())) == (4, 4, None, None)
    # On the diagonal, tiles are cut in two; the last one is a single cell.
    assert np.array_equal(tiles, np.tril(np.full((131, 131), 2)) - np.diag([1] * 130 + [0]))
    assert draw_tiles(masks.causal(), 256, 257, query_offset=1)[1:] == (1, 2)
    none = opened(pages.html(small(mask=None)))[0]["traces"][0]["calls"][0]
    assert (none["mask"], none["mask_picture"], none["window"]) == (None, None, None)


@pytest.mark.slow
def test_positions_are_drawn(bare):
    trace = small(score=scores.alibi(3))
    turn = Rotary(base=100.0, width=4, scaling=YaRN(4.0, 2048))
    object.__setattr__(trace.calls[0], "positions", KnownPositions(rotary=turn))
    table = np.random.default_rng(0).normal(size=(13, 7))
    table[5] = 0
    document, chunks = opened(pages.html(trace, positions={"mine": table}))
    rotary, bias, drawn, split = document["positions"]
    assert [place["kind"] for place in document["positions"]] == ["rotary", "bias", "table", "split"]

    vector = jnp.ones((4097, 5), jnp.float32)
    turned = np.asarray(turn(vector), np.float64)
    kernel = chunks[rotary["kernel"]]
    assert rotary["trained_length"] == 2048
    # Every pair of features has the same share of a vector of ones: q . k / |q|^2.
    truth = (turned[rotary["distances"]] @ turned[0]) / 5
    assert np.allclose(kernel, truth, atol=1e-4)
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


@pytest.mark.slow
def test_training_is_drawn(bare):
    trace = small()
    training = {
        "title": "run",
        "curves": [
            {"name": "loss", "unit": "nats", "points": [[1, 2, 5], [3.0, 2.0, 0.5]], "split": "train"}
        ],
        "maps": [{"name": "entropy", "rows": ["a", "b"], "steps": [1, 2, 3], "values": np.ones((2, 3))}],
    }
    document, chunks = opened(pages.html(trace, training=training))
    curve, chart = document["training"]["curves"][0], document["training"]["maps"][0]
    assert np.array_equal(chunks[curve["points"]], np.float32([[1, 2, 5], [3.0, 2.0, 0.5]]))
    assert np.array_equal(chunks[chart["values"]], np.ones((2, 3)))
    assert (curve["split"], chart["unit"], chart["steps"]) == ("train", None, [1, 2, 3])
    (curve,), (chart,) = training["curves"], training["maps"]
    for wrong, error, message in (
        ({"maps": [{**chart, "values": np.ones((3, 2))}]}, ValueError, r"as .*\(2, 3\), got \(3, 2\)"),
        ({"maps": [{"name": "entropy", "values": []}]}, ValueError, "expected 'rows' of each curve or map"),
        ({"curves": [{**curve, "points": [[1, 2], [3.0]]}]}, TypeError, "points of 'loss': .*one length"),
    ):
        with pytest.raises(error, match=f"training: .*{message}"):
            pages.html(trace, training=wrong)


@pytest.mark.slow
def test_two_traces_are_laid_side_by_side(bare):
    letters = list("abcdefghijk")
    a, b = (small(seed=seed, title=title, tokens=letters) for seed, title in ((0, "A"), (1, "B")))
    document, chunks = opened(pages.html(a, compare=b))
    assert [trace["title"] for trace in document["traces"]] == ["A", "B"]
    assert document["title"] == "A"
    names = {trace["sequences"][0]["tokens"] for trace in document["traces"]}
    assert [chunks[name] for name in names] == [letters]  # kept once


def test_the_same_trace_makes_the_same_bytes(bare):
    first, second = (pages.html(small()) for _ in range(2))
    assert first == second


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "\u2028\u2029",
    "\0",
    "\ud800",
    "x" * 10_000,
    "&lt;",
    '"',
    "]]>",
    "\u05e9\u200f",
    "\U0001f469\u200d\U0001f467",
]


def test_hostile_texts_stay_texts(bare):
    tokens = Tokens(HOSTILE)
    trace = small(tokens=tokens, title="</script><img src=x onerror=alert(1)>\u2028\ud800\0")
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
    assert shown.shape == (344, 3, 3)
    assert shown[0, 0, 0] == 90
    assert not shown[1:].any()
    assert "A picture of 7 x 1030 pixels is shown in 3 x 344." in document["notes"]
    halves = np.full((5, 3), 0.5, np.float32)
    tokens = Tokens(11, patch_grid=(1, 1), picture=halves)
    document, chunks = opened(pages.html(small(tokens=tokens)))
    assert np.all(chunks[document["traces"][0]["sequences"][0]["picture"]] == 128)


def test_what_is_not_a_number_is_said(bare):
    query = np.full((1, 3, 11, 5), np.nan, np.float32)
    with inspection.capture() as trace:
        attend(query, query, query, mask=masks.causal())
    document, chunks = opened(pages.html(trace))
    call = document["traces"][0]["calls"][0]
    assert call["trust"] == [None] * 3
    assert "attention 0: some weights are not numbers; they are drawn as 0." in document["notes"]
    assert not chunks[call["head"][0]["levels"][0]["mass"]].any()


def test_plans_degrade_in_a_fixed_order():
    steps = list(degrade(Plan(pinned=8)))
    changed = [
        next(name for name in vars(after) if getattr(after, name) != getattr(before, name))
        for before, (after, _) in zip([Plan(pinned=8), *(plan for plan, _ in steps)], steps, strict=False)
    ]
    assert changed == ["top_k", "features", "bins", "atlas", "largest", "exact", *["pinned"] * 4]
    least = {"exact": False, "top_k": False, "features": False, "bins": 128, "atlas": 32, "largest": False}
    assert steps[-1][0] == Plan(pinned=0, **least)


@pytest.mark.slow
def test_a_page_that_would_be_too_large_leaves_things_out_and_says_so(long):
    trace, *_ = watch(131, mask=masks.causal())
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
        size = len(page)
        document, chunks = opened(page)
        seen.append(document["notes"])
        heads = document["traces"][0]["calls"][0]["head"]
        assert sum(len(head["levels"]) == 2 for head in heads) == len(document["pinned"])
        atlas = chunks[heads[0]["levels"][-1]["mass"]]
        assert max(atlas.shape) <= (64 if len(document["notes"]) < 4 else 32)
    assert all(a == b[: len(a)] and len(a) < len(b) for a, b in itertools.pairwise(seen))
    words = [note.removeprefix("To keep the file small, ").split(" ")[1] for note in seen[-1]]
    assert words == ["8", "and", "along", "atlas", "largest", "1", "head"]
    assert pages.html(trace, max_mb=math.inf, pinned=np.int64(8)) == pages.html(trace)
    pages.html(trace, max_mb=least)
    with pytest.raises(ValueError, match="max_mb: expected more than 0"):
        pages.html(trace, max_mb=0)


@pytest.mark.slow
def test_exact_weights_are_left_out_late(bare):
    trace, *_ = watch(131, mask=masks.causal())
    whole = pages.html(trace, pinned=1)
    kept = {}
    for less in range(0, 60_000, 4_000):
        document, _ = opened(pages.html(trace, pinned=1, max_mb=(len(whole) + 1024 - less) / 1e6))
        heads = document["traces"][0]["calls"][0]["head"]
        kept[len(document["notes"])] = [head["weights"] is not None for head in heads].count(True)
        if len(document["notes"]) == 5:
            assert "weights one by one are there for pinned heads alone" in document["notes"][-1]
    assert (kept[0], kept[5]) == (3, 1)


@pytest.mark.slow
def test_pinned_heads_are_the_clearest_or_those_asked_for(long):
    rng = np.random.default_rng(3)
    far = np.zeros((3, 11, 11), np.float32)
    far[1] = 30 * np.eye(11, k=-1)  # to the token before
    x = rng.normal(size=(1, 3, 11, 5)).astype(np.float32)
    with inspection.capture() as trace:
        attend(x, x, x, bias=jnp.asarray(far), mask=masks.causal())
    assert opened(pages.html(trace, pinned=1))[0]["pinned"] == [[0, 1]]
    assert opened(pages.html(trace, pinned=[(0, 2), (0, 2), (0, 0)]))[0]["pinned"] == [[0, 2], [0, 0]]
    assert opened(pages.html(trace, pinned=0))[0]["pinned"] == []
    with pytest.raises(ValueError, match=r"pinned: expected pairs .*got \(0, 3\)"):
        pages.html(trace, pinned=[(0, 3)])
    with pytest.raises(ValueError, match="pinned: expected a number of heads of at least 0"):
        pages.html(trace, pinned=-1)
    with pytest.raises(TypeError, match=r"pinned: expected a number of heads, or pairs .*; got 'ab'"):
        pages.html(trace, pinned="ab")
    with pytest.raises(TypeError, match=r"pin: expected an option among compare, .*did you mean 'pinned'"):
        pages.html(trace, pin=2)
    with pytest.raises(TypeError, match=r"positions: the table 'learned': expected numbers, .*of one length"):
        pages.html(trace, positions={"learned": [[1.0], [1.0, 2.0]]})


def test_statistics_from_a_file_are_shown(bare, tmp_path):
    trace = small()
    trace.save(tmp_path / "whole.regard", keep="qk")
    assert pages.html(inspection.load(tmp_path / "whole.regard")) == pages.html(trace)
    trace.save(tmp_path / "trace.regard", keep="statistics")
    document, chunks = opened(pages.html(inspection.load(tmp_path / "trace.regard")))
    head = document["traces"][0]["calls"][0]["head"][0]
    assert (document["exact"], head["weights"], head["last_row"]) == ("none", None, None)
    assert chunks[head["levels"][0]["mass"]].sum() > 0
    assert "saved without queries and keys" in document["notes"][0]


def test_a_trace_of_nothing_makes_a_page(bare):
    document, _ = opened(pages.html(inspection.Trace()))
    assert document["traces"][0]["calls"] == []
    assert set(pages.bundle(inspection.Trace())) == {"text/html", "image/png", "text/plain"}


def test_a_served_page_asks_its_server(bare, long):
    page = pages.html(small(), served=True)
    assert '"exact":"served"' in page
    assert "regard-chunks" not in page
    document = json.loads(re.search(r'id="regard-document">(.*?)</script>', page, re.DOTALL)[1])
    heads = document["traces"][0]["calls"][0]["head"]
    assert len(document["pinned"]) == 3
    assert document["notes"] == []
    assert all(head["weights"] is None for head in heads)


def test_a_page_is_written_whole_or_not_at_all(bare, tmp_path, monkeypatch):
    trace = small()
    target = tmp_path / "page.html"
    assert pages.write(trace, target) == target
    first = target.read_bytes()
    pages.write(small(seed=4), str(target))
    assert target.read_bytes() != first
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    kept = target.read_bytes()
    monkeypatch.setattr(pages.os, "replace", _fail)
    with pytest.raises(OSError, match="the disk is full"):
        pages.write(trace, target)
    assert target.read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def _fail(*_):
    raise OSError("the disk is full")


def test_other_files_are_not_replaced(bare, tmp_path):
    trace = small()
    thesis = tmp_path / "thesis.html"
    thesis.write_text("<html>years of work</html>")
    with pytest.raises(FileExistsError, match="something else: name another file, or remove it first"):
        pages.write(trace, thesis)
    assert thesis.read_text() == "<html>years of work</html>"
    with pytest.raises(FileExistsError, match="the folder"):
        pages.write(trace, tmp_path)
    with pytest.raises(FileNotFoundError, match="none is there; make it"):
        pages.write(trace, tmp_path / "nowhere" / "page.html")
    empty = tmp_path / "empty.html"
    empty.touch()
    pages.write(trace, empty)


@pytest.mark.slow
def test_what_was_left_out_is_logged(long, tmp_path, caplog):
    trace, *_ = watch(131, mask=masks.causal())
    pages.write(trace, tmp_path / "a.html", max_mb=len(pages.html(trace)) / 1e6 - 0.001)
    assert "a.html: To keep the file small, the 8 largest weights" in caplog.text


def test_notebooks_get_a_frame_a_picture_and_characters(bare):
    trace = small(tokens=[*"abcdefghij", '"><script>'], title='a "title"')
    shown = pages.bundle(trace)
    frame = shown["text/html"]
    assert re.match(
        r'<iframe srcdoc="[^"]*" sandbox="allow-scripts allow-downloads" title="a &quot;title&quot;"', frame
    )
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert opened(page)[0]["title"] == 'a "title"'
    assert base64.b64decode(shown["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    lines = shown["text/plain"].split("\n")
    assert lines[2].startswith("|")
    assert "3 heads" in lines[0]
    # Causal: the first row attends to the first key alone, the darkest there is.
    assert all(one.startswith("█") and one.endswith(" ") for one in lines[2].strip("|").split("|  |"))
    cut = pages.bundle(trace, max_mb=0.001)
    assert "too large to be shown here" in cut["text/html"]
    assert set(cut) == {"text/html", "image/png", "text/plain"}


@pytest.mark.slow
def test_anything_has_a_thumbnail(bare):
    for T, S in ((0, 3), (3, 0), (1, 1), (71, 7)):
        trace, *_ = watch(T, S, query_offset=0)
        png = thumbnails.draw_png(trace)
        assert png.endswith(b"IEND\xaeB`\x82")
        assert thumbnails.draw_text(trace).count("\n") == 5
    width, height = np.frombuffer(png[16:24], ">u4")
    data = zlib.decompress(png[png.index(b"IDAT") + 4 : -16])
    pixels = np.frombuffer(data, np.uint8).reshape(height, 1 + 3 * width)
    assert not pixels[:, 0].any()
    shades = pixels[:, 1:].reshape(height, width, 3)
    assert len(np.unique(shades[6:30, 6:30].reshape(-1, 3), axis=0)) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_an_atlas_of_144_heads_is_2_megabytes_at_most():
    calls = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        place = np.arange(4096)[:, None] * 2.0 ** -np.arange(8)
        turns = np.concatenate([np.cos(place), np.sin(place)], -1)
        shift = rng.normal(size=(12, 1, 16)) * rng.choice([0.5, 2, 6], (12, 1, 16))
        query = (turns * shift + 0.5 * rng.normal(size=(12, 4096, 16))).astype(np.float32)
        key = (turns + 0.5 * rng.normal(size=(12, 4096, 16))).astype(np.float32)
        with inspection.capture(tokens=[f" token{i % 997}" for i in range(4096)]) as trace:
            attend(query[None], key[None], key[None][..., :1], mask=masks.causal())
        calls += trace.calls
    whole = inspection.Trace(tuple(calls))
    assert len(pages.html(whole, pinned=0)) <= 2_000_000
    assert len(pages.html(whole)) <= 5_000_000
