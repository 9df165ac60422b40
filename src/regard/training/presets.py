"""What to train and how, as frozen dataclasses: no JAX here, so that the command line can read them fast.

Every task carries its goal and its receipt: the result and the time that its defaults were measured to give
on two CPU cores. A field's docstring is what `regard train TASK --help` prints.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin

from regard.training.settings import Cadence as Cadence
from regard.training.settings import DecoderSizes as DecoderSizes
from regard.training.settings import Goal as Goal
from regard.training.settings import Optimization as Optimization
from regard.training.settings import Sizes as Sizes
from regard.training.settings import demand_at_least


@dataclass(frozen=True)
class Threshold:
    """Is the sum of eight random tokens above 400? A classifier with mean pooling.

    Expect 0.992 of the held-out sequences right after about 10 s on two CPU cores.

    Example: regard train threshold --seed 1
    """

    name: ClassVar[str] = "threshold"
    goal: ClassVar[Goal] = Goal("accuracy", 0.985)

    vocab_size: int = 100
    """Tokens are drawn from 0 .. vocab_size - 1."""
    length: int = 8
    """Tokens per sequence."""
    threshold: int = 400
    """The label is 1 when the sum of the tokens exceeds this."""
    held_out_size: int = 10_000
    """Held-out sequences."""
    data_seed: int = 0
    """Seed of the held-out data; training draws from another stream, whatever the seeds."""
    model: Sizes = Sizes(d_model=32, num_heads=4, d_ff=128)
    optimization: Optimization = Optimization(steps=800, learning_rate=1e-2)
    cadence: Cadence = Cadence(evaluate_every=200)

    def __post_init__(self) -> None:
        demand_at_least(self, 1, "length", "held_out_size")
        demand_at_least(self, 2, "vocab_size")


@dataclass(frozen=True)
class Copy:
    """Read [SOS, tokens] and write [tokens, EOS]: every position looks one to its right.

    Expect every held-out sequence right after about 7 s on two CPU cores.

    Example: regard train copy --seed 1
    """

    name: ClassVar[str] = "copy"
    goal: ClassVar[Goal] = Goal("accuracy", 1.0)

    vocab_size: int = 16
    """Different tokens, besides the start and end marks."""
    length: int = 8
    """Tokens per sequence, besides the mark."""
    held_out_size: int = 1_000
    """Held-out sequences."""
    data_seed: int = 0
    """Seed of the held-out data; training draws from another stream, whatever the seeds."""
    model: Sizes = Sizes(d_model=64, num_heads=4, d_ff=256)
    optimization: Optimization = Optimization(steps=200, schedule="constant")
    cadence: Cadence = Cadence(evaluate_every=50)

    def __post_init__(self) -> None:
        demand_at_least(self, 1, "vocab_size", "length", "held_out_size")


@dataclass(frozen=True)
class Reverse:
    """Write a sequence backwards: encoder, decoder and cross-attention; lengths vary, padding is masked.

    Evaluated by greedy generation. Expect every held-out sequence right after about 20 s on two CPU cores.

    Example: regard train reverse --seed 1
    """

    name: ClassVar[str] = "reverse"
    goal: ClassVar[Goal] = Goal("accuracy", 1.0)

    vocab_size: int = 16
    """Different tokens, besides the start, end and padding marks."""
    min_length: int = 5
    """Shortest sequence."""
    max_length: int = 10
    """Longest sequence."""
    held_out_size: int = 1_000
    """Held-out sequences."""
    data_seed: int = 0
    """Seed of the held-out data; training draws from another stream, whatever the seeds."""
    model: Sizes = Sizes(d_model=64, num_heads=4, d_ff=128)
    optimization: Optimization = Optimization(steps=500, batch_size=64, learning_rate=5e-3)
    cadence: Cadence = Cadence(evaluate_every=250)

    def __post_init__(self) -> None:
        demand_at_least(self, 1, "vocab_size", "min_length", "held_out_size")
        if self.max_length < self.min_length:
            raise ValueError(
                f"max_length must be at least min_length, got max_length={self.max_length} and "
                f"min_length={self.min_length}"
            )


@dataclass(frozen=True)
class Digits:
    """Which digit is it? 1,797 real 8x8 scans read as 16 patches; a classifier with attention pooling.

    A fifth of the scans, stratified, is held out. Expect 0.97 to 0.98 of them right after about 30 s on
    two CPU cores.

    Example: regard train digits --seed 1
    """

    name: ClassVar[str] = "digits"
    goal: ClassVar[Goal] = Goal("accuracy", 0.96)

    held_out_fraction: float = 0.2
    """Part of every class that is held out, in (0, 1)."""
    distortion: float = 1.0
    """How far training scans are turned, stretched and moved at random: 1 is up to 0.15 radians, a tenth and
    half a pixel; 0 leaves them alone."""
    data_seed: int = 0
    """Seed of the split into training and held-out scans."""
    model: Sizes = Sizes(d_model=64, num_heads=4, d_ff=128, num_layers=2, positions="learned")
    optimization: Optimization = Optimization(steps=800, batch_size=64, warmup_steps=50, weight_decay=0.1)
    cadence: Cadence = Cadence(evaluate_every=200)

    def __post_init__(self) -> None:
        demand_at_least(self, 0, "distortion")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be in (0, 1), got {self.held_out_fraction}")


@dataclass(frozen=True)
class Text:
    """Which token comes next? A causal language model on documents: Python's own manual, or your files.

    Rows are pieces of the documents laid end to end, and no token sees another document; the measure is bits
    per byte of held-out documents. Expect 1.96 on the manual of Python 3.11 after about two minutes on
    two CPU cores.

    Example: regard train text --files README.md docs
    """

    name: ClassVar[str] = "text"
    goal: ClassVar[Goal] = Goal("bits_per_byte", 2.2, smaller_is_better=True)

    files: tuple[str, ...] = ()
    """UTF-8 files, each one document, and directories of them; a single file is cut into documents. None
    means the topics of Python's own manual, which come with Python."""
    document_bytes: int = 4096
    """A single file is cut at ends of lines into documents of at most this many bytes."""
    vocab_size: int = 256
    """Tokens besides the mark between documents: 256 are the bytes, more are frequent strings (BPE) learned
    from the training documents."""
    length: int = 256
    """Tokens per row, which is as far as the model ever looks back in training."""
    held_out_fraction: float = 0.1
    """Part of the bytes, in whole documents, that is held out, in (0, 1)."""
    data_seed: int = 0
    """Seed of the split and of the order of the documents."""
    model: DecoderSizes = DecoderSizes()
    optimization: Optimization = Optimization(steps=300, batch_size=16, warmup_steps=50, weight_decay=0.1)
    cadence: Cadence = Cadence(evaluate_every=100, checkpoint_every=100)

    def __post_init__(self) -> None:
        demand_at_least(self, 2, "length")
        demand_at_least(self, 1, "document_bytes")
        demand_at_least(self, 256, "vocab_size")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be in (0, 1), got {self.held_out_fraction}")


