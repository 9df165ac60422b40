"""Recorders: traces of what a model attends to in texts, one after another, heads cut or not."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, ArrayLike
from regard.engine.call.hooks import CallEvent, Finish, Rewriter, rewrite, watch
from regard.engine.call.problem import Problem
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.inspection.interventions import Change
from regard.inspection.layer_predictions import name_predictions, read_streams
from regard.inspection.observations import observe
from regard.inspection.paths import Paths, trace_padded
from regard.inspection.tokens import Tokens
from regard.inspection.traces.calls import make_call
from regard.inspection.traces.owners import Positions, name_owners, number_layers
from regard.inspection.traces.padded import PaddedCall, pad_length
from regard.inspection.traces.slices import take_example
from regard.inspection.traces.trace import Trace, own_versions

SCALES = {"zero": 0.0, "half": 0.5, "double": 2.0}
CUTS = (*SCALES, "mean", "uniform", "patch")
MOST_EDGES_CUT = 16
# Heads (call, head), at one query (call, head, query), and edges (call, head, query, key).
Cuts = Sequence[tuple[int, ...]]
TOP_K = 3
# Products of what every layer would predict, in multiply-adds; longer texts are recorded without.
MOST_PREDICTED = 2**37


class Recorder:
    """Records what an `Encoder` or `Decoder` attends to; texts are padded, to one program per power of two.

    What is recorded has no padding, and is what `record` gives without a program; with `spell`, which gives
    the text of a token, also what layers of a `Decoder` would predict, unless the text is long for its size.
    """

    def __init__(self, model: Any, most: int | None = None, spell: Callable[[int], str] | None = None):
        from flax import nnx

        self._sizes, self._spell = model.config, spell
        self._graph, self._state = nnx.split(model)
        names = name_owners(model)
        self._modules = {names[id(module)]: module for _, module in nnx.iter_modules(model)}
        self._positions = Positions(model)
        self._model, self._most = type(model).__name__, most
        self._events: dict[tuple[int, ...], list[tuple[str, CallEvent]]] = {}
        self._run = jax.jit(self._observe)

    def record(
        self, tokens: Tokens, title: str, cut: Cuts = (), by: str = "zero", source: Tokens | None = None
    ) -> Trace:
        """Let the model read tokens, by their ids, and keep what it attends to; the program stays the same.

        Heads that are cut, as (number of a call, number of a head), write instead: "zero" nothing, "half" and
        "double" so many times what they write, "mean" their own mean over the text, later tokens included,
        "uniform" what they write with queries of 0, "patch" what they write at the same positions of the
        source, which has as many tokens; as (call, head, query), at that one. Both are read at once, by a
        program of its own. An edge, as (call, head, query, key), is scaled alone ("zero", "half", "double"):
        what that one weight hands over.
        """
        count, texts = len(tokens), [tokens] if source is None else [tokens, source]
        token_ids = [text.ids for text in texts if text.ids is not None]
        if not count or len(token_ids) != len(texts):
            raise ValueError(f"tokens: expected at least one, with ids, got {texts[-1]!r}")
        if (by == "patch") != (source is not None):
            raise ValueError(f'source: expected a second text by "patch", and by nothing else; got by {by!r}')
        if len(texts[-1]) != count:
            expected = f"{count} tokens, as many as in the text that it patches, got {len(texts[-1])}"
            raise ValueError(f"source: expected {expected}; change words for words of as many tokens")
        ids = np.concatenate(list(map(self._pad, token_ids)))
        shares = self._share_cuts(cut, by, ids.shape[1], count)
        counts = np.full(len(ids), count, np.int32)
        observed, reading = jax.device_get(self._run(self._state, ids, counts, shares))
        about = self._events[ids.shape]
        layers = number_layers([name for name, _ in about])
        calls = []
        for (problem, rows), (name, event), layer in zip(observed, about, layers, strict=True):
            rows = {key: row[0] for key, row in rows.items()}
            owner = self._modules.get(name)
            # That of the event has no numbers, as it was traced.
            projection = None if event.projection is None else getattr(owner, "output_projection", None)
            run = {"kind": event.kind, "backend": event.backend, "projection": projection}
            call = PaddedCall.cut(make_call(take_example(problem, 0), rows, **run), count, tokens)
            named = {"name": name, "layer": layer, "query_tokens": tokens, "key_tokens": tokens}
            positions = self._positions.find(owner, name, call.kind)
            calls.append(dataclasses.replace(call, **named, positions=positions))
        if any(layer >= len(calls) for layer, *_ in cut):
            raise ValueError(f"cut: expected numbers of calls below {len(calls)}, got {list(cut)}")
        trace = Trace(tuple(calls), title, self._model, own_versions())
        # Of a hybrid, layers without attention predict, too.
        if self._spell is None or reading is None or len(calls) > len(reading.tokens):
            return trace
        return dataclasses.replace(trace, predictions=name_predictions(reading, count, self._spell))

    def trace_paths(self, ids: ArrayLike, query: int = -1) -> Paths:
        """Trace the paths to what a `Decoder` predicts behind a position, by one program per power of two."""
        count = np.size(ids)
        if not -count <= query < count:
            raise ValueError(f"query: expected a position below {count}, got {query}")
        return trace_padded(self._graph, self._state, self._pad(ids), query % count)

    def _pad(self, ids: ArrayLike) -> np.ndarray:
        count = np.size(ids)
        if self._most is not None and count > self._most:
            raise ValueError(f"text: expected at most {self._most} tokens for this model, got {count}")
        padded = np.zeros((1, pad_length(count, self._most)), np.int32)
        padded[0, :count] = ids
        return padded

    def _share_cuts(self, cut: Cuts, by: str, length: int, count: int) -> dict[str, np.ndarray]:
        """Return how much of each head is replaced by what, (calls, heads), and the edges that are cut.

        Whether it is patched is said of each position.
        """
        if by not in CUTS:
            raise ValueError(f"by: expected one of {', '.join(CUTS)}, got {by!r}")
        layers, heads = self._sizes.num_layers, self._sizes.num_heads
        of_heads = ("scale", "mean", "uniform")
        shares: dict[str, Any] = {name: np.zeros((layers, heads), np.float32) for name in of_heads}
        name, share = ("scale", 1 - SCALES[by]) if by in SCALES else (by, 1)
        shares["patch"] = np.zeros((layers, heads, length if by == "patch" else 1), bool)
        edges = list({(call, *ends): None for call, *ends in cut if len(ends) == 3})
        if (edges and by not in SCALES) or len(edges) > MOST_EDGES_CUT:
            expected = f"at most {MOST_EDGES_CUT} edges, by {', '.join(SCALES)}"
            raise ValueError(f"cut: expected {expected}; got {len(edges)}, by {by!r}")
        # Rows without an edge are of no call.
        shares["edges"] = np.full((MOST_EDGES_CUT, 4), -1, np.int32)
        for layer, head, *ends in cut:
            if not (0 <= layer < layers and 0 <= head < heads and all(0 <= end < count for end in ends)):
                limits = f"of layers 0..{layers - 1}, heads 0..{heads - 1} and tokens 0..{count - 1}"
                where = f"{layer}.{head}" + ":" * bool(ends) + "-".join(map(str, ends))
                raise ValueError(f"cut: expected layer.head or layer.head:query-key, {limits}, got {where}")
            if len(ends) == 1 and by != "patch":
                raise ValueError(f'cut: expected one position of a head by "patch" alone, got it by {by!r}')
            if len(ends) < 2:
                shares[name][(layer, head, *ends)] = share
        shares["edges"][: len(edges)] = np.reshape(edges, (-1, 4))
        shares["edge_share"] = np.float32(share)
        return shares

    def _observe(self, state: Any, ids: Any, counts: Any, shares: dict[str, Array]) -> Any:
        from flax import nnx

        from regard.models import Decoder

        model = nnx.merge(self._graph, state)
        # A row of a decoder does not see the padding after it.
        options = {} if isinstance(model, Decoder) else {"lengths": counts}
        seen: list[CallEvent] = []
        cost = ids.shape[1] * self._sizes.num_layers * (self._sizes.vocab_size or 1) * self._sizes.d_model
        predicts = self._spell is not None and isinstance(model, Decoder) and cost <= MOST_PREDICTED

        def read(ids: Any, options: Any) -> Any:
            if not predicts:
                model(ids, **options)
                return None
            _, aux = model.trunk(ids, aux=("hidden",))
            streams = [block["hidden"][0] for block in aux["blocks"]]
            return read_streams(model, ids[0], streams, seen, min(TOP_K, self._sizes.vocab_size))

        with watch(seen.append, reads=True), rewrite(_cut_heads(shares, counts)):
            reading, observed = observe(read, _keep)(ids, options)
        names = name_owners(model)
        named = [names.get(id(event.owner), f"attention {number}") for number, event in enumerate(seen)]
        bare = [event._replace(problem=None, output=None) for event in seen]
        self._events[ids.shape] = list(zip(named, bare, strict=True))
        return observed, reading


def _cut_heads(shares: dict[str, Array], counts: Array) -> Rewriter:
    """Replace heads by their shares and take edges out, layer after layer, each of which has its own call."""
    numbers = itertools.count()

    def change(problem: Problem) -> tuple[Problem, Finish]:
        number = next(numbers)
        problem, _ = Change(query=0.0, share=shares["uniform"][number]).rewrite(problem)
        call, edges = shares["edges"][:, 0], jnp.maximum(shares["edges"][:, 1:], 0)
        share = jnp.where(call == number, shares["edge_share"], 0)
        problem, take_out = Change(edges=edges, share=share).rewrite(problem)

        def finish(output: Array, extra: Any) -> Array:
            output = take_out(output, extra)
            is_real = jnp.broadcast_to((jnp.arange(output.shape[-2]) < counts[0])[:, None], output.shape)
            mean = jnp.mean(output, -2, keepdims=True, where=is_real)
            for name, new in (("scale", 0.0), ("mean", mean)):
                output = Change(output=new, share=shares[name][number]).rewrite(problem)[1](output, extra)
            # The last row is the source, or the text itself.
            return jnp.where(shares["patch"][number][None, ..., None], output[-1:], output)

        return problem, finish

    return change


def _keep(problem: Problem, output: Any) -> Any:
    del output
    asked = dataclasses.replace(problem, aux=("lse", "max_score"))
    return problem, BACKENDS[choose(asked).name].run(asked)[1]
