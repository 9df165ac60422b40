"""How Hugging Face names and lays out the tensors of each architecture, as tables read in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard.interop.tensor_layouts import Layout, OneMore, Patches, Same, Split, Squeezed, Transposed
from regard.interop.weight_files import Planned, WeightFiles


@dataclass(frozen=True)
class Pair:
    """One tensor there and one parameter here; {n} stands for the layer's number in both."""

    theirs: str
    ours: str
    layout: Layout = Same()


@dataclass(frozen=True)
class WeightMap:
    """The table of one architecture.

    Attributes:
        pairs: tensor names, without `prefix`, and parameter paths.
        prefix: what the names of the model's body begin with in files of a model with a head; read with and
            without it.
        headless: names written without the prefix.
        ignored: patterns of tensors that mean nothing here: buffers, poolers and heads of other tasks.
        respelled: endings of older files and their present ones.
    """

    pairs: tuple[Pair, ...]
    prefix: str = ""
    writes_prefix: bool = False
    headless: tuple[str, ...] = ("lm_head.weight",)
    ignored: tuple[str, ...] = ()
    respelled: tuple[tuple[str, str], ...] = ()

    def spell(self, name: str) -> str:
        """A file's name for a tensor as the table writes it."""
        for old, new in self.respelled:
            if name.endswith(old):
                name = name[: -len(old)] + new
        return name.removeprefix(self.prefix)

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def written(self, name: str) -> str:
        """The name under which a tensor of the table is saved."""
        return self.prefix + name if self.writes_prefix and name not in self.headless else name

    def find(self, path: str) -> tuple[str, Layout] | None:
        """The tensor that belongs to a parameter, without prefix, and how it is laid out there."""
        number = re.search(r"\.(\d+)\.", path)
        pair = self._by_path.get(path if number is None else path.replace(number[0], ".{n}.", 1))
        if pair is None:
            return None
        return pair.theirs.replace("{n}", number[1] if number else ""), pair.layout

    @cached_property
    def _by_path(self) -> dict[str, Pair]:
        return {pair.ours: pair for pair in self.pairs}


def read_parameters(
    table: WeightMap, shapes: Mapping[str, tuple[int, ...]], weights: WeightFiles, settings: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray, np.dtype]]:
    """Every parameter's path, array and stored dtype, read one at a time, once everything is seen to fit.

    Args:
        table: the architecture's.
        shapes: shape of every parameter of the model, by path.
        weights: the files.
        settings: the architecture's config.json; a layout may need a size from it.

    Raises:
        ValueError: tensors that are missing, extra or of another shape: one error lists them all.
    """
    held = {table.spell(name): name for name in weights}
    if len(held) < len(weights):
        twice = sorted(name for name in weights if held[table.spell(name)] != name)
        raise ValueError(f"weights: expected every tensor once, got a second {', '.join(twice)}")
    found = {path: _find(table, path) for path in shapes}
    faults = []
    for path, (theirs, layout) in found.items():
        expected = layout.shape_there(shapes[path], settings)
        if theirs not in held:
            faults.append(f"missing: {table.written(theirs)} {expected}, for {path}")
        elif weights[held[theirs]].shape != expected:
            faults.append(
                f"misshapen: {held[theirs]}: expected {expected}, got {weights[held[theirs]].shape}"
            )
    known = {theirs for theirs, _ in found.values()}
    for name, original in held.items():
        if name not in known and not table.ignores(name):
            faults.append(f"extra: {original} {weights[original].shape}")
    if faults:
        raise ValueError(
            f"weights: expected the {len(known)} tensors that this config describes; {len({*faults})} do not"
            " fit:\n  " + "\n  ".join(sorted({*faults}))
        )
    return _read(found, held, weights)


