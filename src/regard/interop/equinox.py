"""Equinox's multi-head attention, computed by Regard with the weights that a model has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from regard.axes import Array, ArrayLike, Float
from regard.interop import layouts
from regard.loading import name_extra
from regard.masks import Mask

with name_extra(__name__):
    import equinox as eqx

__all__ = ["replace_attention"]  # the layer itself has the arguments and fields of Equinox's

Model = TypeVar("Model")


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """Answer as `equinox.nn.MultiheadAttention` does, with its constructor, weights and arguments.

    What differs: `mask` may also be a `masks.Mask`; a query that may attend to nothing gets zeros in place of
    the mean of all values; dropout draws the pattern of `attend`; and calls take all other options of
    `regard.attend`, with `aux` returning a pair. Query t sits at t and key s at s, unless placed otherwise.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard import masks
        >>> from regard.interop.equinox import MultiheadAttention
        >>> layer = MultiheadAttention(2, 6, key=jax.random.key(0))
        >>> x = jnp.ones((5, 6))
        >>> layer(x, x, x, masks.causal()).shape
        (5, 6)

    Reference: `equinox.nn.MultiheadAttention` of Equinox 0.13.
    """

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Float[Array, "T query_size"],
        key_: Float[Array, "S key_size"],
        value: Float[Array, "S value_size"],
        mask: Mask | ArrayLike | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        process_heads: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None = None,
        **options: Any,
    ) -> Any:
        """Attend from each query to the keys.

        Args:
            query, key_, value: `(T, query_size)`, `(S, key_size)`, `(S, value_size)`; or under `jax.vmap`.
            mask: True = may attend: a `masks.Mask`, or `(T, S)` or `(heads, T, S)` booleans; None: all may.
            key: random key, needed where something drops.
            inference: whether nothing drops; None means what the layer says.
            process_heads: makes other heads `(length, heads, width)` of those of query, key and value.
            options: all others of `regard.attend`, as they are there.

        Returns:
            `(T, output_size)`; with `aux`, a pair of it and the dict that `attend` returns.

        Raises:
            TypeError, ValueError: as `attend`; other widths than the layer has, dropout without a key.
        """
        options = layouts.further_options(
            options, type(self).__call__, dropout_rate="the layer has its own, dropout_p", rng="write key="
        )
        arrays = layouts.read_arrays(query=query, key_=key_, value=value)
        projections = self.query_proj, self.key_proj, self.value_proj
        for (name, array), projection in zip(arrays.items(), projections, strict=True):
            if array.ndim != 2 or array.shape[1] != projection.in_features:
                expected = f"(length, {projection.in_features})"
                raise ValueError(f"{name}: expected {expected}, or more under jax.vmap, got {array.shape}")
        heads: Any = [
            jax.vmap(projection)(array).reshape((array.shape[0], self.num_heads, -1))
            for array, projection in zip(arrays.values(), projections, strict=True)
        ]
        if process_heads is not None:
            heads = layouts.apply_to_three("process_heads", process_heads, *heads)
        call = layouts.HeadsLast(*heads, ranks=range(3, 4))
        options = layouts.from_the_first(options, mask, call.shape)
        rate = 0.0 if (self.dropout.inference if inference is None else inference) else self.dropout.p
        layouts.demand_key("key", key, rate, f"the layer has dropout_p = {rate}", "inference=True")
        mask = layouts.read_mask("mask", mask, call.shape)
        rng = key if rate else None
        output, aux = call.attend(mask=mask, dropout_rate=rate, rng=rng, **options)
        output = jax.vmap(self.output_proj)(output.reshape((output.shape[0], -1)))
        return (output, aux) if aux else output


def replace_attention(model: Model) -> Model:
    """Return a model whose every `equinox.nn.MultiheadAttention` is Regard's, with the same weights.

    Args:
        model: any pytree, such as an Equinox module; layers that have a class of their own stay.

    Returns:
        The model with `MultiheadAttention` of this module; arrays are not copied.

    Example:
        >>> import equinox as eqx, jax
        >>> from regard.interop.equinox import replace_attention
        >>> layer = eqx.nn.MultiheadAttention(2, 6, key=jax.random.key(0))
        >>> type(replace_attention([layer])[0]).__module__
        'regard.interop.equinox'
    """

    def is_attention(node: Any) -> bool:
        return type(node) is eqx.nn.MultiheadAttention

    def replace(node: Any) -> Any:
        if not is_attention(node):
            return node
        layer = object.__new__(MultiheadAttention)
        for field in dataclasses.fields(node):
            object.__setattr__(layer, field.name, getattr(node, field.name))
        return layer

    return jax.tree.map(replace, model, is_leaf=is_attention)
