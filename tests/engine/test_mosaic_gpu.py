"""Regard's kernel for Hopper, interpreted: the contract, masks and scores in registers, refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_cases
import test_contract as shared
from oracle import assert_close
from regard import attend, explain, masks, scores
from regard.engine.backends import cudnn, mosaic_gpu
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash import measurements, tile_calls
from regard.engine.flash.operands import Results
from regard.engine.hopper import kernel_calls
from regard.masks.spans import Span
from regard.scores.cells import Block
from test_kernels import lower_for_cuda

OLD = jax.__version_info__ < (0, 11)
interpreted_alone = pytest.mark.skipif(OLD, reason="jax before 0.11 interprets no Mosaic GPU kernel")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_INTERPRET", jax.default_backend() != "gpu")


draw = functools.partial(mesh_cases.draw, dtype=jnp.bfloat16)
# Two batch rows, four heads in two groups; three tiles of queries, two of keys, the last of each cut off.
SHAPES = ((2, 4, 263, 8), (2, 2, 149, 8), (2, 2, 149, 8))
IDS = np.arange(298).reshape(2, 149) // 40
PLACES = np.random.default_rng(1).permutation(263)
MASKS = {
    "none": None,
    "positions": masks.causal(),  # of every token
    "window of lengths": masks.sliding_window(30, 4) & masks.lengths([140, 3]),
    "ids, and lengths of heads": (
        masks.lengths([[149, 7, 0, 80], [1, 2, 3, 4]])
        | masks.segments(np.arange(263) // 50, IDS) & ~masks.causal()
        | masks.prefix([5, 90])
    ),
    "functions": (masks.chunked(40) | masks.global_tokens(3) & masks.dilated(3))
    & masks.valid_keys(np.arange(149) % 3 > 0)
    | masks.predicate(lambda query, key: (query + 2 * key) % 5 < 3)
    & masks.predicate(lambda query, key: (key - query) > jnp.asarray([3, 9])[1]),
}


def trace(**options):
    problem = canonicalize(*(jnp.zeros(shape, "bfloat16") for shape in SHAPES), **options)
    return problem, kernel_calls.trace_pairs(*kernel_calls.prepare(problem))


def evaluate(program, *tiles):
    """A program over all pairs, tile by tile, as a kernel reads it; every other head's tiles lie across."""

    @functools.partial(jax.jit, static_argnames="across")
    def run(pieces, parts, across):
        return program.run(lambda number, kind: pieces[number], (128, 128), *parts, across=across)

    operands = list(map(np.asarray, jax.jit(program.operands)()))
    found = np.zeros((2, 4, 384, 256), np.float32)
    # The first head of the first group, the last of the last.
    for batch, head, row, column in itertools.product(range(2), (0, 3), range(3), range(2)):
        starts, across = {"row": row * 128, "column": column * 128}, bool(head % 2)
        pieces = [operand[min(batch, len(operand) - 1)] for operand in operands]
        pieces = [piece[min(head, len(piece) - 1)] for piece in pieces]
        pieces = [
            piece[starts[kind] : starts[kind] + 128] if kind in starts else piece[0]
            for piece, kind in zip(pieces, program.kinds, strict=True)
        ]
        place = np.s_[batch, head, row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
        part = np.asarray(run(pieces, [tile[place].T if across else tile[place] for tile in tiles], across))
        found[place] = part.T if across else part
    return found[:, ::3, :263]


@pytest.mark.parametrize("name", MASKS)
def test_the_program_of_a_mask_keeps_what_the_mask_keeps(name):
    mask, offset = MASKS[name], -100 if "ids" in name else 4
    where = {"query_positions": PLACES} if name == "positions" else {"query_offset": offset}
    _, pairs = trace(mask=mask, **where)
    expected = np.arange(149) <= PLACES[:, None]
    if name != "positions":
        expected = True if mask is None else mask.dense(263, 149, leading_axes=2, **where)
    found = evaluate(pairs.keep)
    np.testing.assert_array_equal(found[..., :149], np.broadcast_to(expected, (2, 4, 263, 149))[:, ::3])
    assert not found[..., 149:].any(), "keys beyond the last"


def test_the_programs_of_scores_are_the_scores_and_their_derivatives():
    rng = np.random.default_rng(2)
    raw, change = (rng.normal(size=(2, 4, 384, 256)).astype(np.float32) for _ in range(2))
    table = rng.normal(size=(16, 4)).astype(np.float32)
    chain = [
        scores.softcap(1.5),
        scores.alibi(4),
        scores.relative_bias(table, bidirectional=False, max_distance=60),
        scores.relative_bias(table, bidirectional=True, max_distance=60),
        scores.temperature([1.0, 2.0, 3.0, 0.5]),
        scores.modifier(lambda s, b, h, q, k: s * (1 + b).astype(s.dtype) + h.astype(s.dtype)),
    ]
    problem, pairs = trace(score=chain, query_offset=4)
    over_scores = lambda array: array.reshape((*(1,) * (4 - array.ndim), *array.shape))
    cells = Block(problem.grid(), Span(0, 4), jnp.arange(2).reshape(2, 1, 1, 1), over_scores)

    @jax.jit
    def define(raw, change):
        found, pull = jax.vjp(lambda raw: problem.score.apply(raw, cells), raw)
        return found, pull(change)[0]

    expected, pulled = define(*(array[:, :, :263, :149] for array in (raw, change)))
    for found, wanted in ((evaluate(pairs.apply, raw), expected), (evaluate(pairs.vjp, raw, change), pulled)):
        np.testing.assert_allclose(found[..., :149], wanted[:, ::3], rtol=1e-5, atol=1e-5)


READS_PAIRS = scores.modifier(lambda s, b, h, q, k: s + jnp.ones((11, 11))[q, k])
REFUSED = {
    "float32": ({"dtype": "float32"}, {}, "takes bfloat16 alone"),
    "wide": ({"width": 136}, {}, "width 128 at most, got 136"),
    "nothing": ({"keys": 0}, {}, "nothing to compute"),
    "statistics": ({}, {"aux": ("lse", "entropy")}, "keeps lse alone"),
    "bias": ({}, {"bias": jnp.zeros((11, 11))}, "a bias is one"),
    "dropout": ({}, {"dropout_rate": 0.1, "rng": jax.random.key(0)}, "no dropout"),
    "precision": ({}, {"precision": "highest"}, "precision asks for more"),
    "stored": ({}, {"mask": np.eye(11, dtype=bool)}, "this call needs 'gather' over pairs"),
    "data of pairs": ({}, {"score": READS_PAIRS}, "this call needs 'gather' over pairs"),
}  # fmt: skip


@interpreted_alone
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_take_is_refused_by_name(name):
    changed, options, reason = REFUSED[name]
    sizes = {"width": 8, "keys": 11, "dtype": "bfloat16"} | changed
    key = jax.ShapeDtypeStruct((2, 4, sizes["keys"], sizes["width"]), sizes["dtype"])
    arrays = jax.ShapeDtypeStruct((2, 4, 11, sizes["width"]), sizes["dtype"]), key, key
    with pytest.raises(NotImplementedError, match=f"backend 'mosaic_gpu' cannot serve this call: .*{reason}"):
        explain(*arrays, backend="mosaic_gpu", **options)


@interpreted_alone
def test_ids_of_64_bits_are_refused():
    array = jax.ShapeDtypeStruct((2, 4, 11, 8), "bfloat16")
    call = lambda x, ids: explain(x, x, x, mask=masks.segments(ids), backend="mosaic_gpu")
    with jax.enable_x64(True):
        assert call(array, np.zeros(11, np.int32)).backend == "mosaic_gpu"
        with pytest.raises(NotImplementedError, match="this call needs numbers of 64 bits"):
            call(array, jax.ShapeDtypeStruct((11,), "int64"))


def test_the_kernel_is_for_hopper_alone(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_INTERPRET", False)
    monkeypatch.setattr(cudnn, "find_capability", lambda: (10, 0))
    array = jax.ShapeDtypeStruct((2, 4, 11, 8), "bfloat16")
    with pytest.raises(NotImplementedError, match="Hopper, and this GPU has"):
        explain(array, array, array, backend="mosaic_gpu")
    monkeypatch.setattr(cudnn, "find_capability", lambda: (9, 0))
    monkeypatch.setattr(mosaic_gpu, "_OLDEST", (99,))
    with pytest.raises(NotImplementedError, match="was checked with jax"):
        explain(array, array, array, backend="mosaic_gpu")


class Answer:
    """In the kernel's place, on any jax: numbers that tell whose they are."""

    def __init__(self, inputs, context, config, interpret):
        self.config = config

    def forward(self):
        rows = jnp.zeros(self.config.rows)
        return Results(jnp.full((*rows.shape, self.config.value_width), 7.0), rows, peak=rows)

    def backward(self, results, cotangents, shapes):
        return {name: jnp.full(shape, 3.0) for name, shape in shapes.items()}


def test_both_passes_are_the_kernels_and_the_rest_is_computed_for_all_rows_and_heads_at_once(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_OLDEST", (0,))
    monkeypatch.setattr(kernel_calls, "_Call", Answer)
    in_tiles = []

    def spy(name, compute):
        def call(inputs, context, *rest, reversible):
            in_tiles.append((name, rest[-1].leading, rest[-1].forward.queries))
            return compute(inputs, context, *rest, reversible=reversible)

        return call

    for name, compute in tile_calls._PASSES.items():
        monkeypatch.setitem(tile_calls._PASSES, name, spy(name, compute))
    query, key, value = draw((2, 6, 157, 8), (2, 3, 157, 8), (2, 3, 157, 8))

    @jax.jit
    def call(query, cap):
        output = attend(query, key, value, score=scores.softcap(cap), backend="mosaic_gpu")
        return jnp.sum(output.astype(jnp.float32)), output

    with measurements.using(measurements.DEFAULTS["gpu"][0]):
        (_, output), (grad, of_cap) = jax.value_and_grad(call, (0, 1), has_aux=True)(query, 1.5)
        jax.jit(lambda: jax.jvp(call, (query, 1.5), (query, 1.0))).lower()
    np.testing.assert_array_equal(output, np.full(query.shape, 7, np.float32))
    np.testing.assert_array_equal(grad, np.full(query.shape, 3, np.float32))
    assert np.isfinite(of_cap)
    assert in_tiles == [("backward", (1, 1), 157), ("tangent", (1, 1), 157)]


# The kernel itself. A table's entries are few, so that one head's program is short.
ONE = ((1, 1, 5, 8), (1, 1, 11, 8), (1, 1, 11, 8))
TABLE = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
CAUSAL = {"mask": masks.causal(), "query_offset": 99}
SCORES = [scores.softcap(2.0), scores.alibi(2), scores.relative_bias(TABLE, max_distance=9)]
SCORED = {"mask": masks.lengths([140]), "query_offset": 70, "score": SCORES}
LSE = {"query_offset": 3, "sinks": np.float32([0.5, -1]), "aux": ("lse",)}
CALLS = {
    "an empty list": (*ONE, CAUSAL | {"query_offset": -3}),
    "several tiles of several blocks": ((1, 2, 263, 8), (1, 1, 401, 8), (1, 1, 401, 72), CAUSAL),
    "no mask, keys of whole tiles": ((1, 1, 130, 8), (1, 1, 128, 8), (1, 1, 128, 8), {}),
    "scores": ((1, 2, 5, 8), *[(1, 1, 149, 8)] * 2, SCORED),
    "a negative scale": ((1, 2, 70, 8), *[(1, 1, 149, 8)] * 2, {"mask": masks.lengths([140]), "scale": -0.7}),
    "no scale": (*ONE, {"mask": masks.lengths([7]), "scale": 0.0}),
    "sinks, lse": ((1, 2, 5, 8), *ONE[1:], LSE),  # without a mask, a lone tile
} | {
    name: (case.query, case.key, case.value, {"mask": case.mask, "query_offset": case.offset})
    for name, case in shared.CASES.items()
    if name in ("three leading axes", "causal with offsets by row")
}  # fmt: skip
BOTH = ("mosaic_gpu", "tiled")
CLOSE = {"rtol": 2**-6, "atol": 2**-6}  # tiles round the same weights, but not relative to the same peak


@interpreted_alone
@pytest.mark.parametrize("name", CALLS)
def test_outputs_statistics_and_gradients_are_those_of_tiles(name):
    *shapes, options = CALLS[name]
    arrays = draw(*shapes)

    def loss(backend, arrays):
        found = attend(*arrays, **options, backend=backend)
        output, aux = found if options.get("aux") else (found, {"lse": jnp.zeros(1)})
        return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(jnp.sin(aux["lse"])), (output, aux)

    run = jax.jit(jax.value_and_grad(loss, 1, has_aux=True), static_argnums=0)
    assert_close(*(run(backend, arrays) for backend in BOTH), **CLOSE)


@interpreted_alone
def test_every_transform_of_the_kernel():
    query, key, value = draw((3, 5, 8), (3, 11, 8), (3, 11, 8))
    lengths = jnp.array([4, 0, 11])

    @functools.partial(jax.jit, static_argnums=0)
    def everything(backend, query, cap):
        def call(query, key, value, lengths):
            options = {"mask": masks.causal() & masks.lengths(lengths), "score": scores.softcap(cap)}
            return attend(query, key, value, query_offset=6, backend=backend, **options).astype(jnp.float32)

        energy = lambda query, cap: jnp.sum(call(query, key, value, lengths) ** 2) * cap
        gradient = jax.jvp(jax.grad(jax.checkpoint(energy), (0, 1)), (query, cap), (query, cap))
        whole, rows = call(query, key, value, lengths), jax.vmap(call)(query, key, value, lengths)
        scanned = jax.lax.scan(lambda _, row: (None, call(*row)), None, (query, key, value, lengths))[1]
        return gradient, whole, rows, scanned

    found, expected = (everything(backend, query, jnp.float32(1.5)) for backend in BOTH)
    np.testing.assert_array_equal(found[2], found[1])
    np.testing.assert_array_equal(found[3], found[1])
    assert_close(found, expected, 0.05, 0.05)


@interpreted_alone
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_what_nobody_may_attend_to_changes_no_bit_of_the_kernel(poison):
    query, key, value = draw((2, 2, 5, 8), (2, 1, 11, 8), (2, 1, 11, 8))

    @functools.partial(jax.jit, static_argnums=3)
    def outcome(query, key, value, backend=BOTH[0]):
        arrays = query, key, value
        call = lambda *arrays: attend(*arrays, mask=masks.lengths([4, 0]), backend=backend, aux=("lse",))
        loss = lambda *arrays: jnp.sum(call(*arrays)[0].astype(jnp.float32) ** 2)
        return call(*arrays), jax.grad(loss, (0, 1, 2))(*arrays)

    spoil = lambda array: array.at[0, :, 4:].set(poison).at[1].set(poison)
    spoiled = query.at[1].set(poison), spoil(key), spoil(value)
    jax.tree.map(np.testing.assert_array_equal, outcome(*spoiled), outcome(query, key, value))
    # What somebody attends to is answered as by tiles; an infinite key may have a weight of 0.
    mixed = query, key.at[0, 0, 1, 0].set(poison), value.at[0, 0, 2, 3].set(poison)
    assert_close(*(outcome(*mixed, backend) for backend in BOTH), **CLOSE)


LOWERED = {
    "plain": {},
    "masks and scores": {
        "mask": masks.causal() & masks.segments(np.arange(1280) // 50) & ~masks.prefix([3, 90])
        | masks.chunked(7) & (masks.sliding_window(50) | masks.dilated(3)),
        "score": [scores.softcap(2.0), scores.alibi(8), scores.temperature(2.0)],
    },
}


@interpreted_alone
@pytest.mark.parametrize("name", LOWERED)
def test_the_program_for_hopper_holds_a_kernel_forward_and_two_backward(monkeypatch, name):
    monkeypatch.setattr(mosaic_gpu, "_INTERPRET", False)
    monkeypatch.setattr(cudnn, "find_capability", lambda: (9, 0))
    shapes = [(2, heads, 1280, 64) for heads in (8, 2, 2, 8)]
    call = lambda *arrays: attend(*arrays, backend="mosaic_gpu", **LOWERED[name])
    # Registers are laid out in lowering: what Mosaic cannot do to them ends here.
    pull = lambda *arrays: jax.vjp(call, *arrays[:3])[1](arrays[3])
    program = lower_for_cuda(pull, *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes))
    assert program.count("@mosaic_gpu_v2(") == 3
    assert "x1280x1280x" not in program, "an array over queries and keys"
