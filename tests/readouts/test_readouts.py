"""Readouts: every number against the dense definition, laws of the blocks, windows, labels, memory."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import definition
from oracle import assert_as_exact, assert_close
from refusals import assert_refused
from regard import attend, masks, readouts, scores
from regard.readouts import accumulators
from regard.readouts.accumulators import bin_of, sum_diagonals
from regard.readouts.top_k import RunningTopK

D, TOP = 7, 5
CAUSAL = masks.causal()


@dataclass(frozen=True)
class Case:
    """One call."""

    query: tuple = (2, 3, 53, D)
    key: tuple = (2, 3, 53, D)
    mask: Any = None
    sinks: tuple | None = None
    query_offset: Any = None
    key_offset: Any = None
    tokens: bool = False
    grid: int = 8

    def arrays(self):
        rng = np.random.default_rng(11)
        query, key = (rng.normal(size=shape).astype(np.float32) for shape in (self.query, self.key))
        return query, key, None if self.sinks is None else rng.normal(size=self.sinks).astype(np.float32)

    def options(self):
        offsets = {"query_offset": self.query_offset, "key_offset": self.key_offset}
        return {"mask": self.mask, "sinks": self.arrays()[2], **offsets}

    def operands(self):
        return tuple(map(jnp.asarray, self.arrays()[:2]))

    def ids(self):
        T, S = self.query[-2], self.key[-2]
        rng = np.random.default_rng(2)
        keys = rng.integers(0, 5, S)
        return (keys if T == S and self.query_offset is None else rng.integers(0, 5, T)), keys

    def counted(self):
        """What is read of the weights, and of whose tokens."""
        query_tokens, tokens = self.ids()
        ids = {"tokens": tokens, "query_tokens": query_tokens, "delimiters": (1, 4)} if self.tokens else {}
        return {"grid": self.grid, "top_k": TOP, "first": 3, "local": 4, **ids}

    def leading(self):
        heads = max(self.query[:-2][-1:], self.key[:-2][-1:])
        return (*np.broadcast_shapes(self.query[:-3], self.key[:-3]), *heads)


def define(case, dtype, key=None):
    """The call, and all that is counted of its weights, by the definition, with other keys if given."""
    query, own, sinks = (None if x is None else x.astype(dtype) for x in case.arrays())
    key = own if key is None else np.asarray(key, dtype)
    leading, options = case.leading(), case.options() | {"mask": None, "sinks": sinks}
    if case.mask is not None:
        axes = {name: options[name] for name in ("query_offset", "key_offset")}
        if not case.mask.reads_positions and case.query_offset is None:
            axes["query_offset"] = 0
        keep = np.asarray(case.mask.dense(query.shape[-2], key.shape[-2], leading_axes=len(leading), **axes))
        options["mask"] = definition.Mask(lambda at: keep)
    counted = definition.read(query, key, **case.counted(), **options)
    call = definition.Attention(query, key, 0 * key[..., :1], **options)
    return call, {name: number.value for name, number in counted.items()}


def blocks_of(call, height, width):
    """The two numbers of each block, from the whole matrix."""
    T, S = call.weights.shape[-2:]
    down, across = np.arange(0, T, height), np.arange(0, S, width)
    join = lambda kind: kind.reduceat(kind.reduceat(call.weights, down, -2), across, -1)
    rows = np.add.reduceat(call.live[..., 0].astype(call.weights.dtype), down, -1)
    return {"mass": join(np.add) / np.maximum(rows, 1)[..., None], "max": join(np.maximum)}


def read(case, key=None, **more):
    """The case's readout, with other keys if given."""
    query, own = case.operands()
    return readouts.read(query, own if key is None else key, **case.options() | case.counted() | more)


