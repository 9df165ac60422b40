"""GPT-2."""

from typing import Any, ClassVar

from regard.interop.families.family import Family
from regard.interop.weight_maps import TRANSPOSED, Fields, Pair, Settings, WeightMap, norm, take_part
from regard.models import TransformerConfig
from regard.models.presets import GPT2 as CHOICES

_BLOCK = "trunk.stack.blocks.{n}"


def _conv1d(tensor: str, parameter: str) -> tuple[Pair, Pair]:
    """Pair the parts of GPT-2's Conv1D, whose weight is (in, out)."""
    return Pair(f"{tensor}.weight", f"{parameter}.kernel"), Pair(f"{tensor}.bias", f"{parameter}.bias")


class GPT2(Family):
    """GPT-2 as a Decoder."""

    kind = "gpt2"
    architecture = "GPT2LMHeadModel"
    sizes: ClassVar = {
        "n_embd": "d_model", "n_head": "num_heads", "n_layer": "num_layers", "vocab_size": "vocab_size",
        "n_positions": "max_length",
    }  # fmt: skip
    entries: ClassVar = {
        "layer_norm_epsilon": "norm_epsilon",
        "activation_function": "activation",
        "tie_word_embeddings": "tied_output",
    }
    layer_counts: ClassVar = ("n_layer",)
    choices: ClassVar = CHOICES
    required: ClassVar = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    # How scores are rounded, and a head for several sentences.
    harmless = """
        n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels
        summary_type summary_use_proj is_decoder is_encoder_decoder
    """
    weights = WeightMap(
        pairs=(
            Pair("wte.weight", "trunk.embedding.entry.table.embedding"),
            Pair("wpe.weight", "trunk.embedding.position_table.embedding"),
            *norm("h.{n}.ln_1", f"{_BLOCK}.attention_residual.norm"),
            *(
                Pair(
                    f"h.{{n}}.attn.c_attn.{part}",
                    f"{_BLOCK}.attention.{name}_projection.{ours}",
                    take_part(i, 3),
                )
                for i, name in enumerate(("query", "key", "value"))
                for part, ours in (("weight", "kernel"), ("bias", "bias"))
            ),
            *_conv1d("h.{n}.attn.c_proj", f"{_BLOCK}.attention.output_projection"),
            *norm("h.{n}.ln_2", f"{_BLOCK}.feed_forward_residual.norm"),
            *_conv1d("h.{n}.mlp.c_fc", f"{_BLOCK}.feed_forward.widen"),
            *_conv1d("h.{n}.mlp.c_proj", f"{_BLOCK}.feed_forward.narrow"),
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
        return {
            "d_ff": settings.get("n_inner") or 4 * fields["d_model"],
            "attention_scale": None if settings.get("scale_attn_weights", True) else 1.0,
        }

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        return {"n_inner": config.d_ff, "scale_attn_weights": config.attention_scale != 1.0}
