"""ModernBERT."""

from typing import Any, ClassVar

from regard.interop.families.entries import read_number, read_size
from regard.interop.families.family import Family
from regard.interop.families.rotary import read_rotary_by_kind, write_rotary_by_kind
from regard.interop.families.sliding_windows import FULL, SLIDING, read_windows, write_windows
from regard.interop.weight_maps import Fields, Pair, Settings, WeightMap, linear, norm, take_rows
from regard.models import Encoder, TransformerConfig
from regard.models.presets import MODERNBERT

_LAYER, _BLOCK = "layers.{n}", "stack.blocks.{n}"
_BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}

_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
_LAST_SPECIAL = 50_283


def _joined(tensor: str, *parameters: str) -> tuple[Pair, ...]:
    """Pair one linear map with the maps whose rows lie in it one after another."""
    return tuple(
        Pair(f"{tensor}.{end}", f"{_BLOCK}.{parameter}.{ours}", take_rows(index, len(parameters)))
        for index, parameter in enumerate(parameters)
        for end, ours in (("weight", "kernel"), ("bias", "bias"))
    )


class ModernBert(Family):
    """ModernBERT as an Encoder of tokens, with windows in most layers and a rotary base for each kind."""

    kind = "modernbert"
    architecture = "ModernBertModel"
    model = Encoder
    entries: ClassVar = {
        "norm_eps": "norm_epsilon", "hidden_activation": "activation", "attention_bias": "attention_bias",
        "mlp_bias": "feed_forward_bias",
    }  # fmt: skip
    defaults: ClassVar = MODERNBERT
    # transformers lets the old rope_scaling act in layers with a window, too.
    required: ClassVar = {"position_embedding_type": "absolute", "rope_scaling": None}
    # Heads are not loaded; the rest says how it was trained or made fast.
    harmless: ClassVar = (
        "classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias",
        "deterministic_flash_attn", "embedding_dropout", "initializer_cutoff_factor", "layer_norm_eps",
        "mlp_dropout", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
        "sparse_prediction", "tie_word_embeddings",
    )  # fmt: skip
    weights = WeightMap(
        pairs=(
            Pair("embeddings.tok_embeddings.weight", "embedding.entry.table.embedding"),
            *norm("embeddings.norm", "embedding.norm"),
            *norm(f"{_LAYER}.attn_norm", f"{_BLOCK}.attention_residual.norm"),
            *_joined(
                f"{_LAYER}.attn.Wqkv", *(f"attention.{n}_projection" for n in ("query", "key", "value"))
            ),
            *linear(f"{_LAYER}.attn.Wo", f"{_BLOCK}.attention.output_projection"),
            *norm(f"{_LAYER}.mlp_norm", f"{_BLOCK}.feed_forward_residual.norm"),
            *_joined(f"{_LAYER}.mlp.Wi", "feed_forward.gate", "feed_forward.widen"),
            *linear(f"{_LAYER}.mlp.Wo", f"{_BLOCK}.feed_forward.narrow"),
            *norm("final_norm", "stack.final_norm"),
        ),
        prefix="model.",
        ignored=(r"(head|decoder|classifier)\..*",),
    )

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        every = read_number("global_attn_every_n_layers", settings.get("global_attn_every_n_layers", 3))
        # The window is that of both sides, beside the query's own key.
        beside = read_size("local_attention", settings.get("local_attention", 128)) // 2
        sliding = [bool(layer % every) for layer in range(fields["num_layers"])]
        return {
            **read_rotary_by_kind(settings, _BASES, fields["max_length"], length),
            "windows": read_windows(settings, beside + 1, sliding),
            "norm_kind": "layer" if settings.get("norm_bias", False) else "layer_no_bias",
        }

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        written = {
            **write_windows(config, unused=65),
            **write_rotary_by_kind(config, _BASES),
            "rope_scaling": None,
        }
        window = written.pop("sliding_window")
        written |= {"local_attention": 2 * window - 2, "norm_bias": config.norm_kind == "layer"}
        # Those that transformers takes where none are given are no tokens of a small vocabulary.
        is_small = config.vocab_size is not None and config.vocab_size <= _LAST_SPECIAL
        return written | (dict.fromkeys(_SPECIAL) if is_small else {})
