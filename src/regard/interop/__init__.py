"""Other libraries' attention calls, operators and pretrained models, answered by Regard.

Start from the module of the library that you come from; each loads on first use.

- `jax_nn`: `dot_product_attention`, as in jax.nn
- `flax`: `attention_fn`, for the attention layers of Flax NNX and Linen
- `equinox`: `replace_attention`, for models of Equinox
- `torch_sdpa`: `scaled_dot_product_attention`, as in PyTorch
- `flex`: `block_mask`, for PyTorch's FlexAttention
- `onnx_ops`: `attention`, `rotary_embedding`, `linear_attention`, `flex_attention`, and `run_node` for a node
  of a model
- `huggingface`: `load` and `save` models in Hugging Face's format
- `sentence_embeddings`: `embed` sentences, with MiniLM for instance
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.interop import (
        equinox,
        flax,
        flex,
        huggingface,
        jax_nn,
        onnx_ops,
        sentence_embeddings,
        torch_sdpa,
    )

__all__ = [
    "equinox", "flax", "flex", "huggingface", "jax_nn", "onnx_ops", "sentence_embeddings", "torch_sdpa",
]  # fmt: skip

__getattr__, __dir__ = defer(__name__, "weights", __all__)
