"""The sizes and choices that make a Transformer: architecture as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from regard.arguments import guided
from regard.engine.call.canonicalization import check_flag, check_rate
from regard.layers.choices import NormKind, NormPlace, check_choice, check_kind
from regard.layers.experts import RouterKind, check_experts, check_router, check_shared
from regard.layers.feed_forward import check_activation
from regard.layers.heads import check_heads
from regard.layers.latent_attention import check_indexer
from regard.layers.residual import EPSILON
from regard.positions import Rotary, Scaling

Positions = Literal["sinusoidal", "learned", "rotary", "relative", "none"]
Activation = Literal["relu", "gelu_tanh", "gelu_erf", "gelu_quick", "silu"]
Remat = Literal[
    "full", "nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
]
Mixer = Literal["attention", "gated_delta", "kimi_delta"]
CHOICES = {"positions": Positions, "norm": NormPlace, "norm_kind": NormKind, "activation": Activation}
CHOICES["router_kind"] = RouterKind
CAN_BE_0 = ("num_layers", "num_token_types")


@guided
@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a Transformer; the same record builds every model here.

    The defaults are those of a plain pre-norm Transformer; `regard.models.PRESETS` has those of BERT, GPT-2,
    Llama, Mistral, Qwen, Gemma, T5 and ViT. Each field is explained below its line in the source, and in
    the reference. A model of images has `input_width`, the numbers of a patch, in place of `vocab_size`.

    Raises:
        TypeError: flags that are neither True nor False, a rotary scaling of another kind.
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
    """Longest input of learned positions, a class token included; the other kinds have no limit."""

    num_key_heads: int | None = None
    """Key heads, a divisor of num_heads; None means num_heads, 1 is multi-query."""
    head_dim: int | None = None
    """Width of one head; None means d_model // num_heads."""
    attention_bias: bool = True
    """True if the query, key and value projections have biases."""
    output_bias: bool | None = None
    """True if the attention's output projection has one; None means as attention_bias."""
    attention_scale: float | None = None
    """The factor of the scores; None means 1 / sqrt(head width)."""
    attention_softcap: float | None = None
    """Scores are kept within this distance of 0, smoothly; None leaves them."""
    query_key_norm: bool = False
    """RMSNorm over every head's queries and keys."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax and reads nothing."""
    latent_dim: int | None = None
    """Width of the vector per token that keys and values of all heads are made of, as in `LatentAttention`;
    None means that a token has keys and values of its own. `head_dim` is then without the next part."""
    latent_rotary_dim: int | None = None
    """With latent_dim, the width of the part of a key that all heads share and rotary positions turn."""
    latent_value_dim: int | None = None
    """With latent_dim, the width of a head's values; None means head_dim."""
    latent_query_dim: int | None = None
    """With latent_dim, the width of a vector that queries are made of; None means that they have none."""
    index_count: int | None = None
    """With latent_dim, the number of keys that an indexer chooses for each query; None means all keys."""
    index_heads: int | None = None
    """Heads of the indexer."""
    index_dim: int | None = None
    """Width of a head of the indexer."""
    output_gate: bool = False
    """True if a sigmoid of the layer's input weighs what the heads have read, feature by feature."""
    mixers: tuple[Mixer, ...] = ("attention",)
    """Mixers of tokens, layer by layer and then over again: attention, or linear attention (the delta rule),
    as in ("gated_delta", "gated_delta", "gated_delta", "attention"). Of a Decoder alone."""
    delta_heads: int | None = None
    """Heads of the delta rule's values; None means num_heads."""
    delta_key_heads: int | None = None
    """Heads of its queries and keys, a divisor of delta_heads; None means delta_heads."""
    delta_head_dim: int | None = None
    """Width of its queries and keys; None means the width of a head of attention."""
    delta_value_dim: int | None = None
    """Width of its values; None means delta_head_dim."""
    conv_width: int = 4
    """Tokens that the convolution before the delta rule reads."""
    windows: tuple[int | None, ...] = (None,)
    """Keys before the query's own that it sees (and as many after it, in an encoder), layer by layer and then
    over again; None means all."""

    positions: Positions = "sinusoidal"
    """Positions: added to the embedding, turning queries and keys, or as a bias of scores."""
    rotary_base: float = 10_000.0
    """Ratio between the longest and the shortest wavelength of rotary positions."""
    rotary_width: int | None = None
    """The number of features of a head that are turned; None means all."""
    rotary_scaling: Scaling | None = None
    """The scaling by which rotary positions serve longer sequences than in training."""
    rotary_window_base: float | None = None
    """The rotary_base of layers with a window, which then have no rotary_scaling; None means as others."""
    relative_buckets: int = 32
    """Rows of the table of relative positions, which all layers share."""
    relative_max_distance: int = 128
    """From where on all distances share a bucket."""

    norm: NormPlace = "pre"
    """Norms before each branch, after each sum, or before and at the end of each branch."""
    norm_kind: NormKind = "layer"
    """LayerNorm, with biases or without, or RMSNorm, which may hold its scale less 1, as Gemma's."""
    norm_epsilon: float = EPSILON
    """The number that norms add to the variance."""

    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward branches."""
    gated: bool = False
    """True if the activation is a gate beside a plain linear map."""
    gate_limit: float | None = None
    """The bound of the gate and of what it multiplies, which then has 1 added, as in gpt-oss."""
    feed_forward_bias: bool = True
    """True if the feed-forward maps have biases, the router of experts too."""

    num_experts: int | None = None
    """Experts of a feed-forward branch, of which every token passes some; None means one branch for all."""
    experts_per_token: int = 1
    """Experts that a token passes."""
    expert_width: int | None = None
    """Width of the branch of one expert; None means d_ff."""
    normalize_chosen: bool = True
    """True if the weights of the chosen experts sum to 1; else they are shares of all experts."""
    router_kind: RouterKind = "softmax"
    """The function that makes weights of the router's scores, as in `Experts`."""
    expert_groups: int = 1
    """Groups of experts, for a router of sigmoids."""
    groups_per_token: int = 1
    """Groups that a token may choose experts from."""
    expert_scale: float = 1.0
    """The factor of the chosen experts' weights."""
    shared_width: int | None = None
    """Width of an expert that every token passes beside those it chooses; None means none."""
    shared_gate: bool = False
    """True if a sigmoid of the layer's input weighs what the shared expert gives."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have one branch for all tokens beside others that have experts."""

    scale_embedding: bool = True
    """True if embedding tables are read times sqrt(d_model)."""
    embedding_norm: bool = False
    """A norm on the embedding."""
    first_norm: bool = True
    """False if the first block has no norm before its attention, as where the embedding has one."""
    num_token_types: int = 0
    """Kinds of segments that have an embedding of their own; 0 means none."""
    class_token: bool = False
    """True if real-valued inputs get a learned vector in front."""

    tied_output: bool = False
    """True if the output head is the embedding table."""
    head_bias: bool = True
    """True if the output head has a bias; a tied one has none."""
    output_scale: float = 1.0
    """The factor of hidden states before the head."""
    output_softcap: float | None = None
    """Logits are kept within this distance of 0, smoothly; None leaves them."""
    num_decoder_layers: int | None = None
    """Blocks of the decoder of an encoder-decoder; None means num_layers."""
    shared_embedding: bool = False
    """True if the source and the target of an encoder-decoder share one table."""

    dropout_rate: float = 0.0
    """Dropout on embeddings, on branches before they are added, and in the feed-forward branches."""
    attention_dropout_rate: float = 0.0
    """Dropout on the attention weights."""

    scan_layers: bool = False
    """True if compiled programs loop over the blocks instead of repeating them; the results are the same."""
    remat: str | Callable[..., Any] | None = None
    """The policy by which the backward pass computes again what is within a block: "full", all of it, or one
    of `jax.checkpoint_policies`, by name or as a function; None keeps everything from the forward pass."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_latent()
        self._check_heads()
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), get_args(choices))
        self._check_windows()
        self._check_mixers()
        self._check_experts()
        self._check_inputs()
        if self.remat is not None and not callable(self.remat):
            check_choice("remat", self.remat, get_args(Remat))

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    def rotary(self, layer: int) -> Rotary | None:
        """Return the rotary positions of a layer's queries and keys; None for other kinds of positions."""
        if self.positions != "rotary":
            return None
        interleaved = self.latent_dim is not None  # as DeepSeek stores it
        if self.rotary_window_base is not None and self.window(layer) is not None:
            return Rotary(self.rotary_window_base, self.rotary_width, interleaved=interleaved)
        options: Any = {"scaling": self.rotary_scaling, "interleaved": interleaved}
        return Rotary(self.rotary_base, self.rotary_width, **options)

    def window(self, layer: int) -> int | None:
        """Return the number of keys before the query's own that a layer sees; None means all."""
        return self.windows[layer % len(self.windows)]

    @property
    def is_hybrid(self) -> bool:
        """True where a mixer is no attention."""
        return {*self.mixers} != {"attention"}

    def mixer(self, layer: int) -> Mixer:
        """Return what mixes the tokens of a layer."""
        return self.mixers[layer % len(self.mixers)]

    def feed_forward(self, layer: int) -> dict[str, Any]:
        """Return the width of a layer's feed-forward branch and its further arguments."""
        names, width = ["activation", "gated", "gate_limit"], self.d_ff
        if self.num_experts is not None and layer not in self.dense_layers:
            names += ["num_experts", "experts_per_token", "normalize_chosen", "router_kind"]
            names += ["expert_groups", "groups_per_token", "expert_scale", "shared_width", "shared_gate"]
            width = self.expert_width or width
        options = {name: getattr(self, name) for name in names}
        return {"d_ff": width, "feed_forward": {**options, "use_bias": self.feed_forward_bias}}

    def _check_numbers(self) -> None:
        """Check sizes, rates, factors and flags, each by what its field is declared as."""
        for field in fields(self):
            name = field.name
            number: Any = getattr(self, name)
            if isinstance(number, np.generic):
                number = number.item()
                object.__setattr__(self, name, number)
            kind, _, is_optional = str(field.type).partition(" | ")
            least = 0 if name in CAN_BE_0 else 1
            if name.endswith("_rate"):
                check_rate(name, number)
            elif number is None and is_optional:
                continue
            elif kind == "bool":
                check_flag(name, number)
            elif kind == "int" and not _is_number(number, int, least):
                raise ValueError(f"{name}: expected an integer of at least {least}, got {number!r}")
            elif kind == "float" and not (_is_number(number, int | float, 0) and number != 0):
                raise ValueError(f"{name}: expected a number above 0, got {number!r}")

    def _check_heads(self) -> None:
        check_heads(self.d_model, self.num_heads, self.num_key_heads or 1, self.head_dim)
        hint = "build one with regard.positions, such as Linear(4.0)"
        check_kind("rotary_scaling", self.rotary_scaling, Scaling, type(None), hint=hint)
        width = self.latent_rotary_dim or self.head_width
        turned = self.rotary_width or width
        if self.positions == "rotary" and turned > width:
            raise ValueError(f"rotary_width: expected at most the head width, {width}; got {turned}")
        if self.positions == "rotary" and turned % 2:
            raise ValueError(
                f"positions: 'rotary' turns pairs of features, got a head width of {width}; choose"
                " an even head_dim, or an even rotary_width"
            )

    def _check_latent(self) -> None:
        of_latent = ("latent_rotary_dim", "latent_value_dim", "latent_query_dim", "index_count")
        others = ("num_key_heads", "output_bias", "query_key_norm", "sinks", "output_gate", "rotary_width")
        chosen = of_latent if self.latent_dim is None else (*others, "attention_dropout_rate")
        for name in chosen:
            if getattr(self, name):
                state = "without" if self.latent_dim is None else "with"
                raise ValueError(f"{name}: expected none {state} latent_dim, got {getattr(self, name)!r}")
        if self.latent_dim is not None and (self.latent_rotary_dim or 1) % 2:
            raise ValueError(
                f"latent_rotary_dim: expected an even number with latent_dim, got {self.latent_rotary_dim}"
            )
        check_indexer(self.index_count, self.index_heads, self.index_dim, self.latent_rotary_dim or 0)
        if self.index_count is not None and self.windows != (None,):
            raise ValueError(f"windows: expected (None,) with index_count, got {self.windows!r}")

    def _check_windows(self) -> None:
        windows = self.windows
        if not isinstance(windows, tuple) or not windows:
            raise ValueError(f"windows: expected a tuple such as (None,) or (4095, None), got {windows!r}")
        if not all(window is None or _is_number(window, int, 0) for window in windows):
            raise ValueError(f"windows: expected None or numbers of keys of at least 0, got {windows!r}")

    def _check_mixers(self) -> None:
        if not isinstance(self.mixers, tuple) or not self.mixers:
            raise ValueError(
                f"mixers: expected a tuple such as ('gated_delta', 'attention'), got {self.mixers!r}"
            )
        for mixer in self.mixers:
            check_choice("mixers", mixer, get_args(Mixer))
        heads, key_heads = self.delta_heads or self.num_heads, self.delta_key_heads or 1
        if heads % key_heads:
            raise ValueError(f"delta_key_heads: expected a divisor of delta_heads = {heads}, got {key_heads}")
        if "kimi_delta" not in self.mixers:
            return
        for name in ("delta_key_heads", "delta_value_dim"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: expected None with kimi_delta, where it is as for values and keys; got"
                    f" {getattr(self, name)}"
                )

    def _check_experts(self) -> None:
        check_activation(self.activation, self.gated, self.gate_limit)
        if self.num_experts is not None:
            check_experts(self.num_experts, self.experts_per_token)
            counts = (self.num_experts, self.experts_per_token, self.expert_groups, self.groups_per_token)
            check_router(self.router_kind, *counts)
            check_shared(self.shared_width, self.shared_gate)
        allowed, layers = range(self.num_layers if self.num_experts else 0), self.dense_layers
        if not isinstance(layers, tuple) or any(layer not in allowed for layer in layers):
            raise ValueError(
                f"dense_layers: expected a tuple of layers below {len(allowed)} where there are experts, got"
                f" {layers!r}"
            )

    def _check_inputs(self) -> None:
        if (self.vocab_size is None) == (self.input_width is None):
            raise ValueError(
                "vocab_size, input_width: expected exactly one of them, vocab_size for tokens or input_width"
                f" for real vectors; got vocab_size={self.vocab_size}, input_width={self.input_width}"
            )
        if self.class_token and self.vocab_size is not None:
            raise ValueError("class_token: expected real vectors, input_width; tokens have one of their own")
        if self.num_token_types and self.vocab_size is None:
            raise ValueError(f"num_token_types: expected 0 without vocab_size, got {self.num_token_types}")


def _is_number(value: Any, kind: Any, least: int) -> bool:
    """Return whether a value is a finite number of a kind, and at least so large."""
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value < math.inf


def check_config(config: Any) -> None:
    """Raise unless a model is given what it is built from."""
    hint = "pass its config" if hasattr(config, "config") else "write TransformerConfig(...)"
    check_kind("config", config, TransformerConfig, hint=hint)