def _read(
    found: Mapping[str, tuple[str, Layout]], held: Mapping[str, str], weights: WeightFiles
) -> Iterator[tuple[str, np.ndarray, np.dtype]]:
    last, array = None, np.empty(0)
    # Parameters that are parts of one tensor come after one another, so that it is read once.
    for path, (theirs, layout) in sorted(found.items(), key=lambda item: item[1][0]):
        if theirs != last:
            last, array = theirs, weights.read(held[theirs])
        yield path, layout.here(array), array.dtype


def plan_tensors(
    table: WeightMap,
    parameters: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    fetch: Callable[[str], np.ndarray],
    settings: Mapping[str, Any],
) -> dict[str, Planned]:
    """The tensors of a model under their names there, each computed when it is written.

    Args:
        table: the architecture's.
        parameters: shape and dtype to write of every parameter, by path.
        fetch: a parameter's array, by path.
        settings: as in `read_parameters`.
    """
    parts: dict[str, list[tuple[str, Layout]]] = {}
    for path in parameters:
        theirs, layout = _find(table, path)
        parts.setdefault(theirs, []).append((path, layout))
    plans = {}
    for theirs, held in sorted(parts.items()):
        paths = [path for path, _ in sorted(held, key=lambda item: item[1].order)]
        layout = held[0][1]
        shape, dtype = parameters[paths[0]]

        def compute(paths: list[str] = paths, layout: Layout = layout) -> np.ndarray:
            return layout.there([fetch(path) for path in paths], settings)

        plans[table.written(theirs)] = Planned(layout.shape_there(shape, settings), np.dtype(dtype), compute)
    return plans


def _find(table: WeightMap, path: str) -> tuple[str, Layout]:
    found = table.find(path)
    if found is None:
        raise ValueError(f"model: the format has no tensor for its parameter {path}; choose another kind")
    return found


def _linear(theirs: str, ours: str) -> tuple[Pair, ...]:
    """torch.nn.Linear, whose weight is (out, in)."""
    return Pair(f"{theirs}.weight", f"{ours}.kernel", Transposed()), Pair(f"{theirs}.bias", f"{ours}.bias")


def _conv1d(theirs: str, ours: str) -> tuple[Pair, ...]:
    """GPT-2's Conv1D, whose weight is (in, out)."""
    return Pair(f"{theirs}.weight", f"{ours}.kernel"), Pair(f"{theirs}.bias", f"{ours}.bias")


def _norm(theirs: str, ours: str) -> tuple[Pair, ...]:
    return Pair(f"{theirs}.weight", f"{ours}.scale"), Pair(f"{theirs}.bias", f"{ours}.bias")


_BLOCK = "stack.blocks.{n}"
_LAYER = "encoder.layer.{n}"
_PROJECTIONS = ("query", "key", "value")

BERT = WeightMap(
    pairs=(
        Pair("embeddings.word_embeddings.weight", "embedding.entry.table.embedding"),
        Pair("embeddings.position_embeddings.weight", "embedding.position_table.embedding"),
        Pair("embeddings.token_type_embeddings.weight", "embedding.type_table.embedding"),
        *_norm("embeddings.LayerNorm", "embedding.norm"),
        *(
            pair
            for name in _PROJECTIONS
            for pair in _linear(f"{_LAYER}.attention.self.{name}", f"{_BLOCK}.attention.{name}_projection")
        ),
        *_linear(f"{_LAYER}.attention.output.dense", f"{_BLOCK}.attention.output_projection"),
        *_norm(f"{_LAYER}.attention.output.LayerNorm", f"{_BLOCK}.attention_residual.norm"),
        *_linear(f"{_LAYER}.intermediate.dense", f"{_BLOCK}.feed_forward.widen"),
        *_linear(f"{_LAYER}.output.dense", f"{_BLOCK}.feed_forward.narrow"),
        *_norm(f"{_LAYER}.output.LayerNorm", f"{_BLOCK}.feed_forward_residual.norm"),
    ),
    prefix="bert.",
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"cls\..*", r"classifier\..*", r"qa_outputs\..*"),
    respelled=((".gamma", ".weight"), (".beta", ".bias")),
)

