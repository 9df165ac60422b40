"""Attention by its definition, to compare programs with: NumPy on whole matrices, a plain formula each.

Nothing here comes from Regard. A program's text is evaluated with Regard's names and with those of this file:
in float64, which is the truth, and in float32, which shows what rounding costs. Gradients are by hand;
tangents, and derivatives of scores and of linear attention, are imaginary parts that small imaginary steps
leave, which are exact.
"""

from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np


@dataclass
class Expected:
    """Numbers, True where nothing is said about one, and the size of terms that cancel in them."""

    value: np.ndarray
    free: np.ndarray | bool = False
    size: float = 1.0


class Cells:
    """Where pairs sit: positions, rows, columns, batch and head, which broadcast to (*B, T, S)."""

    def __init__(self, leading, T, S, query_offset, key_offset, query_positions, key_positions):
        self.leading, self.T, self.S = leading, T, S
        self.row, self.column = np.arange(T)[:, None], np.arange(S)[None]
        self.query = self._place(query_offset, query_positions, T)[..., :, None]
        self.key = self._place(key_offset, key_positions, S)[..., None, :]
        self.head = np.arange(leading[-1] if leading else 1).reshape(-1, *(1, 1)[: len(leading) + 1])
        self.batch = np.arange(leading[0] if len(leading) > 1 else 1).reshape(-1, *(1,) * (len(leading) + 1))

    def _place(self, offset, positions, length):
        if positions is not None:
            return self.align(positions, 1)
        return self.align(0 if offset is None else offset)[..., None] + np.arange(length)

    def align(self, data, trailing=0):
        """Align data (b..., *trailing) with the first leading axes."""
        data = np.asarray(data)
        own, rest = data.shape[: data.ndim - trailing], data.shape[data.ndim - trailing :]
        return data.reshape((*own, *(1,) * (len(self.leading) - len(own)), *rest))

    def per_head(self, parameter):
        """Lay a number, or one per query head, over pairs."""
        parameter = np.asarray(parameter)
        return parameter.reshape(-1, 1, 1) if parameter.size > 1 else parameter.reshape(())


class Mask:
    """Pairs that may attend: a function of cells."""

    def __init__(self, keep):
        self.keep = keep

    __and__ = lambda self, other: Mask(lambda at: self.keep(at) & other.keep(at))
    __or__ = lambda self, other: Mask(lambda at: self.keep(at) | other.keep(at))
    __invert__ = lambda self: Mask(lambda at: ~self.keep(at))


def sliding_window(before, after=0):
    before, after = (1 << 40 if reach is None else reach for reach in (before, after))
    return Mask(lambda at: (at.key >= at.query - before) & (at.key <= at.query + after))


def keys_below(length):
    return Mask(lambda at: at.key < at.align(length)[..., None, None])


def segments(query_ids, key_ids=None):
    def keep(at):
        keys = at.align(query_ids if key_ids is None else key_ids, 1)[..., None, :]
        if key_ids is not None:
            return at.align(query_ids, 1)[..., None] == keys
        here = (at.query == at.key).astype(np.float32)  # the key where a query sits has its id
        return here @ (np.swapaxes(keys, -1, -2) == keys) > 0

    return Mask(keep)


