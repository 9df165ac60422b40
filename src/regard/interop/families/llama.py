"""Llama, and what later decoders share with it."""

from typing import Any, ClassVar

from regard.interop.families.entries import read_size
from regard.interop.families.family import Family
from regard.interop.families.rotary import read_rotary, write_rotary
from regard.interop.weight_maps import TRANSPOSED, Fields, Pair, Settings, WeightMap, linear
from regard.models import TransformerConfig
from regard.models.presets import LLAMA

LAYER, BLOCK = "layers.{n}", "trunk.stack.blocks.{n}"


def pair_branch(stored: str, branch: str) -> list[Pair]:
    """Pair the linear maps of a gated feed-forward branch."""
    names = (("gate_proj", "gate"), ("up_proj", "widen"), ("down_proj", "narrow"))
    return [pair for name, ours in names for pair in linear(f"{stored}.{name}", f"{branch}.{ours}")]


BODY = (
    *linear(f"{LAYER}.self_attn.q_proj", f"{BLOCK}.attention.query_projection"),
    *linear(f"{LAYER}.self_attn.k_proj", f"{BLOCK}.attention.key_projection"),
    *linear(f"{LAYER}.self_attn.v_proj", f"{BLOCK}.attention.value_projection"),
    *linear(f"{LAYER}.self_attn.o_proj", f"{BLOCK}.attention.output_projection"),
    *pair_branch(f"{LAYER}.mlp", f"{BLOCK}.feed_forward"),
    Pair("embed_tokens.weight", "trunk.embedding.entry.table.embedding"),
    Pair("lm_head.weight", "head.kernel", TRANSPOSED),
)
"""All tensors but the norms'."""
NORMS = (
    Pair(f"{LAYER}.self_attn.q_norm.weight", f"{BLOCK}.attention.query_norm.scale"),
    Pair(f"{LAYER}.self_attn.k_norm.weight", f"{BLOCK}.attention.key_norm.scale"),
    Pair(f"{LAYER}.input_layernorm.weight", f"{BLOCK}.attention_residual.norm.scale"),
    Pair(f"{LAYER}.post_attention_layernorm.weight", f"{BLOCK}.feed_forward_residual.norm.scale"),
    Pair("norm.weight", "trunk.stack.final_norm.scale"),
)
"""Norms, of which each of Llama's relatives has some."""


def build_map(*others: Pair) -> WeightMap:
    """Return the table of a decoder that has Llama's body."""
    buffers = r"(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    return WeightMap((*BODY, *others), "model.", writes_prefix=True, ignored=(buffers, r"lm_head\.weight"))


class Llama(Family):
    """Llama as a Decoder."""

    kind = "llama"
    architecture = "LlamaForCausalLM"
    entries: ClassVar = {
        "rms_norm_eps": "norm_epsilon", "hidden_act": "activation", "attention_bias": "attention_bias",
        "mlp_bias": "feed_forward_bias", "tie_word_embeddings": "tied_output",
    }  # fmt: skip
    defaults: ClassVar = LLAMA
    required: ClassVar = {
        "rope_interleaved": False, "is_encoder_decoder": False, "add_cross_attention": False,
    }  # fmt: skip
    harmless: ClassVar = ("is_llama_config", "is_decoder")
    weights = build_map(*NORMS)
    # Where config.json leaves them out; None is d_model / num_heads, and as many as queries have.
    head_dim: int | None = None
    num_key_heads: int | None = None

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        head_dim = settings.get("head_dim")
        key_heads = settings.get("num_key_value_heads", self.num_key_heads)
        head_dim = self.head_dim if head_dim is None else read_size("head_dim", head_dim)
        key_heads = fields["num_heads"] if key_heads is None else read_size("num_key_value_heads", key_heads)
        positions = self.read_positions(settings, fields["max_length"], length)
        return {"num_key_heads": key_heads, "head_dim": head_dim, **positions}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        # Where the width of a head follows from the other sizes, some releases have no such entry.
        follows = config.head_dim is None and self.head_dim is None
        return {
            "num_key_value_heads": config.num_key_heads or config.num_heads,
            **({} if follows else {"head_dim": config.head_width}),
            **self.write_positions(config),
        }

    def read_positions(self, settings: Settings, *sizes: Any) -> dict[str, Any]:
        """Return the rotary fields, given `max_length` and the tokens to serve."""
        return read_rotary(settings, *sizes)

    def write_positions(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the rotary entries; the inverse of `read_positions`."""
        return write_rotary(config)