CASES = {
    "everything": Case(tokens=True),
    "causal": Case(mask=CAUSAL, tokens=True),
    "grouped, more keys": Case((6, 29, D), (3, 67, D), CAUSAL, query_offset=38, tokens=True, grid=5),
    "offsets by head": Case((6, 29, D), (3, 37, D), CAUSAL, None, 31, np.array([0, 40, 3, 9, 8, 7])),
    "offsets by row": Case((2, 6, 23, D), (2, 3, 43, D), CAUSAL, None, np.array([60, -3]), 11),
    "empty rows with sinks": Case(mask=masks.lengths([0, 31]) & ~CAUSAL, sinks=(2, 3)),
}
read_causal = functools.partial(read, CASES["causal"], local=1)


@pytest.mark.parametrize(
    "name", ["everything", "grouped, more keys", "offsets by head", "empty rows with sinks"]
)
def test_every_number_is_that_of_the_definition(name, monkeypatch):
    """In tiles of 16, or one that holds it all."""
    case = CASES[name]
    monkeypatch.setattr(accumulators, "SIDE", 512 if "sinks" in name else 16)
    readout = read(case)
    (exact, truths), (plain, plains) = (define(case, dtype) for dtype in (np.float64, np.float32))
    np.testing.assert_array_equal(readout.empty, ~exact.live[..., 0])
    for level in range(readout.num_levels):
        blocks = readout.level(level)
        wanted, plainly = (blocks_of(call, blocks.query_block, blocks.key_block) for call in (exact, plain))
        for part, number in wanted.items():
            assert getattr(blocks, part).shape == number.shape
            assert_as_exact(getattr(blocks, part), number, plainly[part], f"{part} of level {level}")
    assert blocks.mass.shape[-2:] == (1, 1)
    for field, wanted in truths.items():
        found = getattr(readout, field)
        if field in ("keys", "pattern_keys", "block_rows"):
            assert found.dtype == jnp.int32
            np.testing.assert_array_equal(found, wanted, err_msg=field)
        else:
            assert found.dtype == np.float32
            assert_as_exact(found, wanted, plains[field], field)
    if not case.tokens:
        assert (readout.duplicate_mass, readout.induction_mass, readout.delimiter_mass) == (None,) * 3
    check_top(readout, exact)
    np.testing.assert_array_equal(readout.argmax >= 0, exact.live[..., 0])
    eps = np.finfo(np.float32).eps
    height = np.abs(exact.lse[np.isfinite(exact.lse)]).max(initial=1)
    assert (np.asarray(readout.trust) <= 16 * eps * height).all()
    assert_as_exact(readout.max_weight, exact.weights.max(-1, initial=0), plain.weights.max(-1, initial=0))


def test_a_key_just_before_counts_wherever_tiles_end_and_however_little_is_local(monkeypatch):
    monkeypatch.setattr(accumulators, "SIDE", 16)
    found, wanted = read_causal(), define(CASES["causal"], np.float64)[1]
    for field in ("previous_mass", "self_mass", "next_mass"):
        np.testing.assert_allclose(getattr(found, field), wanted[field], rtol=1e-5, atol=1e-6, err_msg=field)
    np.testing.assert_array_equal(found.local_mass, found.self_mass)


def check_top(readout, exact):
    """The listed keys are different keys that have the listed weights, and as many as there are."""
    keys, weights = np.asarray(readout.top_keys), np.asarray(readout.top_weights, np.float64)
    listed = np.arange(TOP) < exact.keep.sum(-1, keepdims=True)
    assert (keys[~listed] == -1).all()
    assert not weights[~listed].any()
    # Places that list nothing get numbers of their own.
    assert (np.diff(np.sort(np.where(listed, keys, -1 - np.arange(TOP)), -1)) > 0).all()
    assert np.take_along_axis(exact.keep, np.maximum(keys, 0), -1)[listed].all()
    found = np.take_along_axis(exact.weights, np.maximum(keys, 0), -1)
    np.testing.assert_allclose(found[listed], weights[listed], rtol=2e-5, atol=1e-7)