def blocks(table, size):
    return Mask(lambda at: at.align(table, 2)[..., at.row // size[0], at.column // size[1]] != 0)


def chosen_blocks(indices, size, num_columns, counts):
    counted = np.arange(indices.shape[-1]) < counts[..., None]
    return blocks(((indices[..., None] == np.arange(num_columns)) & counted[..., None]).any(-2), size)


def chosen_keys(indices):
    return Mask(lambda at: (at.align(indices, 2)[..., None] == at.column).any(-2))


def tree(parents, start):
    def keep(at):
        found = (at.key < start) & (at.key <= at.query) & (at.query < start + len(parents))
        for node in range(len(parents)):
            above = node
            while above >= 0:
                found = found | ((at.query == start + node) & (at.key == start + above))
                above = parents[above]
        return found

    return Mask(keep)


def neighbourhood(shape, radius, start=0):
    def keep(at):
        count, found = int(np.prod(shape)), True
        asks, answers = at.query - start, at.key - start
        for one in (asks, answers):
            found = found & (one >= 0) & (one < count)
        places = (np.unravel_index(np.clip(one, 0, count - 1), shape) for one in (asks, answers))
        for query, key, reach in zip(*places, np.broadcast_to(radius, len(shape)), strict=True):
            found = found & (abs(query - key) <= reach)
        return found

    return Mask(keep)


def block_diffusion(length, size):
    def keep(at):
        clean, clean_key = (at.query >= length, at.key >= length)
        block, key_block = (one % length // size for one in (at.query, at.key))
        seen = np.where(clean_key, np.where(clean, key_block <= block, key_block < block), block == key_block)
        inside = (at.query >= 0) & (at.query < 2 * length) & (at.key >= 0) & (at.key < 2 * length)
        return seen & inside & ~(clean & ~clean_key)

    return Mask(keep)


masks = SimpleNamespace(
    causal=lambda: sliding_window(None),
    sliding_window=sliding_window,
    chunked=lambda size: Mask(lambda at: at.query // size == at.key // size),
    dilated=lambda stride: Mask(lambda at: (at.key - at.query) % stride == 0),
    global_tokens=lambda count: Mask(lambda at: ((at.query >= 0) & (at.query < count)) | (at.key < count)),
    prefix=keys_below,
    lengths=keys_below,
    valid_keys=lambda valid: Mask(lambda at: at.align(valid, 1)[..., None, :] != 0),
    segments=segments,
    shared_prefix=lambda length, ids: keys_below(length) | segments(ids),
    streaming=lambda before, first: sliding_window(None) & (sliding_window(before) | keys_below(first)),
    blocks=blocks,
    chosen_blocks=chosen_blocks,
    chosen_keys=chosen_keys,
    from_array=lambda array: Mask(lambda at: array != 0),
    from_drop=lambda array: Mask(lambda at: array == 0),
    tree=tree,
    neighbourhood=neighbourhood,
    block_diffusion=block_diffusion,
    predicate=lambda fn: Mask(lambda at: fn(**{name: getattr(at, name) for name in fn.__code__.co_varnames})),
)


def alibi(num_heads=None, slopes=None):
    if slopes is None:
        below = 1 << num_heads.bit_length() - 1
        slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
        slopes = np.array((slopes + [2 ** (-4 * (2 * i + 1) / below) for i in range(below)])[:num_heads])
    return lambda x, at: x - at.per_head(slopes) * abs(at.query - at.key)


def relative_bias(table, bidirectional, max_distance):
    count = table.shape[0] // (1 + bidirectional)
    exact = count // 2

    def bucket(distance):
        after, distance = (distance > 0, abs(distance)) if bidirectional else (False, max(-distance, 0))
        # Powers of fractions: the logarithm of a border would be rounded.
        far = [Fraction(max_distance, exact) ** step for step in range(1, count - exact)]
        passed = sum(Fraction(distance, exact) ** (count - exact) >= one for one in far)
        return after * count + (distance if distance < exact else exact + passed)

    def score(x, at):
        found, index = np.unique(at.key - at.query, return_inverse=True)
        entries = table[np.array([*map(bucket, found.tolist())])[index].reshape((at.key - at.query).shape)]
        if table.shape[1] == 1:
            return x + entries[..., 0]
        return x + sum(entries[..., head] * (at.head == head) for head in range(table.shape[1]))

    return score


@dataclass
class Metric:
    """What stands where the product of query and key does."""

    matrix: np.ndarray


scores = SimpleNamespace(
    alibi=alibi,
    relative_bias=relative_bias,
    softcap=lambda cap: lambda x, at: at.per_head(cap) * np.tanh(x / at.per_head(cap)),
    temperature=lambda value: lambda x, at: x / at.per_head(value),
    modifier=lambda fn: lambda x, at: fn(x, at.batch, at.head, at.query, at.key),
    bilinear=Metric,
)


def join_leading(*arrays):
    """Return the call's leading axes: those of all arrays, as many heads as the most."""
    shapes = [array.shape[:-2] for array in arrays]
    return (*np.broadcast_shapes(*(x[:-1] for x in shapes)), *max((x[-1:] for x in shapes), default=()))


def expand(array, leading):
    """Give an array (..., X, Y) the call's leading axes, repeating heads that a group shares."""
    array = array.reshape((*(1,) * (len(leading) + 2 - array.ndim), *array.shape))
    if leading and 1 < array.shape[-3] < leading[-1]:
        array = np.repeat(array, leading[-1] // array.shape[-3], -3)
    return np.broadcast_to(array, (*leading, *array.shape[-2:]))


def collapse(array, shape, total=np.sum):
    """Sum what `expand` and broadcasting repeat."""
    if array.size == 0:
        return np.zeros(shape, array.dtype)
    array = array.reshape((*(1,) * (len(shape) - array.ndim), *array.shape))
    own = (*(1,) * (array.ndim - len(shape)), *shape)
    if len(own) > 2 and 1 < own[-3] < array.shape[-3]:
        array = total(array.reshape((*array.shape[:-3], own[-3], -1, *array.shape[-2:])), -3)
    axes = tuple(axis for axis, size in enumerate(own) if size == 1 < array.shape[axis])
    return total(array, axes, keepdims=True).reshape(shape)


def swap(array):
    return np.swapaxes(array, -1, -2)


def add(array):
    """Sum over keys."""
    return array.sum(-1, keepdims=True)


def step(array):
    """Return an imaginary step that changes no digit of real parts."""
    return 1e-12j if array.dtype in (np.float32, np.complex64) else 1e-30j


def rounded(array, dtype):
    """Round real parts to a dtype, and imaginary ones, which are small, to bfloat16."""
    if np.iscomplexobj(array):
        return rounded(array.real, dtype) + 1j * rounded(array.imag, ml_dtypes.bfloat16)
    return array.astype(dtype).astype(array.dtype)


class Attention:
    """One call. `narrow` rounds what products multiply to bfloat16; `own`, transformed queries to a dtype."""

    def __init__(
        self, query, key, value, *, mask=None, bias=None, score=(), scale=None, sinks=None, survivors=1.0,
        query_offset=None, key_offset=None, query_positions=None, key_positions=None, narrow=False, own=None,
    ):  # fmt: skip
        self.metric = score[0].matrix if score and isinstance(score[0], Metric) else None
        self.chain, self.survivors = score[self.metric is not None :], survivors
        self.given = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
        self.narrow = (lambda x: rounded(x, ml_dtypes.bfloat16)) if narrow else lambda x: x
        self.round = (lambda x: x) if own is None else lambda x: rounded(x, own)
        self.leading, T, S = join_leading(query, key, value), query.shape[-2], key.shape[-2]
        self.at = Cells(self.leading, T, S, query_offset, key_offset, query_positions, key_positions)
        keep = np.broadcast_to(True if mask is None else mask.keep(self.at), (*self.leading, T, S))
        self.keep = keep = keep if bias is None else keep & (bias != -np.inf)

        asked = query if self.metric is None else self.round(query @ self.metric)
        self.query, self.key, value = (expand(array, self.leading) for array in (asked, key, value))
        self.scale = np.asarray(1 / np.sqrt(query.shape[-1]) if scale is None else scale, query.dtype)
        self.products = np.where(keep, self.query @ swap(self.key), 0)
        self.raw = self.scale * self.products
        final = self.follow(self.chain, self.raw) + (0 if bias is None else np.where(keep, bias, 0))
        self.final = np.where(keep, final, -np.inf)
        # What NaN and inf may not reach is computed as if they were not there.
        odd = keep & ~(np.isfinite(self.raw) & (np.isfinite(final) | (final == -np.inf)))
        # A product of -inf may count as removed before a function of scores sees it, and what a score adds
        # may be added to what is removed, where NaN stays.
        unsaid = (keep & (self.raw == -np.inf) & (len(self.chain) > 0)) | (~keep & np.isnan(final))
        unsaid = unsaid.any(-1, keepdims=True)
        self.nan_row = np.isnan(self.final).any(-1, keepdims=True) & ~unsaid
        self.odd_row = (odd.any(-1, keepdims=True) | unsaid) & ~self.nan_row
        # A value that some query may attend to may spoil all rows that share it, and a key their gradients.
        self.reached, self.shared = (self._is_met("value", value), self._is_met("key", self.key))
        clean = lambda x: np.where(np.isfinite(x), x, 0)
        self.value, self.query, self.key = map(clean, (value, self.query, self.key))
        self.score = np.where(np.isfinite(self.final), self.final, -np.inf)
        self.live = np.isfinite(self.score).any(-1, keepdims=True)
        self.largest = self.score.real.max(-1, keepdims=True, initial=-np.inf)

        sink = np.full_like(self.score, -np.inf, shape=self.largest.shape)
        sink = sink if sinks is None else sinks[..., None, None]
        peak = np.maximum(self.largest, sink.real)
        some, base = peak > -np.inf, np.where(peak == -np.inf, 0, peak)
        weights, sunk = np.exp(self.score - base), np.exp(sink - base)
        total = np.where(some, add(weights) + sunk, 1)
        self.weights, self.sunk = weights / total, sunk / total
        self.lse = np.where(some, base + np.log(total), -np.inf)
        logs, sunk_log = (np.log(np.where(one.real > 0, one, 1)) for one in (self.weights, self.sunk))
        self.entropy = -add(self.weights * logs) - self.sunk * sunk_log
        self.by_entropy = -self.weights * (logs + self.entropy), -self.sunk * (sunk_log + self.entropy)
        self.kept = survivors * self.weights
        self.output = self.narrow(self.kept) @ self.value
        self.spoiled = self.nan_row | ((self.kept.real > 0) @ np.isnan(value))
        best = self.score.real.argmax(-1)[..., None] if S else np.zeros((*self.leading, T, 1), int)
        self.argmax = np.where(self.live, best, -1)
        self.first = np.arange(S) == self.argmax
        others = np.where(self.first, -np.inf, self.score).real.max(-1, keepdims=True, initial=-np.inf)
        near = others >= self.largest - 1e-4 * (1 + abs(self.largest))
        self.tie = self.live & near  # rounding decides which is first

    def _is_met(self, name, array):
        """Tell where a head may attend to a vector that is not finite, or others that share it may."""
        asked = swap(self.keep.any(-2, keepdims=True))
        asked = collapse(asked, (*self.given[name].shape[:-1], 1), np.any)
        return (expand(asked, self.leading) & ~np.isfinite(array)).any((-2, -1), keepdims=True)

    def follow(self, chain, x):
        for score in chain:
            x = np.broadcast_to(score(x, self.at), x.shape).astype(x.dtype)
        return x

    def results(self):
        """Return everything that a call may return."""
        row, odd = self.nan_row, self.odd_row
        rows = {"lse": self.lse, "max_score": self.largest, "entropy": self.entropy}
        found = {name: Expected(np.where(row, np.nan, x)[..., 0], odd[..., 0]) for name, x in rows.items()}
        weights = np.where(row & (self.weights > 0), np.nan, self.weights)
        argmax = np.where(row, 0, self.argmax)[..., 0]
        output = np.where(self.spoiled, np.nan, self.output)
        return found | {
            "output": Expected(output, odd | (self.reached & ~self.spoiled)),
            "weights": Expected(weights, odd | (row & (weights == 0))),
            "scores": Expected(self.final, odd | (self.final == np.inf)),
            "argmax": Expected(argmax, (odd | (self.tie & ~row))[..., 0]),
        }

    def vjp(self, cotangents, parameters, remake):
        """Return gradients of sum(result * cotangent); `remake(parameters)` makes the scores again."""
        given, weights, grads, zero = self.given, self.weights, {}, np.zeros_like(self.lse)
        column = lambda name: cotangents[name][..., None] if name in cotangents else zero
        lse, entropy, largest = map(column, ("lse", "entropy", "max_score"))
        output = cotangents.get("output", zero)
        by_weight = self.survivors * self.narrow(output @ swap(self.value)) + cotangents.get("weights", 0)
        mean = add(weights * by_weight)
        by_score = weights * (by_weight - mean + lse) + entropy * self.by_entropy[0]
        by_score += self.keep * cotangents.get("scores", 0) + self.first * largest
        by_sink = self.sunk * (lse - mean) + entropy * self.by_entropy[1]
        # The sizes of what cancels in all these go through the same sums as they do.
        size = weights * (abs(by_weight) + add(weights * abs(by_weight)) + abs(lse)) + abs(by_score)
        clean = np.where(self.keep & np.isfinite(self.raw), self.raw, 0)
        small = step(clean)
        # Nothing passes through what a score removes, whose complex products are NaN.
        change = lambda moved: np.where(np.isfinite(self.score), moved.imag / abs(small), 0)
        slope = change(self.follow(self.chain, clean + small)) if self.chain else np.ones_like(clean)
        # What is odd in a row may reach the gradients of all keys of its head, as 0 times NaN.
        odd = np.broadcast_to(self.odd_row | self.nan_row | self.reached, self.keep.shape)
        odd = odd | (self.keep & (self.tie & ("max_score" in cotangents)))
        rows, columns = odd.any(-1, keepdims=True), swap(odd.any(-2, keepdims=True))

        def note(name, shape, grad, size, free):
            full = np.broadcast_shapes(grad.shape, (*self.leading, 1, 1))
            grad, size, free = (np.broadcast_to(one, full) for one in (grad, size, free))
            size = collapse(size, shape).max(initial=0)
            grads[name] = Expected(collapse(grad, shape), collapse(free, shape, np.any), size)

        raw, raw_size, scale = self.narrow(by_score * slope), size * abs(slope), abs(self.scale)
        asked, asked_size = self.scale * (raw @ self.key), scale * (raw_size @ abs(self.key))
        if self.metric is not None:
            asked = self.round(asked)
            query, beside = swap(expand(given["query"], self.leading)), ~np.isfinite(given["query"]).all()
            query = np.where(np.isfinite(query), query, 0)
            note("metric", self.metric.shape, query @ asked, abs(query) @ asked_size, odd.any() | beside)
            asked, asked_size = asked @ swap(self.metric), asked_size @ abs(swap(self.metric))
        note("query", given["query"].shape, asked, asked_size, rows | self.shared)
        keys_size = scale * (swap(raw_size) @ abs(self.query))
        note("key", given["key"].shape, self.scale * (swap(raw) @ self.query), keys_size, columns)
        mixed = swap(self.narrow(self.kept))
        note("value", given["value"].shape, mixed @ output, mixed @ abs(output), columns)
        if given["bias"] is not None:
            note("bias", given["bias"].shape, by_score, size, odd)
        if given["sinks"] is not None:
            sink_size = self.sunk * (add(size) + abs(lse)) + abs(by_sink)
            note("sinks", (*given["sinks"].shape, 1, 1), by_sink, sink_size, rows)
            one = grads["sinks"]
            one.value, one.free = one.value[..., 0, 0], one.free[..., 0, 0]
        note("scale", (), raw * self.products, raw_size * abs(self.products), odd)
        for name, parameter in parameters.items():
            grads[name] = Expected(np.zeros(parameter.shape), np.zeros(parameter.shape, bool), 0.0)
            for index in np.ndindex(parameter.shape):
                bumped = np.array(parameter + 0 * small)
                bumped[index] += small
                chain = remake({name: bumped})[self.metric is not None :]
                moved = change(self.follow(chain, clean + 0 * small))
                # These two divide by their parameter, and what is left may be less than what cancels.
                lost = (abs(clean) + 1) / abs(parameter).min() if name in ("cap", "temperature") else 0
                one, terms = grads[name], size * (abs(moved) + lost)
                one.value[index], one.free[index] = (by_score * moved).sum(), odd.any()
                one.size = max(one.size, terms.sum())
        return grads


def read(
    query, key, *, tokens=None, query_tokens=None, delimiters=(), grid=64, top_k=8, first=None, local=None,
    **options,
):  # fmt: skip
    """Return statistics of a call's weights."""
    call = Attention(query, key, np.zeros_like(key[..., :1]), **options)
    at, nan, odd = call.at, call.nan_row[..., 0], call.odd_row[..., 0]
    live = (call.live & ~call.nan_row)[..., 0]
    weights = np.where(live[..., None], call.weights, 0)
    distance = np.broadcast_to(at.query - at.key, weights.shape)
    first = min(max(at.S // 32, 1), 4) if first is None else first
    local = min(max(at.S // 8, 2), 16) if local is None else local
    kinds = {"first": at.key < first, "local": abs(distance) < local}
    kinds |= {"self": distance == 0, "previous": distance == 1, "next": distance == -1}
    if tokens is not None:
        keys, queries = at.align(tokens, 1)[..., None, :], at.align(query_tokens, 1)[..., None]
        kinds["duplicate"] = (queries == keys) & (distance != 0)
        kinds["induction"] = (queries == np.roll(keys, 1, -1)) & (at.column > 0) & (distance != -1)
        kinds["delimiter"] = np.isin(keys, delimiters)
    rows = {f"{name}_mass": (weights * kind).sum(-1) for name, kind in kinds.items()}
    rows |= {"lse": call.lse[..., 0], "entropy": call.entropy[..., 0], "sink_mass": call.sunk[..., 0]}
    rows["distance"] = (weights * distance).sum(-1) / np.where(live, weights.sum(-1), 1)
    found = {name: Expected(np.where(nan, np.nan, one), odd) for name, one in rows.items()}
    found["distance"].size = abs(distance).max(initial=0)
    if options.get("sinks") is None:
        found["sink_mass"].value = np.zeros(nan.shape)
    found["keys"] = Expected(np.isfinite(call.score).sum(-1), nan | odd)
    order = ("first", "self", "previous", "next", "local", "duplicate", "induction", "delimiter")
    counts = [(kinds.get(name, False) & np.isfinite(call.score)).sum(-1) for name in order]
    found["pattern_keys"] = Expected(np.stack(counts, -1), (nan | odd)[..., None])
    top = np.pad(-np.sort(-weights, -1), [(0, 0)] * (weights.ndim - 1) + [(0, top_k)])[..., :top_k]
    found["top_weights"] = Expected(np.where(nan[..., None], np.nan, top), odd[..., None])
    bins = 31 + np.sign(distance) * np.ceil(np.log2(abs(distance) + 1)).astype(int)
    binned = np.stack([(weights * (bins == place)).sum((-2, -1)) for place in range(63)], -1)
    sides = [1 << (-(-length // grid) - 1).bit_length() for length in (at.T, at.S)]
    starts = [np.arange(0, length, side) for length, side in zip((at.T, at.S), sides, strict=True)]
    by_block = lambda join: join.reduceat(join.reduceat(weights, starts[0], -2), starts[1], -1)
    mass, largest = by_block(np.add), by_block(np.maximum)
    block_rows = np.add.reduceat(live.astype(int), starts[0], -1)
    columns = {"key_mass": weights.sum(-2), "key_max": weights.max(-2), "block_max": largest}
    columns |= {"block_rows": block_rows, "block_mass": mass / np.maximum(block_rows, 1)[..., None]}
    columns["distance_mass"] = binned / np.maximum(live.sum(-1), 1)[..., None]
    free = [odd.any(-1).reshape((*odd.shape[:-1], *(1,) * rank)) for rank in range(3)]
    return found | {name: Expected(one, free[one.ndim + 1 - odd.ndim]) for name, one in columns.items()}


FEATURES = {
    "identity": lambda x: x,
    "relu": lambda x: np.where(x.real > 0, x, 0),
    "exp": np.exp,
    "elu1": lambda x: np.where(x.real > 0, x + 1, np.exp(np.where(x.real > 0, 0, x))),
}


class Recurrence:
    """One call of linear attention, token by token; gradients are derivatives by each number."""

    def __init__(
        self, query, key, value, *, decay=None, rate=None, initial=(None, None), valid=None, causal=True,
        feature_map="identity", normalise=False, scale=None,
    ):  # fmt: skip
        memory, key_sum = (*initial, None)[:2]
        arrays = {"query": query, "key": key, "value": value, "decay": decay, "rate": rate}
        arrays |= {"memory": memory, "key_sum": key_sum}
        self.arrays = {name: array for name, array in arrays.items() if array is not None}
        self.leading, self.heads = join_leading(query, key, value), max(key.shape[-3], value.shape[-3])
        self.features, self.normalise, self.causal = FEATURES[feature_map], normalise, causal
        self.scale = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
        self.valid = np.ones(key.shape[-2], bool) if valid is None else valid != 0

    def run(self, arrays, lanes=()):
        """Return the results by name; arrays may have one more leading axis, `lanes`."""
        leading, wide, rank = (*lanes, *self.leading), {}, len(self.leading) + 2
        for name, array in arrays.items():
            short = self.arrays[name].ndim < rank or name == "key_sum"  # rows of numbers, not of vectors
            wide[name] = expand(array[..., None] if short else array, leading)
        valid = self.valid.reshape((*self.valid.shape[:-1], *(1,) * (rank - 1 - self.valid.ndim), -1, 1))
        valid = expand(valid, self.leading)
        wide["key"], wide["value"] = (np.where(valid, wide[name], 0) for name in ("key", "value"))
        wide["query"] = np.where(valid, wide["query"], 0) if self.causal else wide["query"]
        query, key = self.features(wide["query"]), self.features(wide["key"])
        state = wide.get("memory", 0) + 0 * (key[..., 0, :, None] * wide["value"][..., 0, None, :])
        total = (wide["key_sum"][..., 0] if "key_sum" in wide else 0) + 0 * key[..., 0, :]
        outputs = []

        def ask(row):
            found = (row[..., None, :] @ state)[..., 0, :]
            divisor = (row * total).sum(-1, keepdims=True)
            return np.where(divisor == 0, 0, found / divisor) if self.normalise else self.scale * found

        for t in range(key.shape[-2]):
            factor = np.exp(wide["decay"][..., t, :]) if "decay" in wide else np.ones(1, key.real.dtype)
            kept, found, real = state * factor[..., None], wide["value"][..., t, :], valid[..., t, :]
            if "rate" in wide:
                found = wide["rate"][..., t, :] * (found - (key[..., t, None, :] @ kept)[..., 0, :])
            state = np.where(real[..., None], kept + key[..., t, :, None] * found[..., None, :], state)
            total = np.where(real, total * factor + key[..., t, :], total)
            outputs += [np.where(real, ask(query[..., t, :]), 0)] if self.causal else []
        if not self.causal:
            outputs = [ask(query[..., t, :]) for t in range(query.shape[-2])]
        group = self.leading[-1] // self.heads
        states = {"memory": state[..., ::group, :, :], "key_sum": total[..., ::group, :]}
        return {"output": np.stack(outputs, -2)} | states

    def results(self):
        return {name: Expected(one) for name, one in self.run(self.arrays).items()}

    def vjp(self, cotangents, parameters, remake):
        grads = {}
        for name, array in self.arrays.items():
            moves = np.eye(array.size).reshape((array.size, *array.shape)) * step(array)
            moved = (array + moves).astype(np.result_type(array, np.complex64))
            found = self.run(self.arrays | {name: moved}, (array.size,))
            grad = np.zeros(array.size)
            for result, cotangent in cotangents.items():
                part = found[result].imag * cotangent / abs(step(array))
                part = np.broadcast_to(part, (array.size, *cotangent.shape))
                grad += part.reshape((array.size, -1)).sum(-1)
            grads[name] = Expected(grad.reshape(array.shape))
        return grads
