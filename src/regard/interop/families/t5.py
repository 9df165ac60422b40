"""T5, in its first version and in version 1.1."""

from typing import Any, ClassVar

from regard.interop.families.entries import read_size
from regard.interop.families.family import WRITTEN_ACTIVATIONS, Family, read_activation
from regard.interop.weight_maps import TRANSPOSED, Fields, Pair, Settings, WeightMap
from regard.models import EncoderDecoder, TransformerConfig
from regard.models.presets import T5 as CHOICES


def _attention(tensor: str, parameter: str) -> tuple[Pair, ...]:
    return tuple(
        Pair(f"{tensor}.{name[0]}.weight", f"{parameter}.{name}_projection.kernel", TRANSPOSED)
        for name in ("query", "key", "value", "output")
    )


def _feed_forward(layer: str, block: str, gated: bool) -> tuple[Pair, ...]:
    widening = (("wi_0", "gate"), ("wi_1", "widen")) if gated else (("wi", "widen"),)
    return tuple(
        Pair(f"{layer}.DenseReluDense.{name}.weight", f"{block}.feed_forward.{path}.kernel", TRANSPOSED)
        for name, path in (*widening, ("wo", "narrow"))
    )


class T5(Family):
    """T5 as an EncoderDecoder."""

    kind = "t5"
    architecture = "T5ForConditionalGeneration"
    model = EncoderDecoder
    sizes: ClassVar = {
        "d_model": "d_model", "num_heads": "num_heads", "d_kv": "head_dim", "d_ff": "d_ff",
        "num_layers": "num_layers", "vocab_size": "vocab_size",
    }  # fmt: skip
    entries: ClassVar = {
        "layer_norm_epsilon": "norm_epsilon", "relative_attention_num_buckets": "relative_buckets",
        "relative_attention_max_distance": "relative_max_distance", "tie_word_embeddings": "tied_output",
    }  # fmt: skip
    layer_counts: ClassVar = ("num_layers", "num_decoder_layers")
    defaults: ClassVar = CHOICES
    required: ClassVar = {"is_encoder_decoder": True}
    # Its positions are relative.
    harmless: ClassVar = ("n_positions", "is_decoder", "add_cross_attention")

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        gate, _, name = settings.get("feed_forward_proj", "relu").rpartition("-")
        gated = gate == "gated"
        # transformers 5 ties the head of version 1.1 as well, and says apart whether its input is scaled.
        scaled = settings.get("scale_decoder_outputs", fields["tied_output"])
        activation = "gelu_tanh" if gated and name == "gelu" else read_activation(name)
        act, is_gated = settings.get("dense_act_fn"), settings.get("is_gated_act")
        same = act in (None, name) or read_activation(act) == activation
        if not same or is_gated not in (None, gated):
            raise ValueError(
                "dense_act_fn, is_gated_act: expected what feed_forward_proj says, got"
                f" {act!r} and {is_gated!r}; leave out the wrong ones"
            )
        depth = settings.get("num_decoder_layers")
        depth = None if depth is None else read_size("num_decoder_layers", depth)
        scale = fields["d_model"] ** -0.5 if scaled else 1.0
        return {"activation": activation, "gated": gated, "output_scale": scale, "num_decoder_layers": depth}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        is_gelu = config.gated and config.activation == "gelu_tanh"
        name = "gelu" if is_gelu else WRITTEN_ACTIVATIONS[config.activation]
        name = f"gated-{name}" if config.gated else name
        scaled = config.output_scale != 1.0
        own = {"num_decoder_layers": config.num_decoder_layers, "scale_decoder_outputs": scaled}
        return {"d_kv": config.head_width, "feed_forward_proj": name, **own}

    def weight_map(self, config: TransformerConfig) -> WeightMap:
        encoder, decoder = "encoder.block.{n}.layer", "decoder.block.{n}.layer"
        read, written = "encoder.stack.blocks.{n}", "decoder.blocks.{n}"
        relative = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return WeightMap(
            pairs=(
                Pair("shared.weight", "encoder.embedding.entry.table.embedding"),
                Pair("lm_head.weight", "head.kernel", TRANSPOSED),
                Pair(f"encoder.{relative}", "encoder.stack.relative_table"),
                *_attention(f"{encoder}.0.SelfAttention", f"{read}.attention"),
                Pair(f"{encoder}.0.layer_norm.weight", f"{read}.attention_residual.norm.scale"),
                *_feed_forward(f"{encoder}.1", read, config.gated),
                Pair(f"{encoder}.1.layer_norm.weight", f"{read}.feed_forward_residual.norm.scale"),
                Pair("encoder.final_layer_norm.weight", "encoder.stack.final_norm.scale"),
                Pair(f"decoder.{relative}", "decoder.relative_table"),
                *_attention(f"{decoder}.0.SelfAttention", f"{written}.self_attention"),
                Pair(f"{decoder}.0.layer_norm.weight", f"{written}.self_residual.norm.scale"),
                *_attention(f"{decoder}.1.EncDecAttention", f"{written}.cross_attention"),
                Pair(f"{decoder}.1.layer_norm.weight", f"{written}.cross_residual.norm.scale"),
                *_feed_forward(f"{decoder}.2", written, config.gated),
                Pair(f"{decoder}.2.layer_norm.weight", f"{written}.feed_forward_residual.norm.scale"),
                Pair("decoder.final_layer_norm.weight", "decoder.final_norm.scale"),
            ),
            ignored=(
                r"(encoder|decoder)\.embed_tokens\.weight",
                r"lm_head\.weight",
                r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            ),
        )