def test_of_equal_scores_the_smaller_key_comes_first(monkeypatch):
    monkeypatch.setattr(accumulators, "SIDE", 16)
    rng = np.random.default_rng(1)
    query, key = (rng.integers(-1, 2, (2, 83, 3)).astype(np.float32) for _ in range(2))
    readout = readouts.read(jnp.asarray(query), jnp.asarray(key), mask=CAUSAL, scale=1.0, top_k=11)
    exact = np.where(np.tri(83, dtype=bool), np.einsum("htd,hsd->hts", query, key), -np.inf)
    order = np.argsort(-exact, axis=-1, kind="stable")[..., :11]
    order = np.where(np.take_along_axis(exact, order, -1) == -np.inf, -1, order)
    assert len({*exact[0, 80]}) < 12, "there are ties"
    np.testing.assert_array_equal(readout.top_keys, order)


def test_leaders_in_any_order_of_tiles():
    drawn = np.random.default_rng(5).integers(0, 9, (96, 7)).astype(np.float32)
    drawn[:, 3], drawn[::2, 4], drawn[40, 5] = -np.inf, -np.inf, np.nan
    running_top = RunningTopK.none(6, 7, jnp.float32)
    for first in (64, 0, 32):
        tile = jnp.asarray(drawn[first : first + 32])
        running_top = running_top.meet(tile, tile.reshape(2, 16, 7).max(1), first)
    order = np.argsort(-drawn, axis=0, kind="stable")[:6]
    order = np.where(np.take_along_axis(drawn, order, 0) == -np.inf, -1, order)
    kept = np.array([0, 1, 2, 3, 4, 6])  # a NaN says nothing about the rest of its own row
    np.testing.assert_array_equal(np.asarray(running_top.keys)[:, kept], order[:, kept])


def test_bins_and_diagonals_are_those_counted_by_hand():
    distances = np.array([-(2**31) + 1, -5, -4, -3, -1, 0, 1, 2, 3, 4, 7, 8, 2**31 - 1], np.int32)
    bins = [0, 28, 28, 29, 30, 31, 32, 33, 33, 34, 34, 35, 62]
    np.testing.assert_array_equal(bin_of(jnp.asarray(distances)), bins)
    tile = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    expected = [[np.trace(tile[:, head], d - 5) for d in range(9)] for head in range(2)]
    np.testing.assert_allclose(sum_diagonals(jnp.asarray(tile)), expected, rtol=1e-5, atol=1e-6)


def test_profiles_are_right_however_far_the_keys_are():
    """Where all distances of a tile share a bin, and where they stop doing so."""
    (T, S), offsets = (16, 13), np.arange(-70, 140)
    query, key = Case((T, D), (S, D)).operands()
    call = lambda offset: readouts.read(query, key, query_offset=offset).distance_mass
    found = jax.jit(jax.vmap(call))(jnp.asarray(offsets))
    weights = define(Case((T, D), (S, D)), np.float64)[0].weights
    distances = offsets[:, None, None] + np.arange(T)[:, None] - np.arange(S)
    bins = 31 + np.sign(distances) * np.ceil(np.log2(np.abs(distances) + 1)).astype(int)
    expected = np.stack([np.bincount(some.ravel(), weights.ravel(), 63) for some in bins]) / T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("T", "S"), [(0, 3), (3, 0)])
def test_hostile_sizes_are_counted_right(T, S):
    query, key = Case((2, T, D), (2, S, D), query_offset=0).operands()
    ids = {"tokens": np.arange(S), "query_tokens": np.arange(T)}
    readout = readouts.read(query, key, query_offset=0, top_k=3, **ids)
    sizes = {"key_mass": (2, S), "top_weights": (2, T, 3), "block_mass": (2, T, S), "distance_mass": (2, 63)}
    for name, size in sizes.items():
        np.testing.assert_array_equal(getattr(readout, name), np.zeros(size))
    np.testing.assert_array_equal(readout.keys, np.full((2, T), S))
    assert readout.level(readout.num_levels - 1).mass.shape == (2, min(T, 1), min(S, 1))
    assert readouts.window(query, key, readout.lse).shape == (2, T, S)
    assert set(readouts.label(readout)) == {(0,), (1,)}


