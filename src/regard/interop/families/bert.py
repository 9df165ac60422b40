"""BERT, and what shares its architecture, such as MiniLM."""

from typing import ClassVar

from regard.interop.families.family import Family
from regard.interop.weight_maps import Pair, WeightMap, linear, norm
from regard.models import Encoder
from regard.models.presets import BERT

_LAYER, _BLOCK = "encoder.layer.{n}", "stack.blocks.{n}"


class Bert(Family):
    """BERT as an Encoder of tokens."""

    kind = "bert"
    architecture = "BertModel"
    model = Encoder
    entries: ClassVar = {
        "layer_norm_eps": "norm_epsilon", "hidden_act": "activation", "type_vocab_size": "num_token_types",
    }  # fmt: skip
    defaults: ClassVar = BERT
    required: ClassVar = {
        "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False,
    }  # fmt: skip
    # The pooler and heads on top of it are not loaded.
    harmless: ClassVar = (
        "tie_word_embeddings", "directionality", "pooler_fc_size", "pooler_num_attention_heads",
        "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "is_encoder_decoder",
    )  # fmt: skip
    weights = WeightMap(
        pairs=(
            Pair("embeddings.word_embeddings.weight", "embedding.entry.table.embedding"),
            Pair("embeddings.position_embeddings.weight", "embedding.position_table.embedding"),
            Pair("embeddings.token_type_embeddings.weight", "embedding.type_table.embedding"),
            *norm("embeddings.LayerNorm", "embedding.norm"),
            *linear(f"{_LAYER}.attention.self.query", f"{_BLOCK}.attention.query_projection"),
            *linear(f"{_LAYER}.attention.self.key", f"{_BLOCK}.attention.key_projection"),
            *linear(f"{_LAYER}.attention.self.value", f"{_BLOCK}.attention.value_projection"),
            *linear(f"{_LAYER}.attention.output.dense", f"{_BLOCK}.attention.output_projection"),
            *norm(f"{_LAYER}.attention.output.LayerNorm", f"{_BLOCK}.attention_residual.norm"),
            *linear(f"{_LAYER}.intermediate.dense", f"{_BLOCK}.feed_forward.widen"),
            *linear(f"{_LAYER}.output.dense", f"{_BLOCK}.feed_forward.narrow"),
            *norm(f"{_LAYER}.output.LayerNorm", f"{_BLOCK}.feed_forward_residual.norm"),
        ),
        prefix="bert.",
        ignored=(r"embeddings\.position_ids", r"(pooler|cls|classifier|qa_outputs)\..*"),
        respelled=((".gamma", ".weight"), (".beta", ".bias")),
    )
