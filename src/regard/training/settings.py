"""Settings that tasks share: goals, sizes, optimization, cadence. Importing this module loads no JAX."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

_WORDS = {Integral: "an integer", Real: "a number"}


class Range(NamedTuple):
    """The values that a setting may have, declared beside its type: `Annotated[int, at_least(1)]`."""

    words: str
    holds: Callable[[Any], bool]


def at_least(bound: float) -> Range:
    """Return the range from a bound on."""
    return Range(f"at least {bound}", lambda value: value >= bound)


FRACTION = Range("in (0, 1)", lambda value: 0 < value < 1)
RATE = Range("in [0, 1)", lambda value: 0 <= value < 1)
INT32 = Range("from -2**31 to 2**31 - 1", lambda value: -(2**31) <= value < 2**31)
MOST = Range("at most 2**31 - 1", lambda value: value < 2**31)  # int32 counts it
VOCABULARY = Range("at most 2**30", lambda value: value <= 2**30)  # int32 holds its tokens, and marks beside
NOT_NEGATIVE = Range("at least 0 and finite", lambda value: 0 <= value < math.inf)
POSITIVE = Range("above 0 and finite", lambda value: 0 < value < math.inf)
Count = Annotated[int, at_least(1), MOST]
MaybeCount = Annotated[int | None, at_least(1), MOST]
DataSeed = Annotated[int, Range("from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)]


class Settings:
    """The base of dataclasses whose fields declare their ranges."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            ranges = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Range)]
            for allowed in ranges:
                value, origin = getattr(self, name), kind.__origin__
                if value is None and type(None) in get_args(origin):
                    continue
                number = Real if origin is float else Integral
                if isinstance(value, bool) or not isinstance(value, number):
                    raise TypeError(f"{name} must be {_WORDS[number]}, got {value!r}")
                if not allowed.holds(value):
                    raise ValueError(f"{name} must be {allowed.words}, got {value}")

    def _demand(self, holds: bool, rule: str, *names: str) -> None:
        """Raise a ValueError that tells the rule and these settings, unless it holds."""
        if not holds:
            assignments = " and ".join(f"{name}={getattr(self, name)}" for name in names)
            raise ValueError(f"{rule}, got {assignments}")


@dataclass(frozen=True)
class Goal:
    """The held-out result that a full-size run must reach.

    Attributes:
        metric: name of a held-out metric.
        bound: its least value, or its greatest where less is better.
        smaller_is_better: whether the bound is the greatest value allowed.

    Example:
        >>> Goal("loss", 1.5, smaller_is_better=True).is_reached({"loss": 1.25})
        True
    """

    metric: str
    bound: float
    smaller_is_better: bool = False

    @property
    def title(self) -> str:
        """The metric in words."""
        return self.metric.replace("_", " ")

    def is_reached(self, held_out: Mapping[str, float]) -> bool:
        """Return True when held-out metrics meet the bound; NaN does not."""
        value = held_out[self.metric]
        return value <= self.bound if self.smaller_is_better else value >= self.bound

    def compare(self, held_out: Mapping[str, float]) -> str:
        """Return value and bound with the sign between them, such as `0.9100 < 0.96`."""
        value = held_out[self.metric]
        sign = "<" if value < self.bound else ">" if value > self.bound else "="
        return f"{value:.4f} {sign} {self.bound:g}"

    def __str__(self) -> str:
        return f"{'at most' if self.smaller_is_better else 'at least'} {self.bound:g}"