def test_windows_are_the_weights():
    case = CASES["offsets by row"]
    exact, plain = (define(case, dtype)[0] for dtype in (np.float64, np.float32))
    lse = jnp.asarray(exact.lse[..., 0], jnp.float32)
    T, every = case.query[-2], slice(None)
    picks = (
        (every, every, every),
        ([T - 1, 0, *range(9)], [5, 5, 2, *range(6)], [1, 0, 2]),
        (slice(2, 2), slice(0, 7, 3), slice(1, 2)),
    )

    @jax.jit
    def look(query, key, lse):
        window = functools.partial(readouts.window, query, key, lse, **case.options())
        return [window(rows=rows, columns=columns, heads=heads) for rows, columns, heads in picks]

    for found, (rows, columns, heads) in zip(look(*case.operands(), lse), picks, strict=True):
        parts = [call.weights[..., heads, :, :][..., rows, :][..., columns] for call in (exact, plain)]
        assert found.shape == parts[0].shape
        if found.size:
            assert_as_exact(found, *parts)


def test_a_window_needs_no_more_than_itself():
    shape = jax.ShapeDtypeStruct((1, 4, 4096, 16), jnp.float32)
    lse = jax.ShapeDtypeStruct((1, 4, 4096), jnp.float32)
    index = jax.ShapeDtypeStruct((64,), jnp.int32)
    window = functools.partial(readouts.window, heads=[2], mask=CAUSAL)
    compiled = jax.jit(window).lower(shape, shape, lse, rows=index, columns=index).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 64 * 64 * 4


@pytest.mark.slow
def test_memory_is_linear():
    x = jax.ShapeDtypeStruct((1, 2, 16_384, 8), jnp.float32)
    run = jax.jit(lambda query, key: readouts.read(query, key, mask=CAUSAL))
    # The weights of a head would take 1 GiB.
    assert run.lower(x, x).compile().memory_analysis().temp_size_in_bytes < 4 * 16_384**2 / 16


def test_an_lse_of_the_callers_is_used_and_judged(monkeypatch):
    monkeypatch.setattr(accumulators, "SIDE", 16)
    case = CASES["causal"]
    query, key = case.operands()
    lse = attend(query, key, key, aux=("lse",), **case.options())[1]["lse"]
    given, found = read_causal(lse=lse), read_causal()
    assert_close(given, found, 1e-5, 1e-6)
    wrong = read_causal(lse=lse.at[1, 2, 17].add(0.1))
    np.testing.assert_allclose(wrong.trust[1, 2], 1 - np.exp(-0.1), rtol=1e-4)
    # The entropy is that of the shares, whatever the lse makes of their sum.
    np.testing.assert_allclose(wrong.entropy, found.entropy, rtol=1e-5, atol=1e-6)
    assert float(wrong.trust[0].max()) < 1e-5
    np.testing.assert_allclose(read_causal(lse=lse.at[0, 0, 40].set(-jnp.inf)).trust[0, 0], 1)
    assert (read_causal(lse=lse - 300).trust > 1e30).all()


