"""The sizes and choices that make a Transformer."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal, get_args

Positions = Literal["sinusoidal", "learned", "none"]
Norm = Literal["pre", "post"]
Activation = Literal["relu", "gelu_tanh", "gelu_erf", "silu"]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a Transformer; the same record builds every model here.

    Raises:
        ValueError: sizes that do not fit together, rates outside [0, 1), unknown choices.

    Example:
        >>> from regard.models import TransformerConfig
        >>> TransformerConfig(d_model=32, num_heads=4, d_ff=128, num_layers=2, vocab_size=100).head_width
        8
    """

    d_model: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads per attention."""
    d_ff: int
    """Width of the feed-forward branches."""
    num_layers: int
    """Number of blocks; 0 leaves the embedding."""
    vocab_size: int | None = None
    """Inputs are tokens below this number; give either this or input_width."""
    input_width: int | None = None
    """Inputs are real vectors of this width; give either this or vocab_size."""
    max_length: int = 512
    """Longest input of learned positions; sinusoidal ones have no limit."""
    num_key_heads: int | None = None
    """Key heads, a divisor of num_heads; None means num_heads, 1 is multi-query."""
    head_dim: int | None = None
    """Width of one head; None means d_model // num_heads."""
    positions: Positions = "sinusoidal"
    """How the model knows order."""
    norm: Norm = "pre"
    """LayerNorm before each branch, or after each residual."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward branches."""
    attention_bias: bool = True
    """Whether the attention projections have biases."""
    dropout_rate: float = 0.0
    """Dropout on embeddings, on branches before they are added, and in the feed-forward branches."""
    attention_dropout_rate: float = 0.0
    """Dropout on the attention weights."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_heads()
        for name, choices in (("positions", Positions), ("norm", Norm), ("activation", Activation)):
            _check_choice(name, getattr(self, name), get_args(choices))
        for name in ("dropout_rate", "attention_dropout_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: expected a rate in [0, 1), got {getattr(self, name)}")
        if (self.vocab_size is None) == (self.input_width is None):
            raise ValueError(
                "vocab_size, input_width: expected exactly one of them, vocab_size for tokens or input_width"
                f" for real vectors; got vocab_size={self.vocab_size}, input_width={self.input_width}"
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    def _check_sizes(self) -> None:
        optional = ("vocab_size", "input_width", "num_key_heads", "head_dim")
        for name in ("d_model", "num_heads", "d_ff", "num_layers", "max_length", *optional):
            size, least = getattr(self, name), 0 if name == "num_layers" else 1
            if size is None and name in optional:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {size!r}")

    def _check_heads(self) -> None:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of d_model = {self.d_model}, got {self.num_heads}; choose"
                " one, or give head_dim"
            )
        if self.num_heads % (self.num_key_heads or 1):
            raise ValueError(
                f"num_key_heads: expected a divisor of num_heads = {self.num_heads}, got {self.num_key_heads}"
            )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError for a choice that is not on the list, naming the nearest."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
    hint = f"nearest: {near[0]}"
    if value == "gelu":
        hint = "'gelu' has two meanings: choose gelu_tanh, the approximation, or gelu_erf, the exact one"
    raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r} ({hint})")