Preset = Threshold | Copy | Reverse | Digits | Text
PRESETS: dict[str, type[Preset]] = {
    preset.name: preset for preset in (Threshold, Copy, Reverse, Digits, Text)
}


SMOKE: dict[str, dict[str, int]] = {
    "model": {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 1},
    "optimization": {"steps": 20, "batch_size": 16, "warmup_steps": 0},
    "cadence": {"log_every": 5, "evaluate_every": 10, "checkpoint_every": 10, "heads_every": 5},
    "": {"held_out_size": 64},
}


def shrink(preset: Preset) -> Preset:
    """Returns the preset at smoke-test size; settings that differ from the defaults stay.

    Example:
        >>> shrink(Copy(length=5)).optimization.steps, shrink(Copy(length=5)).length
        (20, 5)
    """
    default = type(preset)()
    groups = {
        name: _shrink_record(getattr(preset, name), getattr(default, name), small)
        for name, small in SMOKE.items()
        if name
    }
    return dataclasses.replace(_shrink_record(preset, default, SMOKE[""]), **groups)


def _shrink_record(record: Any, default: Any, small: dict[str, int]) -> Any:
    """One dataclass with the small value of each field that it has and that was left at its default."""
    changes = {
        name: value
        for name, value in small.items()
        if hasattr(record, name) and getattr(record, name) == getattr(default, name)
    }
    return dataclasses.replace(record, **changes)


def to_settings(preset: Preset) -> dict[str, Any]:
    """Returns the preset as nested dictionaries of plain values, ready for JSON."""
    settings = dataclasses.asdict(preset)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def complete_settings(settings: Any) -> Any:
    """Returns what an older version's `to_settings` wrote, with the settings that came later at default.

    Example:
        >>> complete_settings({"cadence": {"log_every": 3}})
        {'cadence': {'heads_every': 20, 'log_every': 3}}
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("cadence"), dict):
        return settings
    return settings | {"cadence": {"heads_every": Cadence().heads_every} | settings["cadence"]}


def from_settings(name: str, settings: dict[str, Any]) -> Preset:
    """Rebuilds the preset that `to_settings` wrote.

    Raises:
        ValueError: for an unknown task, an unknown or missing setting, or a value out of range.
    """
    if name not in PRESETS:
        raise ValueError(f"task must be one of {', '.join(PRESETS)}, got {name!r}")
    return _rebuild(PRESETS[name], settings, name)


def _rebuild(record: Any, settings: Any, where: str) -> Any:
    """One dataclass from its dictionary, nested dataclasses included; names what does not fit."""
    expected = {field.name: field for field in dataclasses.fields(record)}
    if not isinstance(settings, dict) or set(settings) != set(expected):
        got = sorted(settings) if isinstance(settings, dict) else settings
        raise ValueError(f"{where} must have the settings {sorted(expected)}, got {got}")
    values = {}
    for name, value in settings.items():
        kind, path = expected[name].type, f"{where}.{name}"
        if dataclasses.is_dataclass(kind):
            values[name] = _rebuild(kind, value, path)
        elif _is_of(kind, value):
            values[name] = tuple(value) if isinstance(value, list) else value
        else:
            raise ValueError(f"{path} must be {getattr(kind, '__name__', kind)}, got {value!r}")
    return record(**values)


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value read from JSON has the type a field asks for (a whole number will do for a float)."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_is_of(get_args(kind)[0], entry) for entry in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