def test_a_query_that_meets_nan_counts_for_nothing(monkeypatch):
    monkeypatch.setattr(accumulators, "SIDE", 16)
    case = CASES["causal"]
    _, key = case.operands()
    met = 41  # causal: the queries before it are sound
    key = key.at[..., met, :].set(jnp.nan)
    found, truths = read_causal(key), define(case, np.float64, key)[1]
    names = ("entropy", "previous_mass", "distance", "key_mass", "key_max", "distance_mass", "block_rows")
    for name in names:
        np.testing.assert_allclose(getattr(found, name), truths[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert np.isnan(found.max_weight[..., met:]).all()
    assert not np.isnan(found.max_weight[..., :met]).any()
    assert (found.top_keys[..., met:, :] == -1).all()
    np.testing.assert_array_equal(found.top_keys[..., :met, :], read_causal().top_keys[..., :met, :])
    assert not np.isnan(found.block_mass).any()
    assert np.isnan(found.trust).all()
    means = readouts.average(found)
    np.testing.assert_allclose(means["entropy"], np.mean(truths["entropy"][..., :met], -1), rtol=1e-5)


KINDS = {
    "self": lambda t, s, same, after, mark: t == s,
    "previous-token": lambda t, s, same, after, mark: t - s == 1,
    "next-token": lambda t, s, same, after, mark: s - t == 1,
    "sink": lambda t, s, same, after, mark: s == 0,
    "duplicate-token": lambda t, s, same, after, mark: same & (t != s),
    "induction": lambda t, s, same, after, mark: after & (s - t != 1),
    "delimiter": lambda t, s, same, after, mark: mark,
    "local": lambda t, s, same, after, mark: np.abs(t - s) < min(max(t.shape[0] // 8, 2), 16),
    "uniform": lambda t, s, same, after, mark: np.ones_like(same),
}


def repeated_tokens(T):
    """A sequence of random tokens, said twice; every fifth is a delimiter."""
    once = np.random.default_rng(T).permutation(T // 2) + 1
    once[4::5] = 0
    return np.resize(once, T)


def read_bias(bias, causal, tokens=None):
    """Heads whose weights are those of a bias, of tokens that come twice."""
    x, T = jnp.zeros((*bias.shape[:2], 1)), bias.shape[1]
    tokens = repeated_tokens(T) if tokens is None else tokens
    options = {"tokens": tokens, "delimiters": [0], "grid": 8, "top_k": 1}
    mask = CAUSAL if causal else None
    return readouts.read(x, x, mask=mask, bias=jnp.asarray(bias, jnp.float32), **options)


def read_heads(T, names, causal, share=0.9):
    """Heads that put a share of their weight on one kind of key, in rows that have one."""
    tokens = repeated_tokens(T)
    t, s = np.ogrid[:T, :T]
    keep = s <= t if causal else np.ones((T, T), bool)
    after = np.zeros((T, T), bool)
    after[:, 1:] = tokens[None, :-1] == tokens[:, None]
    places = (t, s, tokens[:, None] == tokens, after, np.broadcast_to(tokens == 0, (T, T)))
    bias = np.zeros((len(names), T, T), np.float32)
    for head, name in enumerate(names):
        likes = KINDS[name](*places) & keep
        some, others = likes.sum(-1, keepdims=True), (keep & ~likes).sum(-1, keepdims=True)
        choice = np.maximum(others, 1) / np.maximum(some, 1) * share / (1 - share)
        bias[head] = np.where(likes & (some > 0), np.log(choice), 0)
    return read_bias(bias, causal)


@pytest.mark.parametrize(("T", "causal"), [(24, False), pytest.param(97, True, marks=pytest.mark.slow)])
def test_heads_are_called_what_they_do_and_nothing_else_at_every_length(T, causal):
    names = [name for name in KINDS if not (causal and name == "next-token")]
    found = readouts.label(read_heads(T, names, causal))
    for head, name in enumerate(names):
        (one,) = found[(head,)]
        assert one.name == name
        assert one.value >= one.threshold > one.chance
        assert 0 < one.rows <= T


@pytest.mark.slow
def test_heads_that_know_of_nothing_have_no_label():
    rng, count, heads = np.random.default_rng(24), 0, 0
    for scale in (1.0, 3.0, 30.0):
        for vocabulary in (5, 1000):
            query, key = rng.normal(size=(2, 256, 24, 16)).astype(np.float32)
            options = {"tokens": rng.integers(0, vocabulary, 24), "delimiters": [0], "grid": 8, "top_k": 1}
            found = readouts.label(readouts.read(query * scale, key, **options))
            count, heads = count + sum(map(bool, found.values())), heads + len(found)
    assert count <= 0.01 * heads


def test_a_next_token_head_is_no_induction_head():
    """Nor is a previous-token head where two tokens alternate: the key after the token is that one."""
    (found,) = readouts.label(read_heads(24, ["next-token"] * 9, False))[(0,)]
    assert found.name == "next-token"
    before = np.stack([30.0 * np.eye(24, k=-1)] * 9)
    found = readouts.label(read_bias(before, False, 1 + np.arange(24) % 2))[(0,)]
    assert [one.name for one in found] == ["previous-token"]


def test_labels_carry_the_numbers_that_gave_them():
    readout = read_heads(24, ["induction", "uniform", "previous-token"], causal=True)
    found, means = readouts.label(readout), readouts.average(readout)
    (one,) = found[(0,)]
    # Of the second half, those rows whose token had been followed by something.
    tokens = repeated_tokens(24)
    counts = np.array([[j for j in range(1, t + 1) if tokens[j - 1] == tokens[t]] for t in range(24)], object)
    rows = [t for t in range(24) if 0 < len(counts[t]) < t + 1]
    assert one.rows == len(rows)
    np.testing.assert_allclose(one.chance, np.mean([len(counts[t]) / (t + 1) for t in rows]), rtol=1e-6)
    np.testing.assert_allclose(one.value, 0.9, rtol=1e-6)
    assert one.value == means["induction"][0]
    assert str(one) == "induction 0.90"
    assert one.threshold >= (one.chance + readouts.LABELS["induction"] * (1 - one.chance)) - 1e-9
    strict = readouts.label(readout, {"induction": np.inf, "previous-token": 0.95})
    assert strict[(0,)] == ()
    assert [one.name for one in strict[(2,)]] == ["local"]
    exactly = float(means["uniform"][1])
    assert readouts.label(readout, {"uniform": exactly})[(1,)]
    above = float(np.nextafter(np.float32(exactly), np.float32(2)))
    assert not readouts.label(readout, {"uniform": above})[(1,)]


def test_few_rows_are_no_evidence():
    # Two rows read the previous token alone, as one random head in six does; the others read nothing.
    bias = np.where(np.arange(24)[:, None] > 2, -np.inf, 30 * np.eye(24, k=-1))
    assert readouts.label(read_bias(np.stack([bias] * 3), causal=True))[(0,)] == ()


def test_labels_come_with_the_most_certain_first():
    t, s = np.indices((24, 24))
    bias = np.where(t - s == 1, 5.1, np.where(t == s, 5.0, 0.0))
    given = readouts.label(read_bias(np.stack([bias] * 9), causal=False))[(0,)]
    assert [one.name for one in given] == ["previous-token", "self"]
    assert given[0].value > given[1].value


def test_even_weights_have_evenness_one_whatever_there_is_to_choose_from():
    readout = read_heads(24, ["uniform", "self", "sink"], causal=True)
    # The first query has one key, and no choice.
    np.testing.assert_allclose(readouts.average(readout)["uniform"][0], 1, rtol=1e-5)
    lone = dataclasses.replace(readout, entropy=jnp.where(readout.keys == 1, 0.3, readout.entropy))
    np.testing.assert_allclose(readouts.average(lone)["uniform"][0], 1, rtol=1e-5)
    # A sink is one more choice.
    choices = readout.keys.astype(jnp.float32) + 1
    sunk = dataclasses.replace(readout, entropy=jnp.log(choices), sink_mass=1 / choices)
    np.testing.assert_allclose(readouts.average(sunk)["uniform"], 1, rtol=1e-5)


def test_a_readout_has_a_short_name():
    x = jax.ShapeDtypeStruct((5, 40, 3), jnp.float32)
    words = repr(jax.eval_shape(readouts.read, x, x))
    assert words == "Readout(rows (5, 40), keys 40, blocks 40x40, float32)"


def test_mistakes_are_explained():
    x, y = jnp.ones((2, 3, 5, D)), jnp.ones((2, 3, 11, D))
    look, window = readouts.read, readouts.window
    between = functools.partial(look, x, y, query_offset=0)
    readout, ids, lse = read_heads(24, ["uniform", "self", "sink"], True), np.arange(5), jnp.zeros((2, 3, 5))
    wrong = [
        (ValueError, "query_offset: expected where the queries sit.*query_offset=6", lambda: look(x, y)),
        (ValueError, "query_offset: expected", lambda: look(x, x, key_offset=3)),
        (ValueError, "distances that int32", lambda: look(x, x, query_offset=2**30, key_offset=-(2**30) - 9)),
        (ValueError, r"lse: .*per query, \(2, 3, 5\).*got shape \(5,\)", lambda: look(x, x, lse=lse[0, 0])),
        (ValueError, r"tokens: .*\(2, 11\), got \(5,\)", lambda: between(tokens=ids, query_tokens=ids)),
        (ValueError, "query_tokens: .* ids of the 5 queries", lambda: between(tokens=np.arange(11))),
        (ValueError, "tokens: expected the ids at the", lambda: between(query_tokens=ids)),
        (ValueError, "tokens: .*keys because delimiters was given", lambda: look(x, x, delimiters=[3])),
        (TypeError, "delimiters: .*got float64", lambda: look(x, x, tokens=ids, delimiters=[1.5])),
        (ValueError, "delimiters: .*1099511627776", lambda: look(x, x, tokens=ids, delimiters=[2**40])),
        (TypeError, "tokens: expected integers", lambda: look(x, x, tokens=np.zeros(5))),
        (ValueError, "top_k: expected an integer of at least 1, got 0", lambda: look(x, x, top_k=0)),
        (ValueError, "top_k: .* at most 64 with 5 keys, got 1099511627776", lambda: look(x, x, top_k=2**40)),
        (ValueError, "grid: expected an integer of at least 1", lambda: look(x, x, grid=0)),
        (ValueError, r"number: expected a level in 0\.\.\d, got 9", lambda: readout.level(9)),
        (ValueError, r"number: expected a level in 0\.\.\d, got -1", lambda: readout.level(-1)),
        (ValueError, "thresholds: .*; got sinks", lambda: readouts.label(readout, {"sinks": 0.1})),
        (TypeError, "readout: expected concrete arrays", lambda: jax.jit(readouts.label)(readout)),
        (ValueError, r"columns: expected .* 0\.\.4, got \[5\]", lambda: window(x, x, lse, columns=[5])),
        (ValueError, r"rows: expected .* 0\.\.4, got \[2, -1\]", lambda: window(x, x, lse, rows=[2, -1])),
        (TypeError, "rows: expected a slice or a list of integers", lambda: window(x, x, lse, rows=2.5)),
        (TypeError, "rows: .* got list .*of one length", lambda: window(x, x, lse, rows=[[1], [1, 2]])),
        (TypeError, "columns: expected a slice or a list of", lambda: window(x, x, lse, columns=[0.0, 1.5])),
        (TypeError, "columns: expected a slice or a list", lambda: window(x, x, lse, columns=[True, False])),
        (ValueError, "heads: .* a heads axis", lambda: window(x[0, 0], x[0, 0], lse[0, 0], heads=[0])),
    ]  # fmt: skip
    assert_refused(*((call, message, error) for error, message, call in wrong))


def test_scores_that_are_computed_twice_have_their_largest_key():
    """Rounded otherwise beside their maximum, none would equal it."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), "bfloat16")
    grown = scores.modifier(lambda s, b, h, *_: s * (1 + 0.25 * h.astype(s.dtype)) + 0.5 * b.astype(s.dtype))
    keys = jax.jit(functools.partial(readouts.read, score=grown))(draw(2, 6, 7, 8), draw(2, 2, 7, 8)).top_keys
    assert (np.sort(keys) == np.arange(-1, 7)).all()
    thirds = scores.modifier(lambda s, b, h, q, k: s + 0.7 * (k % 3).astype(s.dtype))
    options = {"score": thirds, "scale": 0.37, "mask": masks.prefix(103), "aux": ("argmax",)}
    call = jax.jit(lambda query, key, bias: attend(query, key, key, bias=bias, **options)[1]["argmax"])
    assert (call(draw(2, 6, 131, 16), draw(2, 1, 131, 16), draw(2, 1, 131, 1)) < 103).all()
