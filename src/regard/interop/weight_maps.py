"""Tables of stored tensors and the parameters that they fill, with conversions, read in both directions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.interop.weight_files import LazyTensor, WeightFiles

_PIECE = 1 << 20  # numbers checked at a time
Shape = tuple[int, ...]
Settings = Mapping[str, Any]
"""The content of a config.json."""
Fields = Mapping[str, Any]
"""Fields of a TransformerConfig."""


@dataclass(frozen=True)
class Conversion:
    """A rule in both directions: from a tensor to a parameter, and from the parameters that it joins back.

    It also gives the tensor's shape from the parameter's. The default changes nothing.
    """

    load: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor
    store: Callable[[Sequence[np.ndarray], Settings], np.ndarray] = lambda parameters, _: parameters[0]
    stored_shape: Callable[[Shape, Settings], Shape] = lambda shape, _: shape
    order: int = 0  # of the parameter among those that are joined


UNCHANGED = Conversion()
TRANSPOSED = Conversion(
    lambda tensor: tensor.T, lambda parameters, _: parameters[0].T, lambda shape, _: shape[::-1]
)


def take_part(index: int, count: int) -> Conversion:
    """Make the conversion of one of `count` equal parts of the tensor's last axis."""
    return Conversion(
        lambda tensor: np.split(tensor, count, axis=-1)[index],
        lambda parameters, _: np.concatenate(parameters, axis=-1),
        lambda shape, _: (*shape[:-1], count * shape[-1]),
        index,
    )


def take_rows(index: int, sizes: int | Sequence[int]) -> Conversion:
    """Make the conversion of a part of the rows of a tensor (out, in), or of a vector.

    Parts are of these sizes, or so many of one size.
    """
    cuts = sizes if isinstance(sizes, int) else np.cumsum(sizes)[:-1]
    return Conversion(
        lambda tensor: np.split(tensor, cuts)[index].T,
        lambda parameters, _: np.concatenate([parameter.T for parameter in parameters]),
        lambda shape, _: (sizes * shape[-1] if isinstance(sizes, int) else sum(sizes), *shape[:-1]),
        index,
    )


def take_taps(index: int, sizes: Sequence[int]) -> Conversion:
    """Make the conversion of one of several parts of the channels of torch.nn.Conv1d, one group for each."""
    span = take_rows(index, sizes)
    return Conversion(
        lambda tensor: span.load(tensor[:, 0]),
        lambda parameters, settings: span.store(parameters, settings)[:, None],
        lambda shape, _: (sum(sizes), 1, shape[0]),
        index,
    )


def take_rows_of_heads(index: int, num_heads: int, sizes: Sequence[int]) -> Conversion:
    """Make the conversion of one of several parameters, of which each head's rows of a tensor hold some."""
    cuts = np.cumsum(sizes)[:-1]

    def load(tensor: np.ndarray) -> np.ndarray:
        heads = tensor.reshape((num_heads, sum(sizes), *tensor.shape[1:]))
        return np.split(heads, cuts, axis=1)[index].reshape((-1, *tensor.shape[1:])).T

    def store(parameters: Sequence[np.ndarray], _: Settings) -> np.ndarray:
        rows = [parameter.T for parameter in parameters]
        heads = [array.reshape((num_heads, -1, *array.shape[1:])) for array in rows]
        return np.concatenate(heads, axis=1).reshape((-1, *rows[0].shape[1:]))

    return Conversion(load, store, lambda shape, _: (num_heads * sum(sizes), *shape[:-1]), index)


def take_every(index: int, count: int) -> Conversion:
    """Make the conversion of one of `count` parameters that take turns along the tensor's last axis."""
    return Conversion(
        lambda tensor: tensor[..., index::count],
        lambda parameters, _: np.stack(parameters, axis=-1).reshape(*parameters[0].shape[:-1], -1),
        lambda shape, _: (*shape[:-1], count * shape[-1]),
        index,
    )


def squeeze(count: int) -> Conversion:
    """Make the conversion of a parameter without the tensor's `count` leading axes of length 1."""
    ones = (1,) * count
    return Conversion(
        lambda tensor: tensor.reshape(tensor.shape[count:]),
        lambda parameters, _: parameters[0].reshape(ones + parameters[0].shape),
        lambda shape, _: ones + shape,
    )