VIT = WeightMap(
    pairs=(
        Pair("embeddings.cls_token", "embedding.class_token", Squeezed(2)),
        Pair("embeddings.position_embeddings", "embedding.position_table.embedding", Squeezed(1)),
        Pair("embeddings.patch_embeddings.projection.weight", "embedding.entry.linear.kernel", Patches()),
        Pair("embeddings.patch_embeddings.projection.bias", "embedding.entry.linear.bias"),
        *(
            pair
            for name in _PROJECTIONS
            for pair in _linear(
                f"{_LAYER}.attention.attention.{name}", f"{_BLOCK}.attention.{name}_projection"
            )
        ),
        *_linear(f"{_LAYER}.attention.output.dense", f"{_BLOCK}.attention.output_projection"),
        *_norm(f"{_LAYER}.layernorm_before", f"{_BLOCK}.attention_residual.norm"),
        *_linear(f"{_LAYER}.intermediate.dense", f"{_BLOCK}.feed_forward.widen"),
        *_linear(f"{_LAYER}.output.dense", f"{_BLOCK}.feed_forward.narrow"),
        *_norm(f"{_LAYER}.layernorm_after", f"{_BLOCK}.feed_forward_residual.norm"),
        *_norm("layernorm", "stack.final_norm"),
    ),
    prefix="vit.",
    ignored=(r"pooler\..*", r"classifier\..*", r"decoder\..*", r"embeddings\.mask_token"),
)

_TRUNK = "trunk.stack.blocks.{n}"

