"""Other libraries' attention calls, operators and pretrained models, answered by Regard.

Import the module you need: `huggingface.load` reads pretrained models, `jax_nn.dot_product_attention` and
`torch_sdpa.scaled_dot_product_attention` stand in for the calls of those names, `flax.attention_fn` serves
Flax's layers, and `onnx_ops.run_node` evaluates ONNX's attention operators.
"""
