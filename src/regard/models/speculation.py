"""Speculative decoding: a small model proposes tokens, and the model that writes reads them at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array, Float
from regard.engine.call.problem import accumulation_dtype
from regard.models.logits import add_bias, are_sound
from regard.models.prefill import Structure, merge_model, read_prompts
from regard.models.prompts import Request
from regard.models.sampling import NO_TOKEN, Sampling, adjust
from regard.models.writing import Rules, State, Writing, mark_tokens, write, write_on


def probabilities(logits: Float[Array, "*B V"], sampling: Sampling, seen: Any = None) -> Float[Array, "*B V"]:
    """Compute the probabilities that tokens are drawn by, all 0 where there is none to choose."""
    logits = logits.astype(accumulation_dtype(logits))
    adjusted = adjust(logits, sampling, seen)
    if sampling.greedy:
        law = jax.nn.one_hot(jnp.argmax(adjusted, axis=-1), logits.shape[-1], dtype=logits.dtype)
    else:
        law = jax.nn.softmax(adjusted, axis=-1)
    is_sound = are_sound(add_bias(logits, sampling.logit_bias))
    return jnp.where(is_sound[..., None], law, jnp.zeros_like(law))


def acceptance(target: Float[Array, "*B V"], draft: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Compute the probability that a token is kept: min(1, target_v / draft_v), 0 where draft_v is."""
    proposed = draft > 0
    ratio = target / jnp.where(proposed, draft, jnp.ones_like(draft))
    return jnp.where(proposed, jnp.minimum(ratio, 1), jnp.zeros_like(ratio))


def residual(target: Float[Array, "*B V"], draft: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Compute the weights that a token is drawn by in place of one refused: max(0, target_v - draft_v).

    Then draft_v acceptance_v + (1 - sum_w draft_w acceptance_w) residual_v / sum_w residual_w = target_v. A
    draft of zeros leaves the target.
    """
    rest = jnp.maximum(target - draft, jnp.zeros_like(target))
    # Rounding may leave nothing where both are alike.
    return jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, target)


@functools.partial(jax.jit, static_argnames="structure")
def read_draft(structure: Structure, arrays: list[Any], request: Request) -> Any:
    return read_prompts(merge_model(structure, arrays), request)[1]


@functools.partial(jax.jit, static_argnames=("structures", "most"), donate_argnames="caches")
def speculate(
    structures: tuple[Structure, Structure],
    arrays: tuple[list[Any], list[Any]],
    rules: Rules,
    caches: tuple[Any, Any],
    writing: Writing,
    least: Array,
    *,
    most: int,
) -> State:
    """Write what the draft proposes and the model keeps, and one more token, again and again.

    Structures, arrays and caches are those of model and draft. Rows get `least` to `least + most - 1` tokens.
    """
    model, draft = map(merge_model, structures, arrays)
    max_tokens = writing.written.tokens.shape[1]

    def advance(state: State) -> State:
        caches, writing = state
        room = jnp.minimum(max_tokens - writing.written.lengths, most)
        counts, keys = jnp.where(writing.alive, room, jnp.zeros_like(room)), _split_keys(rules, writing, most)
        drafts, (proposed, law, seen) = _propose(draft, caches[1], writing, counts, rules, keys, most)
        read = jnp.concatenate((writing.newest[:, None], proposed[:, :-1]), axis=1)
        hidden, cache = model.read(read, caches[0], counts)
        logits = model.predict(hidden)
        tokens, num_kept = _verify(probabilities(logits, rules.sampling, seen), law, proposed, keys)
        done = write(writing, tokens, logits, jnp.minimum(counts, num_kept), rules)
        unread = counts - (done.written.lengths - writing.written.lengths)
        cache = _take_back(model, caches[0], cache, read, unread)
        drafts = _take_back(draft, caches[1], drafts, read, unread)
        return (cache, drafts), done

    return write_on(advance, (caches, writing), least)


def _take_back(model: Any, before: Any, cache: Any, tokens: Array, unread: Array) -> Any:
    """Take the newest tokens out of a cache; a state, which forgets none, reads again those that stay."""
    if not cache.has_states:
        return cache.rewind(cache.lengths - unread)
    counts = cache.lengths - unread - before.lengths
    start = cache.go_back(before)
    return jax.lax.cond(jnp.any(unread > 0), lambda: model.read(tokens, start, counts)[1], lambda: cache)


def _split_keys(rules: Rules, writing: Writing, most: int) -> Any:
    """Make three keys for each of the next n places, `(3, batch, n)`: to propose, to keep, to replace."""
    if rules.keys is None:
        return None
    places = writing.written.lengths[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(rules.keys, places)
    return jnp.moveaxis(jax.vmap(jax.vmap(lambda key: jax.random.split(key, 3)))(keys), 2, 0)


def _propose(
    draft: Any, cache: Any, writing: Writing, counts: Array, rules: Rules, keys: Any, most: int
) -> tuple[Any, tuple[Array, Array, Any]]:
    """Draw `(batch, n)` tokens of the draft; return its cache, them, their laws, and tokens seen before them.

    The last one is read, so that none is missing later, and not proposed: its law is 0.
    """

    def step(carry: Any, draw: tuple[Array, Any]) -> tuple[Any, Any]:
        (cache, newest, seen), (index, key) = carry, draw
        hidden, cache = draft.read(newest[:, None], cache, (index < counts).astype(jnp.int32))
        law = probabilities(draft.predict(hidden)[:, 0], rules.sampling, seen)
        token = _draw(law, key)
        after = None if seen is None else mark_tokens(seen, token[:, None], jnp.bool_(True))
        return (cache, token, after), (token, jnp.where(index < most - 1, law, jnp.zeros_like(law)), seen)

    draws = (jnp.arange(most, dtype=jnp.int32), None if keys is None else keys[0].T)
    (cache, *_), drawn = jax.lax.scan(step, (cache, writing.newest, writing.seen), draws)
    return cache, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), drawn)


def _verify(target: Array, draft: Array, proposed: Array, keys: Any) -> tuple[Array, Array]:
    """Replace the first token refused; return `(batch, n)` tokens, and how many of them count."""
    chances = jnp.take_along_axis(acceptance(target, draft), proposed[..., None], axis=-1)[..., 0]
    level = jnp.zeros_like(chances)
    if keys is not None:
        level = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), chances.dtype)))(keys[1])
    accepted = jnp.cumprod((level < chances).astype(jnp.int32), axis=1)
    end = jnp.sum(accepted, axis=1, keepdims=True, dtype=jnp.int32)
    weights = jnp.take_along_axis(residual(target, draft), end[..., None], axis=1)[:, 0]
    other = _draw(weights, None if keys is None else jnp.take_along_axis(keys[2], end, axis=1)[:, 0])
    other = jnp.where(jnp.any(weights > 0, axis=-1), other, jnp.int32(NO_TOKEN))
    return jnp.where(accepted > 0, proposed, other[:, None]), end[:, 0] + 1


def _draw(weights: Array, keys: Any) -> Array:
    """Draw a token by its weight; without keys, take the one of the largest."""
    if keys is None:
        return jnp.argmax(weights, axis=-1).astype(jnp.int32)
    draw = jax.vmap(lambda key: jax.random.gumbel(key, weights.shape[-1:], jnp.float32))
    noise = draw(keys).astype(weights.dtype)
    return jnp.argmax(jnp.log(weights) + noise, axis=-1).astype(jnp.int32)
