"""GPT-2."""

from typing import Any, ClassVar

from regard.interop import weight_maps
from regard.interop.families.family import Family
from regard.interop.weight_maps import TRANSPOSED, UNCHANGED, Fields, Pair, Settings, WeightMap, linear, norm
from regard.models import TransformerConfig
from regard.models.presets import GPT2 as CHOICES

_BLOCK = "trunk.stack.blocks.{n}"
_PARTS = [weight_maps.take_part(index, 3) for index in range(3)]


class GPT2(Family):
    """GPT-2 as a Decoder."""

    kind = "gpt2"
    architecture = "GPT2LMHeadModel"
    sizes: ClassVar = {
        "n_embd": "d_model", "n_head": "num_heads", "n_layer": "num_layers", "vocab_size": "vocab_size",
        "n_positions": "max_length",
    }  # fmt: skip
    entries: ClassVar = {
        "layer_norm_epsilon": "norm_epsilon", "activation_function": "activation",
        "tie_word_embeddings": "tied_output",
    }  # fmt: skip
    layer_counts: ClassVar = ("n_layer",)
    defaults: ClassVar = CHOICES
    required: ClassVar = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    # How scores are rounded, and a head for several sentences.
    harmless: ClassVar = (
        "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj", "is_decoder", "is_encoder_decoder",
    )  # fmt: skip
    weights = WeightMap(
        pairs=(
            Pair("wte.weight", "trunk.embedding.entry.table.embedding"),
            Pair("wpe.weight", "trunk.embedding.position_table.embedding"),
            *norm("h.{n}.ln_1", f"{_BLOCK}.attention_residual.norm"),
            # GPT-2's Conv1D has weights (in, out).
            *linear("h.{n}.attn.c_attn", f"{_BLOCK}.attention.query_projection", _PARTS[0], _PARTS[0]),
            *linear("h.{n}.attn.c_attn", f"{_BLOCK}.attention.key_projection", _PARTS[1], _PARTS[1]),
            *linear("h.{n}.attn.c_attn", f"{_BLOCK}.attention.value_projection", _PARTS[2], _PARTS[2]),
            *linear("h.{n}.attn.c_proj", f"{_BLOCK}.attention.output_projection", UNCHANGED),
            *norm("h.{n}.ln_2", f"{_BLOCK}.feed_forward_residual.norm"),
            *linear("h.{n}.mlp.c_fc", f"{_BLOCK}.feed_forward.widen", UNCHANGED),
            *linear("h.{n}.mlp.c_proj", f"{_BLOCK}.feed_forward.narrow", UNCHANGED),
            *norm("ln_f", "trunk.stack.final_norm"),
            Pair("lm_head.weight", "head.kernel", TRANSPOSED),
        ),
        prefix="transformer.",
        writes_prefix=True,
        ignored=(r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight", r"score\.weight"),
    )

    def read(self, settings: Settings, length: int | None = None) -> TransformerConfig:
        # GPT-2's first configs spell it so.
        older = {"n_positions": settings["n_ctx"]} if "n_ctx" in settings else {}
        return super().read({**older, **settings}, length)

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        scale = None if settings.get("scale_attn_weights", True) else 1.0
        return {"d_ff": settings.get("n_inner") or 4 * fields["d_model"], "attention_scale": scale}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        return {"n_inner": config.d_ff, "scale_attn_weights": config.attention_scale != 1.0}
