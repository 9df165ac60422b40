"""Captures: a model's calls of `attend` watched, and those of one example kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from regard import masks
from regard.arguments import as_array, check_kind, whole_number
from regard.engine.call.hooks import CallEvent, watch
from regard.engine.call.problem import Problem
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.inspection.tokens import Tokens
from regard.inspection.traces import owners
from regard.inspection.traces.calls import Call, make_call
from regard.inspection.traces.sequences import Sequences
from regard.inspection.traces.slices import count_examples, take_example
from regard.inspection.traces.trace import Trace, own_versions
from regard.masks.grid import is_concrete
from regard.masks.keys import Lengths


@contextmanager
def capture(
    model: Any = None, *, tokens: Any = None, example: int = 0, title: str | None = None
) -> Iterator[Trace]:
    """Watch every call of `attend` in the block; the trace is complete when the block ends.

    What runs is not changed in any way. Of each call, the queries and keys of one example are copied to the
    host, with its mask and scores; values and outputs serve to check them, and are dropped.

    Args:
        model: whose layers give the calls their names: a model or layer of Regard, or one of Flax (nnx or
            linen) with `regard.interop.flax.attention_fn`. Other calls are kept, and numbered.
        tokens: what sits at the positions: a list of strings or `Tokens`, for all calls whose length it fits;
            or a mapping from a length (an integer), from the beginning of a layer's name ("encoder",
            "decoder") or from "memory", what cross-attention reads, to such. None numbers the positions.
        example: which example of a batch is kept. Of self-attention, queries behind the end that
            `masks.lengths` tells are padding, and read nothing there.
        title: of the trace, for people to read; None takes the model's name.

    Returns:
        A context manager that gives a `Trace`.

    Raises:
        TypeError: tokens or a title of another type.
        ValueError: at the end of the block: nothing ran, or it ran inside a trace such as `jax.jit`, where
            arrays have no values; an example that is not there; tokens that fit no call.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import inspection, masks
        >>> from regard.layers import MultiHeadAttention
        >>> layer = MultiHeadAttention(6, num_heads=3, rngs=nnx.Rngs(0))
        >>> with inspection.capture(layer, tokens=["The", "cat", "sat"]) as trace:
        ...     _ = layer(jnp.ones((1, 3, 6)), mask=masks.causal())
        >>> trace
        Trace('MultiHeadAttention': 1 call, 3 heads, 3 positions)
    """
    sequences = Sequences.read(tokens)
    watcher = _Watcher(whole_number("example", example, 0))
    name = None if model is None else type(model).__name__
    title = title if title is not None else (name or "attention")
    trace = Trace(title=title, model=name, versions=own_versions())
    is_linen = owners.is_module(model, "flax.linen")
    with watch(watcher), owners.own_linen_calls() if is_linen else nullcontext():
        yield trace
    object.__setattr__(trace, "calls", watcher.finish(model, sequences))


def record(
    model: Any, *inputs: Any, tokens: Any = None, example: int = 0, title: str | None = None, **options: Any
) -> tuple[Any, Trace]:
    """Call a model, outside `jit`, and keep what it attended to.

    outputs = `model(*inputs, **options)`

    Args:
        model: as in `capture`; of linen, `model.apply` is called, so the first input is the variables.
        inputs, options: of the model's call.
        tokens, example, title: as in `capture`.

    Returns:
        The model's outputs, the same as without watching, and a `Trace`.

    Raises:
        TypeError, ValueError: as `capture`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import inspection, models
        >>> config = models.TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> logits, trace = inspection.record(model, jnp.array([[1, 2, 3, 4]]), tokens=list("abcd"))
        >>> [call.name for call in trace.calls]
        ['trunk.stack.blocks.0.attention', 'trunk.stack.blocks.1.attention']
    """
    call = model.apply if owners.is_module(model, "flax.linen") else model
    check_kind("model", call, Callable)
    with capture(model, tokens=tokens, example=example, title=title) as trace:
        outputs = call(*inputs, **options)
    return outputs, trace


def record_repeats(
    model: Any, vocab_size: int, *, length: int = 64, repeats: int = 2, rng: int | np.random.Generator = 0
) -> Trace:
    """Call a model on random tokens that repeat, where induction heads show, and keep what it attended to.

    tokens = (x, x, ...),  x_i uniform in 0..vocab_size - 1

    In such a sequence nothing but the repetition tells which token comes next, so `readouts.label` of these
    calls says which heads read it, whatever the text at hand repeats.

    Args:
        model: as in `record`; it is called on token ids `(1, length * repeats)`.
        vocab_size: how many token ids there are.
        length: of x. A vocabulary much larger than this keeps tokens from repeating within x.
        repeats: how often x is said.
        rng: a seed, or a NumPy generator.

    Returns:
        A `Trace`.

    Raises:
        TypeError, ValueError: as `capture`; a size below 1.

    Example:
        >>> from flax import nnx
        >>> from regard import inspection, models, readouts
        >>> config = models.TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> trace = inspection.record_repeats(models.Decoder(config, rngs=nnx.Rngs(0)), 13, length=5)
        >>> readouts.label(trace[1].readout())[(0,)]
        ()

    Reference: Olsson et al., "In-context Learning and Induction Heads", 2022, head activation evaluators.
    """
    vocab_size = whole_number("vocab_size", vocab_size, 1)
    length, repeats = whole_number("length", length, 1), whole_number("repeats", repeats, 1)
    generator = as_array("rng", "a seed", np.random.default_rng, rng)
    ids = np.tile(generator.integers(0, vocab_size, length, np.int32), repeats)
    tokens = Tokens([str(token) for token in ids], ids=ids)
    title = f"{length} random tokens, {repeats} times"
    return record(model, jax.numpy.asarray(ids[None]), tokens=tokens, title=title)[1]


class _Watcher:
    """A hook that keeps the example of every call with values; it never raises, because the model runs on."""

    def __init__(self, example: int):
        self._example, self._traced = example, 0
        # Calls, their owners, the names that these say, and the model's runs.
        self._seen: list[tuple[Call, Any, str | None, object]] = []
        self._failure: Exception | None = None

    def __call__(self, seen: CallEvent) -> None:
        if not is_concrete((seen.problem, seen.output)):
            self._traced += 1
        elif self._failure is None:
            try:
                call, own_name = _keep(seen, self._example), owners.name_itself(seen.owner)
                self._seen.append((call, seen.owner, own_name, seen.run))
            except Exception as error:
                self._failure = error

    def finish(self, model: Any, sequences: Sequences) -> tuple[Call, ...]:
        """Return the calls of the trace."""
        if self._failure is not None:
            raise self._failure
        if self._traced:
            raise ValueError(
                f"capture: expected calls of attend with values, got {self._traced} inside a trace, where"
                " arrays have none; call the model itself, outside jax.jit, nnx.jit, jax.grad, jax.vmap,"
                " jax.lax.scan and jax.checkpoint (nnx.remat); or use inspection.observe(fn), which returns"
                " statistics of its calls from inside them"
            )
        if not self._seen:
            raise ValueError(
                "capture: expected at least one call of regard.attend in the block, got none. What jax.jit or"
                " nnx.jit compiled before does not call it again: call the model itself, outside jit, or use"
                " inspection.observe(fn), which traces it anew. Layers of Flax need"
                " attention_fn=regard.interop.flax.attention_fn; linear attention has no weights to look at"
            )
        paths, positions = owners.name_owners(model), owners.Positions(model)
        numbered = enumerate(self._seen)
        names = [paths.get(id(owner)) or own or f"attention {n}" for n, (_, owner, own, _) in numbered]
        runs, calls = [None, *dict.fromkeys(run for *_, run in self._seen)], []
        layers = owners.number_layers(names)
        for (call, owner, _, run), name, layer in zip(self._seen, names, layers, strict=True):
            about = {"positions": positions.find(owner, name, call.kind), "run": runs.index(run) or None}
            calls.append(dataclasses.replace(call, name=name, layer=layer, **about))
        return sequences.lay(calls)


def _keep(seen: CallEvent, example: int) -> Call:
    """Keep the example of a call, before the model is asked for its name."""
    problem = take_example(seen.problem, example)
    count = _count_tokens(problem, seen.kind)
    if count < problem.T:  # queries of padding read nothing: their rows would count as the text's
        real = np.arange(problem.T) < count
        hidden = masks.segments(np.where(real, 0, 1), np.zeros(problem.S, np.int32))
        problem = dataclasses.replace(problem, mask=problem.mask & hidden)
    asked = dataclasses.replace(problem, aux=("lse", "max_score"))
    try:
        backend = choose(asked, seen.backend).name
    except NotImplementedError:
        backend = choose(asked).name
    output, rows = BACKENDS[backend].run(asked)
    error, rate = None, seen.problem.dropout_rate
    if not rate:
        flat = seen.output.reshape((count_examples(seen.problem), *output.shape))
        error = _difference(*(np.asarray(array)[..., :count, :] for array in (flat[example], output)))
    about = {"kind": seen.kind, "backend": seen.backend, "projection": seen.projection}
    return make_call(problem, rows, **about, dropout_rate=rate, output_error=error)


def _count_tokens(problem: Problem, kind: str | None) -> int:
    """Return how many tokens of self-attention are no padding, by the lengths in its mask."""
    is_text = (
        kind == "self" and problem.T == problem.S and not problem.query_offset and not problem.key_offset
    )
    parts = problem.mask.parts if is_text and problem.mask is not None else ()
    counts = [np.max(part.bound) for part in parts if isinstance(part, Lengths)]
    return int(min([problem.T, *counts]))


def _difference(ran: np.ndarray, anew: np.ndarray) -> float:
    """Return the largest difference; NaN at the same place is none, NaN at one alone is infinite."""
    wide = np.float64 if ran.dtype == np.float64 else np.float32
    ran, anew = ran.astype(wide), anew.astype(wide)
    same = (ran == anew) | (np.isnan(ran) & np.isnan(anew))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0, np.abs(ran - anew))
    return float(np.where(np.isnan(off), np.inf, off).max(initial=0))