GPT2 = WeightMap(
    pairs=(
        Pair("wte.weight", "trunk.embedding.entry.table.embedding"),
        Pair("wpe.weight", "trunk.embedding.position_table.embedding"),
        *_norm("h.{n}.ln_1", f"{_TRUNK}.attention_residual.norm"),
        *(
            Pair(f"h.{{n}}.attn.c_attn.{theirs}", f"{_TRUNK}.attention.{name}_projection.{ours}", Split(i, 3))
            for i, name in enumerate(_PROJECTIONS)
            for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
        ),
        *_conv1d("h.{n}.attn.c_proj", f"{_TRUNK}.attention.output_projection"),
        *_norm("h.{n}.ln_2", f"{_TRUNK}.feed_forward_residual.norm"),
        *_conv1d("h.{n}.mlp.c_fc", f"{_TRUNK}.feed_forward.widen"),
        *_conv1d("h.{n}.mlp.c_proj", f"{_TRUNK}.feed_forward.narrow"),
        *_norm("ln_f", "trunk.stack.final_norm"),
        Pair("lm_head.weight", "head.kernel", Transposed()),
    ),
    prefix="transformer.",
    writes_prefix=True,
    ignored=(r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight", r"score\.weight"),
)

_ATTENTION = (
    *(
        pair
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
        for pair in _linear(f"layers.{{n}}.self_attn.{theirs}_proj", f"{_TRUNK}.attention.{ours}_projection")
    ),
    *(
        pair
        for theirs, ours in (("gate", "gate"), ("up", "widen"), ("down", "narrow"))
        for pair in _linear(f"layers.{{n}}.mlp.{theirs}_proj", f"{_TRUNK}.feed_forward.{ours}")
    ),
    Pair("embed_tokens.weight", "trunk.embedding.entry.table.embedding"),
    Pair("lm_head.weight", "head.kernel", Transposed()),
)
_ROTARY = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", r"lm_head\.weight")

# Mistral, Qwen 2 and Qwen 3 as well: they differ in which of these tensors they have.
LLAMA = WeightMap(
    pairs=(
        *_ATTENTION,
        Pair("layers.{n}.self_attn.q_norm.weight", f"{_TRUNK}.attention.query_norm.scale"),
        Pair("layers.{n}.self_attn.k_norm.weight", f"{_TRUNK}.attention.key_norm.scale"),
        Pair("layers.{n}.input_layernorm.weight", f"{_TRUNK}.attention_residual.norm.scale"),
        Pair("layers.{n}.post_attention_layernorm.weight", f"{_TRUNK}.feed_forward_residual.norm.scale"),
        Pair("norm.weight", "trunk.stack.final_norm.scale"),
    ),
    prefix="model.",
    writes_prefix=True,
    ignored=_ROTARY,
)

GEMMA2 = WeightMap(
    pairs=(
        *_ATTENTION,
        *(
            Pair(f"layers.{{n}}.{theirs}_layernorm.weight", f"{_TRUNK}.{ours}.scale", OneMore())
            for theirs, ours in (
                ("input", "attention_residual.norm"),
                ("post_attention", "attention_residual.branch_norm"),
                ("pre_feedforward", "feed_forward_residual.norm"),
                ("post_feedforward", "feed_forward_residual.branch_norm"),
            )
        ),
        Pair("norm.weight", "trunk.stack.final_norm.scale", OneMore()),
    ),
    prefix="model.",
    writes_prefix=True,
    ignored=_ROTARY,
)


def _t5_attention(layer: str, theirs: str, ours: str) -> tuple[Pair, ...]:
    return tuple(
        Pair(f"{layer}.{theirs}.{name[0]}.weight", f"{ours}.{name}_projection.kernel", Transposed())
        for name in (*_PROJECTIONS, "output")
    )


def _t5(widening: tuple[tuple[str, str], ...]) -> WeightMap:
    """T5's table for one of its two feed-forward branches."""
    encoder, decoder = "encoder.block.{n}.layer", "decoder.block.{n}.layer"
    read, written = "encoder.stack.blocks.{n}", "decoder.blocks.{n}"

    def feed_forward(layer: str, ours: str) -> tuple[Pair, ...]:
        return tuple(
            Pair(f"{layer}.DenseReluDense.{their}.weight", f"{ours}.feed_forward.{our}.kernel", Transposed())
            for their, our in (*widening, ("wo", "narrow"))
        )

    relative = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return WeightMap(
        pairs=(
            Pair("shared.weight", "encoder.embedding.entry.table.embedding"),
            Pair("lm_head.weight", "head.kernel", Transposed()),
            Pair(f"encoder.{relative}", "encoder.stack.relative_table"),
            *_t5_attention(f"{encoder}.0", "SelfAttention", f"{read}.attention"),
            Pair(f"{encoder}.0.layer_norm.weight", f"{read}.attention_residual.norm.scale"),
            *feed_forward(f"{encoder}.1", read),
            Pair(f"{encoder}.1.layer_norm.weight", f"{read}.feed_forward_residual.norm.scale"),
            Pair("encoder.final_layer_norm.weight", "encoder.stack.final_norm.scale"),
            Pair(f"decoder.{relative}", "decoder.relative_table"),
            *_t5_attention(f"{decoder}.0", "SelfAttention", f"{written}.self_attention"),
            Pair(f"{decoder}.0.layer_norm.weight", f"{written}.self_residual.norm.scale"),
            *_t5_attention(f"{decoder}.1", "EncDecAttention", f"{written}.cross_attention"),
            Pair(f"{decoder}.1.layer_norm.weight", f"{written}.cross_residual.norm.scale"),
            *feed_forward(f"{decoder}.2", written),
            Pair(f"{decoder}.2.layer_norm.weight", f"{written}.feed_forward_residual.norm.scale"),
            Pair("decoder.final_layer_norm.weight", "decoder.final_norm.scale"),
        ),
        ignored=(
            r"(encoder|decoder)\.embed_tokens\.weight",
            r"lm_head\.weight",
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
    )


T5 = _t5((("wi", "widen"),))
T5_GATED = _t5((("wi_0", "gate"), ("wi_1", "widen")))

TABLES = {
    "bert": BERT,
    "vit": VIT,
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA2,
    "t5": T5,
}


def choose_table(kind: str, *, gated: bool = False) -> WeightMap:
    """The table of an architecture; T5 has one for each of its feed-forward branches."""
    return T5_GATED if kind == "t5" and gated else TABLES[kind]