@dataclass(frozen=True)
class LayerSizes(Settings):
    """Sizes that every model has."""

    d_model: Count = 64
    """Width of the residual stream."""
    num_heads: Count = 4
    """Attention heads; divides d_model, with rotary positions into heads of an even width."""
    d_ff: Count = 256
    """Width inside the feed-forward layers."""
    num_layers: Count = 1
    """Transformer blocks (in the encoder and again in the decoder where there is one)."""
    dropout_rate: Annotated[float, RATE] = 0.0
    """Probability of dropping a residual or embedding unit, in [0, 1)."""
    scan_layers: bool = False
    """True if one Transformer block is compiled and looped over, which starts sooner where there are many."""
    remat: Literal[None, "full", "dots_saveable", "dots_with_no_batch_dims_saveable"] = None
    """The part of a block that the backward pass computes again to save memory: full, all of it; a policy of
    jax.checkpoint_policies, all but what this keeps; None, nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "head_dim", None) is None:
            divides = self.d_model % self.num_heads == 0
            self._demand(divides, "num_heads must divide d_model", "num_heads", "d_model")


@dataclass(frozen=True)
class Sizes(LayerSizes):
    """Sizes of the model."""

    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    """The way in which positions enter."""
    norm: Literal["pre", "post"] = "pre"
    """The place where layers normalise: before each sublayer, or after each sum."""


@dataclass(frozen=True)
class DecoderSizes(LayerSizes):
    """Sizes of a language model with rotary positions, RMSNorm, gated branches and no biases.

    Its fields are those of `TransformerConfig`, which says what does not fit together.
    """

    d_model: Count = 128
    d_ff: Count = 320
    num_layers: Count = 4
    num_key_heads: MaybeCount = None
    """Heads of keys and values, a divisor of num_heads, each read by as many query heads; None: num_heads."""
    head_dim: MaybeCount = None
    """Width of a head, even; None: d_model / num_heads."""
    mixers: tuple[Literal["attention", "gated_delta", "kimi_delta"], ...] = ("attention",)
    """Mixers of tokens, layer by layer and then over again: attention, or linear attention (delta rule)."""
    delta_heads: MaybeCount = None
    """Heads of the delta rule's values; None: num_heads."""
    delta_key_heads: MaybeCount = None
    """Heads of its queries and keys, a divisor of delta_heads; None: delta_heads."""
    delta_head_dim: MaybeCount = None
    """Width of its queries and keys; None: that of a head of attention."""
    delta_value_dim: MaybeCount = None
    """Width of its values; None: delta_head_dim."""
    conv_width: Count = 4
    """Tokens that the convolution before the delta rule reads."""
    output_gate: bool = False
    """True if a sigmoid of the layer's input weighs what the heads of attention have read."""
    latent_dim: MaybeCount = None
    """Width of the vector per token that keys and values of all heads are made of, which is what a cache
    holds; None: tokens have keys and values of their own."""
    latent_rotary_dim: MaybeCount = None
    """With latent_dim, width of the part of a key that heads share and positions turn, even; head_dim is
    without it."""
    latent_value_dim: MaybeCount = None
    """With latent_dim, width of a head's values; None: head_dim."""
    latent_query_dim: MaybeCount = None
    """With latent_dim, width of a vector that queries are made of; None: they have none."""
    index_count: MaybeCount = None
    """With latent_dim, keys that an indexer chooses for each query; None: all keys."""
    index_heads: MaybeCount = None
    """Heads of the indexer."""
    index_dim: MaybeCount = None
    """Width of a head of the indexer, at least latent_rotary_dim."""
    rotary_base: Annotated[float, POSITIVE] = 10_000.0
    """Ratio between the longest and the shortest wavelength of rotary positions."""
    num_experts: MaybeCount = None
    """Experts in each feed-forward layer, of which a token passes some; None: one branch for all tokens."""
    experts_per_token: Count = 1
    """Experts that a token passes."""
    expert_width: MaybeCount = None
    """Width inside an expert; None: d_ff."""
    dense_layers: tuple[int, ...] = ()
    """Layers, from 0, with one branch for all tokens where others have experts."""
    shared_width: MaybeCount = None
    """Width inside an expert that every token passes beside those it chooses; None: there is none."""
    shared_gate: bool = False
    """True if a sigmoid of the layer's input weighs what the shared expert gives."""
    router_kind: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes weights of the scores by which experts are chosen."""
    normalize_chosen: bool = True
    """True if the weights of the chosen experts sum to 1; False: they are shares of all experts."""
    expert_groups: Count = 1
    """Groups of experts, for a router of sigmoids."""
    groups_per_token: Count = 1
    """Groups that a token may choose experts from."""
    expert_scale: Annotated[float, POSITIVE] = 1.0
    """Factor of the chosen experts' weights."""
    tied_output: bool = True
    """True if the embedding table also maps the last layer to tokens; False: a matrix of its own does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent_dim is not None:  # a width of its own is turned
            is_even = (self.latent_rotary_dim or 1) % 2 == 0
            rule = "with latent_dim, latent_rotary_dim must be there and even, as rotary positions turn pairs"
            self._demand(is_even, rule, "latent_rotary_dim", "latent_dim")
        elif self.head_dim is None:
            rule = "d_model / num_heads must be even, as rotary positions turn pairs"
            self._demand(self.d_model // self.num_heads % 2 == 0, rule, "d_model", "num_heads")
        else:
            self._demand(self.head_dim % 2 == 0, "head_dim must be even", "head_dim")
        for heads, key_heads in (("num_heads", "num_key_heads"), ("delta_heads", "delta_key_heads")):
            heads = heads if getattr(self, heads) else "num_heads"
            is_divisor = getattr(self, heads) % (getattr(self, key_heads) or 1) == 0
            self._demand(is_divisor, f"{key_heads} must divide {heads}", key_heads, heads)
        is_layer = all(0 <= layer < self.num_layers for layer in self.dense_layers)
        self._demand(is_layer, "dense_layers must be below num_layers", "dense_layers", "num_layers")
        of_experts = ("expert_width", "dense_layers", "shared_width", "shared_gate", "router_kind")
        for name in (*of_experts, "normalize_chosen", "expert_groups", "groups_per_token", "expert_scale"):
            is_read = bool(self.num_experts) or getattr(self, name) == getattr(type(self), name)
            self._demand(is_read, f"{name} is of models with num_experts", name, "num_experts")
        for name in ("delta_heads", "delta_key_heads", "delta_head_dim", "delta_value_dim"):
            is_read = set(self.mixers) != {"attention"} or getattr(self, name) is None
            self._demand(is_read, f"{name} is of mixers of the delta rule", name, "mixers")
        is_less = self.experts_per_token <= (self.num_experts or 1)
        names = ("experts_per_token", "num_experts")
        self._demand(is_less, "experts_per_token must be at most num_experts", *names)


@dataclass(frozen=True)
class Optimization(Settings):
    """Adam (AdamW with weight decay) with a schedule and global-norm clipping."""

    steps: Count = 600
    """Updates of the parameters."""
    batch_size: Count = 128
    """Examples per update."""
    accumulate_steps: Count = 1
    """Equal parts of a batch whose gradients are averaged, by their tokens where these differ, one part after
    the other, in the memory of one."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype that updates compute in; parameters, optimizer and sums stay float32, and so does evaluation."""
    learning_rate: Annotated[float, POSITIVE] = 3e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "exponential", "stable", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine or linear down to 0, exponential to a hundredth, stable until a
    fifth of the updates after the warm-up is left and then linear to 0, or constant."""
    warmup_steps: Annotated[int, at_least(0), MOST] = 0
    """Updates over which the learning rate rises linearly from 0."""
    clip_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 leaves them alone."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled weight decay on matrices (arrays of two axes or more: not biases, not gains)."""
    balance_rate: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Change per update of the biases by which a router_kind of sigmoid chooses experts, so that all are
    chosen alike often; 0 leaves them alone."""
    balance_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Factor of a loss by which routers of any kind learn to choose all experts alike often, of each of
    accumulate_steps parts by itself; it is not among the losses that are reported."""
    nan: Literal["stop", "skip"] = "stop"
    """Treatment of an update whose loss or gradients are not finite: stop ends the run, which can go on from
    its last checkpoint; skip leaves all as it was, and ends the run after ten in a row."""
    ema_decay: Annotated[float, RATE] = 0.0
    """Decay per update of a moving average of parameters, which is what is evaluated and loaded; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_shorter = self.warmup_steps <= self.steps
        self._demand(is_shorter, "warmup_steps must be at most steps", "warmup_steps", "steps")
        divides, names = self.batch_size % self.accumulate_steps == 0, ("accumulate_steps", "batch_size")
        self._demand(divides, "accumulate_steps must divide batch_size", *names)


@dataclass(frozen=True)
class Cadence(Settings):
    """The steps between measurements and checkpoints; the last step always has both."""

    log_every: Count = 10
    """Steps between two lines of metrics.jsonl."""
    evaluate_every: Count = 100
    """Steps between two evaluations on held-out data."""
    checkpoint_every: Count = 200
    """Steps between two checkpoints."""
    heads_every: Annotated[int, at_least(0), MOST] = 20
    """Steps between two looks at the entropy and the largest logit of every head; 0 never looks."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
