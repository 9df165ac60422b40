"""ONNX's attention operators on JAX arrays, in one place, answered by `attend`, `rotate` and `linear`.

Each function has its operator's inputs, in their order, and its attributes by name; `run_node` takes them
from a node of a model. Only graphs and nodes need the package `onnx` itself.
"""

from regard.interop.onnx_linear import LinearAttentionOutputs as LinearAttentionOutputs
from regard.interop.onnx_linear import linear_attention as linear_attention
from regard.interop.onnx_nodes import run_node as run_node
from regard.interop.onnx_rotary import rotary_embedding as rotary_embedding
from regard.interop.onnx_softmax import AttentionOutputs as AttentionOutputs
from regard.interop.onnx_softmax import attention as attention
from regard.interop.onnx_softmax import flex_attention as flex_attention
