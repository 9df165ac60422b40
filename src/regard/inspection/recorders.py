"""Recorders: traces of what a model attends to in one text after another, by few programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from regard.engine.call.hooks import CallEvent, rewrite, watch
from regard.engine.call.problem import Problem
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.inspection.observations import observe
from regard.inspection.tokens import Tokens
from regard.inspection.traces.calls import make_call
from regard.inspection.traces.owners import Positions, name_owners, number_layers
from regard.inspection.traces.padded import PaddedCall, pad_length
from regard.inspection.traces.slices import take_example
from regard.inspection.traces.trace import Trace, own_versions


class Recorder:
    """Records what an `Encoder` or `Decoder` attends to; texts are padded, to one program per power of two.

    What is recorded has no padding, and is what `record` gives without a program.

    Args:
        model: in evaluation mode; called on token ids `(1, T)`.
        most: tokens that it can read; None means any number.
    """

    def __init__(self, model: Any, most: int | None = None):
        from flax import nnx

        self._graph, self._state = nnx.split(model)
        names = name_owners(model)
        self._modules = {names[id(module)]: module for _, module in nnx.iter_modules(model)}
        self._positions = Positions(model)
        self._model, self._most = type(model).__name__, most
        self._events: dict[int, list[tuple[str, CallEvent]]] = {}
        self._run = jax.jit(self._observe)

    def record(self, tokens: Tokens, title: str) -> Trace:
        """Let the model read tokens, by their ids, and keep what it attends to.

        Raises:
            ValueError: no token, or none with ids; more than the model can read.
        """
        count = len(tokens)
        if not count or tokens.ids is None:
            raise ValueError(f"tokens: expected at least one, with ids, got {tokens!r}")
        if self._most is not None and count > self._most:
            raise ValueError(f"text: expected at most {self._most} tokens for this model, got {count}")
        length = pad_length(count, self._most)
        ids = np.zeros((1, length), np.int32)
        ids[0, :count] = tokens.ids
        found = jax.device_get(self._run(self._state, ids, np.full(1, count, np.int32)))
        about = self._events[length]
        layers = number_layers([name for name, _ in about])
        calls = []
        for (problem, rows), (name, event), layer in zip(found, about, layers, strict=True):
            rows = {key: row[0] for key, row in rows.items()}
            owner = self._modules.get(name)
            # That of the event has no numbers, as it was traced.
            projection = None if event.projection is None else getattr(owner, "output_projection", None)
            told = {"kind": event.kind, "backend": event.backend, "projection": projection}
            whole = make_call(take_example(problem, 0), rows, **told)
            places = self._positions.find(owner, name, whole.kind)
            call = PaddedCall.cut(whole, count, tokens)
            named = {"name": name, "layer": layer, "positions": places}
            calls.append(dataclasses.replace(call, **named, query_tokens=tokens, key_tokens=tokens))
        return Trace(tuple(calls), title, self._model, own_versions())

    def _observe(self, state: Any, ids: Any, counts: Any) -> Any:
        from flax import nnx

        from regard.models import Decoder

        model = nnx.merge(self._graph, state)
        # A row of a decoder does not see the padding after it.
        options = {} if isinstance(model, Decoder) else {"lengths": counts}
        seen: list[CallEvent] = []
        # Layers one by one, as each has a call of its own.
        with watch(seen.append), rewrite(lambda problem: (problem, lambda output, extra: output)):
            _, found = observe(lambda ids, options: model(ids, **options), _keep)(ids, options)
        names = name_owners(model)
        self._events[ids.shape[1]] = [
            (names.get(id(event.owner), f"attention {number}"), event._replace(problem=None, output=None))
            for number, event in enumerate(seen)
        ]
        return found


def _keep(problem: Problem, output: Any) -> Any:
    del output
    asked = dataclasses.replace(problem, aux=("lse", "max_score"))
    return problem, BACKENDS[choose(asked).name].run(asked)[1]