@dataclass(frozen=True)
class Pair:
    """One stored tensor and one parameter; {n} stands for the layer's number in both.

    With {e} in its name there is a tensor for each part of the parameter along its first axis.
    """

    tensor: str
    parameter: str
    conversion: Conversion = UNCHANGED


def linear(
    tensor: str, parameter: str, kernel: Conversion = TRANSPOSED, bias: Conversion = UNCHANGED
) -> tuple[Pair, Pair]:
    """Pair the parts of torch.nn.Linear, whose weight is (out, in), with those of nnx.Linear."""
    weight = Pair(f"{tensor}.weight", f"{parameter}.kernel", kernel)
    return weight, Pair(f"{tensor}.bias", f"{parameter}.bias", bias)


def norm(tensor: str, parameter: str) -> tuple[Pair, Pair]:
    """Pair the parts of torch.nn.LayerNorm with those of nnx.LayerNorm."""
    return Pair(f"{tensor}.weight", f"{parameter}.scale"), Pair(f"{tensor}.bias", f"{parameter}.bias")


@dataclass(frozen=True)
class WeightMap:
    """The table of one architecture."""

    pairs: tuple[Pair, ...]  # without the prefix
    prefix: str = ""  # what names of the model's body may begin with, in files of a model with a head
    writes_prefix: bool = False  # but for the head's
    ignored: tuple[str, ...] = ()  # patterns: buffers, poolers and heads of other tasks
    respelled: tuple[tuple[str, str], ...] = ()  # endings of older files and their present ones

    def spell(self, name: str) -> str:
        """Return a file's name for a tensor as the table writes it."""
        for old, new in self.respelled:
            if name.endswith(old):
                name = name[: -len(old)] + new
        return name.removeprefix(self.prefix)

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def adding(self, *pairs: Pair) -> WeightMap:
        """Return the table that has further pairs."""
        return replace(self, pairs=(*self.pairs, *pairs))

    def ignoring(self, pattern: str) -> WeightMap:
        """Return the table that passes over such tensors, too."""
        return replace(self, ignored=(*self.ignored, pattern))

    def written(self, name: str) -> str:
        """Return the name under which a tensor of the table is saved."""
        return self.prefix + name if self.writes_prefix and name != self._head else name

    def find(self, path: str) -> tuple[str, Conversion]:
        """Return the name, without prefix, of the tensor that stores a parameter, and its conversion."""
        number = re.search(r"\.(\d+)\.", path)
        pair = self._by_path.get(path.replace(number[0], ".{n}.", 1) if number else path)
        if pair is None:
            raise ValueError(f"model: the format has no tensor for its parameter {path}; choose another kind")
        return pair.tensor.replace("{n}", number[1] if number else ""), pair.conversion

    def has_own_head(self, weights: WeightFiles) -> bool:
        """Return whether the files hold a head that differs from the embedding table."""
        held = {self.spell(name): name for name in weights}
        head, table = self._head, self._find_ending("entry.table.embedding")
        if head not in held or table not in held:
            return False
        return not np.array_equal(weights.read(held[head]), weights.read(held[table]))

    @functools.cached_property
    def _head(self) -> str | None:
        return self._find_ending("head.kernel")

    def _find_ending(self, end: str) -> str | None:
        """Return the first tensor whose parameter's path ends so."""
        return next((pair.tensor for pair in self.pairs if pair.parameter.endswith(end)), None)

    @functools.cached_property
    def _by_path(self) -> dict[str, Pair]:
        return {pair.parameter: pair for pair in self.pairs}


