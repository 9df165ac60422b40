"""A model of cuDNN: what its two calls compute from their operands, by their documentation, on any machine.

Offsets count numbers of an array, statistics begin at every document's first row, and what cuDNN leaves open
(queries of no document, rows without keys) is NaN here, so that nobody relies on it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import mlir


def install(monkeypatch):
    """Let JAX's primitives of cuDNN run on CPUs, as if cuDNN 9.19 and Hopper were there."""
    from jax._src.cudnn import fused_attention_stablehlo as inner

    monkeypatch.setattr(inner, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(inner, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(inner, "is_cuda_compute_capability_equal", lambda capability: False)
    for name, function in {"fwd": forward, "bwd": backward}.items():
        primitive = getattr(inner, f"_dot_product_attention_{name}_p")
        function = jax.numpy_rank_promotion("allow")(functools.partial(function, inner))
        rule = mlir.lower_fun(jax.numpy_dtype_promotion("standard")(function), multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")
    return inner


class Rows:
    """The rows of every document, one document after another: (documents, rows), as in (batch * length)."""

    def __init__(self, inner, array, lengths, offsets, layout):
        self.heads_first = layout == inner.AttentionLayout.BNTH.value
        shape = array.shape if not self.heads_first else tuple(array.shape[at] for at in (0, 2, 1, 3))
        self.batch, self.length, self.heads, width = shape
        if offsets.size:
            assert not self.heads_first
            begins = offsets.reshape(-1)[: lengths.size] // (self.heads * width)
            assert offsets.dtype == lengths.dtype == jnp.int32
        else:
            begins = jnp.arange(self.batch) * self.length
        counts = lengths.reshape(-1) if lengths.size else jnp.full(self.batch, self.length)
        self.known = jnp.where(counts > self.length, jnp.nan, 1.0)  # what reads beyond the array is anything
        within = jnp.arange(self.length)
        self.there = within < counts[:, None]
        self.places = jnp.where(self.there, begins[:, None] + within, self.batch * self.length)

    def split(self, array):
        """(documents, heads, rows, width)."""
        flat = jnp.swapaxes(array, 1, 2) if self.heads_first else array
        flat = flat.reshape((-1, *flat.shape[2:])).astype(jnp.float32)
        flat = jnp.append(flat, jnp.zeros_like(flat[:1]), 0)
        return jnp.swapaxes(flat[self.places], 1, 2) * self.known[:, None, None, None]

    def join(self, array, dtype):
        """Return what `split` takes, NaN where no document is."""
        flat = jnp.full((self.batch * self.length + 1, array.shape[1], array.shape[3]), jnp.nan)
        flat = flat.at[self.places].set(jnp.swapaxes(array, 1, 2))[:-1]
        found = flat.reshape((self.batch, self.length, *flat.shape[1:])).astype(dtype)
        return jnp.swapaxes(found, 1, 2) if self.heads_first else found


def _score(inner, operands, options):
    query, key, value, bias, q_lengths, kv_lengths, q_offsets, kv_offsets, *pages = operands
    assert not bias.size
    assert not any(page.size for page in pages)
    assert options["dropout_rate"] == 0
    rows = Rows(inner, query, q_lengths, q_offsets, options["layout"])
    columns = Rows(inner, key, kv_lengths, kv_offsets, options["layout"])
    kind = options["mask_type"]
    assert bool(q_lengths.size) == (inner.has_padding(kind) or bool(q_offsets.size))
    group = rows.heads // columns.heads
    keys, values = (jnp.repeat(columns.split(array), group, 1) for array in (key, value))
    scores = jnp.einsum("bhtd,bhsd->bhts", rows.split(query), keys) * options["scale"]
    t, s = jnp.indices((rows.length, columns.length), sparse=True)
    keep = columns.there[:, None, None] & (s == s)
    if kind in (inner.MaskType.CAUSAL, inner.MaskType.PADDING_CAUSAL):
        keep &= s <= t
        if options["sliding_window_length"] is not None:
            keep &= s > t - options["sliding_window_length"]
    else:
        assert options["sliding_window_length"] is None
    return rows, columns, scores, keep, keys, values


def _apply(jaxpr, scores):
    return scores if jaxpr is None else jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, scores)[0]


def forward(inner, *operands, score_mod_jaxpr=None, **options):
    rows, _, scores, keep, _, values = _score(inner, operands, options)
    scores = jnp.where(keep, _apply(score_mod_jaxpr, scores), -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    output = jnp.einsum("bhts,bhse->bhte", jnp.exp(scores - lse[..., None]), values)
    found = [rows.join(output, operands[0].dtype)]
    statistics = jnp.where(rows.there[:, None] & jnp.isfinite(lse), lse, jnp.nan)
    return [*found, statistics] if options["is_training"] else found


def backward(inner, *operands, score_mod_jaxpr=None, **options):
    *operands, statistics, output, pull = operands
    assert score_mod_jaxpr is None
    rows, columns, scores, keep, keys, values = _score(inner, operands, options)
    weights = jnp.where(keep & rows.there[:, None, :, None], jnp.exp(scores - statistics[..., None]), 0)
    output, pull = (rows.split(array) for array in (output, pull))
    change = jnp.einsum("bhte,bhse->bhts", pull, values) - (output * pull).sum(-1, keepdims=True)
    change = jnp.where(weights != 0, weights * change, 0) * options["scale"]
    queries = rows.split(operands[0])

    def gather(array, given):
        array = array.reshape((array.shape[0], columns.heads, -1, *array.shape[2:])).sum(2)
        return columns.join(array, given.dtype)

    return [
        rows.join(jnp.einsum("bhts,bhsd->bhtd", change, keys), operands[0].dtype),
        gather(jnp.einsum("bhts,bhtd->bhsd", change, queries), operands[1]),
        gather(jnp.einsum("bhts,bhte->bhse", weights, pull), operands[2]),
    ]
