"""Positions of tokens: rotary turns (RoPE) of queries and keys, and tables to add to embeddings.

Start from `rotary` for turns and from `sinusoidal` for a table; `Linear`, `DynamicNTK`, `Llama3` and `YaRN`
scale rotary frequencies for sequences longer than those of training.
"""

from regard.positions.rotation import Rotary, rotary
from regard.positions.scaling import DynamicNTK, Linear, Llama3, Scaling, YaRN
from regard.positions.tables import learned, sinusoidal, sinusoidal_at

__all__ = ["DynamicNTK", "Linear", "Llama3", "Rotary", "Scaling", "YaRN"]
__all__ += ["learned", "rotary", "sinusoidal", "sinusoidal_at"]