def parameter_paths(model: nnx.Module) -> dict[str, Any]:
    """Return every parameter by its path, such as stack.blocks.0.attention.query_projection.kernel."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf for path, leaf in state}


def read_parameters(
    table: WeightMap, shapes: Mapping[str, Shape], weights: WeightFiles, settings: Settings
) -> Iterator[tuple[str, np.ndarray, np.dtype]]:
    """Check that all tensors fit, then read every parameter's path, array and stored dtype, one at a time.

    One error lists all tensors that do not fit. `shapes` are those of the parameters, by path.
    """
    held = {table.spell(name): name for name in weights}
    if len(held) < len(weights):
        twice = sorted(name for name in weights if held[table.spell(name)] != name)
        raise ValueError(f"weights: expected every tensor once, got a second {', '.join(twice)}")
    sources = {path: _Source(*table.find(path), shapes[path]) for path in shapes}
    tensors, faults = set(), set()
    for path, source in sources.items():
        expected = source.conversion.stored_shape(source.shape, settings)
        tensors |= {*source.tensors}
        for tensor in source.tensors:
            if tensor not in held:
                faults.add(f"missing: {table.written(tensor)} {expected}, for {path}")
                continue
            name, stored = held[tensor], weights[held[tensor]]
            if not stored.dtype.startswith(("F", "BF")):
                faults.add(f"no floating point: {name} of {stored.dtype}")
            elif stored.shape != expected:
                faults.add(f"misshapen: {name}: expected {expected}, got {stored.shape}")
    for name, original in held.items():
        if name not in tensors and not table.ignores(name):
            faults.add(f"extra: {original} {weights[original].shape}")
    if faults:
        raise ValueError(
            f"weights: expected the {len(tensors)} tensors that this config describes; {len(faults)} do not"
            " fit:\n  " + "\n  ".join(sorted(faults))
        )
    return _read(sources, held, weights)


class _Source:
    """The tensors that a parameter is read from and written to: one, or one for each part of it."""

    def __init__(self, tensor: str, conversion: Conversion, shape: Shape):
        self.is_spread, self.conversion = "{e}" in tensor, conversion
        self.shape = shape[1:] if self.is_spread else shape
        numbers = range(shape[0]) if self.is_spread else range(1)
        self.tensors = [tensor.replace("{e}", str(number)) for number in numbers]


def _read(
    sources: Mapping[str, _Source], held: Mapping[str, str], weights: WeightFiles
) -> Iterator[tuple[str, np.ndarray, np.dtype]]:
    """Yield parameters; those that are parts of one tensor after one another, so that it is read once."""
    last, arrays = None, []
    for path, source in sorted(sources.items(), key=lambda item: item[1].tensors):
        if source.tensors != last:
            last, arrays = source.tensors, [_read_finite(weights, held[tensor]) for tensor in source.tensors]
        loaded = [source.conversion.load(array) for array in arrays]
        array = np.stack(loaded) if source.is_spread else loaded[0]
        yield path, array, array.dtype


def _read_finite(weights: WeightFiles, name: str) -> np.ndarray:
    """Read a tensor in which there is neither NaN nor infinity."""
    array = weights.read(name)
    flat = array.reshape(-1)
    if not all(np.isfinite(flat[first : first + _PIECE]).all() for first in range(0, flat.size, _PIECE)):
        raise ValueError(
            f"weights: expected finite numbers, got NaN or infinity in {name}; the file is damaged, or was"
            " saved by a run that diverged"
        )
    return array


def name_tensors(
    table: WeightMap,
    parameters: Mapping[str, tuple[Shape, np.dtype]],
    fetch: Callable[..., np.ndarray],
    settings: Settings,
) -> dict[str, LazyTensor]:
    """Return a model's tensors under the names they are saved as, each computed when it is written.

    `fetch` gives a parameter's array, by path; and, of one that is stored in several, its part by a number.
    """
    parts: dict[str, list[tuple[_Source, tuple[Any, ...]]]] = {}
    for path, (shape, _) in parameters.items():
        source = _Source(*table.find(path), shape)
        for number, tensor in enumerate(source.tensors):
            parts.setdefault(tensor, []).append((source, (path, number) if source.is_spread else (path,)))
    tensors = {}
    for tensor, held in sorted(parts.items()):
        keys = [key for _, key in sorted(held, key=lambda item: item[0].conversion.order)]
        source, dtype = held[0][0], join_dtypes(parameters[key[0]][1] for key in keys)

        def compute(keys: Any = keys, source: _Source = source, dtype: np.dtype = dtype) -> np.ndarray:
            return source.conversion.store([fetch(*key).astype(dtype) for key in keys], settings)

        shape = source.conversion.stored_shape(source.shape, settings)
        tensors[table.written(tensor)] = LazyTensor(shape, dtype, compute)
    return tensors


def join_dtypes(dtypes: Iterable[Any]) -> np.dtype:
    """Return the narrowest dtype that holds the numbers of all of these, as NumPy cannot for bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))
