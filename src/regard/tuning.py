"""Measurements of this machine for `regard tune`: settings that are faster here than those by default."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import regard.masks as masks
from regard.attention import attend
from regard.engine.flash.measurements import Tuning, default_tuning, using
from regard.masks import Mask

Shape = tuple[int, int, int, int]  # batch, heads, length, width
Progress = Callable[[int, int, str], None]  # settings asked, settings in all, what is tried now
SHORT_SECONDS = 0.5
SETTLING_CALLS = 3
ROUNDS, COMPARE_SECONDS = 15, 0.6  # of a comparison; what comes first ends it, after three rounds
BETTER, NO_WORSE = 0.97, 1.02  # ratios of times: of all calls together, and of any one


@dataclass(frozen=True)
class Workload:
    """One call of attention to time; value has the shape of key."""

    query: Shape
    key: Shape
    mask: Mask | None = None
    backward: bool = False

    def lower(self, tuning: Tuning) -> tuple[Any, list[Any]]:
        """Lower `attend` under a tuning, with its VJP for a backward pass; return random arrays, too."""
        shapes = (self.query, self.key, self.key, *([self.query] if self.backward else []))
        rngs = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [jax.random.normal(rng, shape) for rng, shape in zip(rngs, shapes, strict=True)]
        with using(tuning):
            return lower_passes(lambda *call: attend(*call[:3], mask=call[3]), arrays, self.mask), arrays


@dataclass(frozen=True)
class Question:
    """A setting to ask about: calls that it decides, and where its values end."""

    setting: str
    workloads: tuple[Workload, ...]
    least: int
    most: int


@dataclass(frozen=True)
class Trial:
    """A value of a setting, and the time that calls took with it over that with the value before."""

    setting: str
    value: int
    before: int
    ratio: float
    kept: bool


@dataclass(frozen=True)
class Findings:
    """The settings that were found, and what they were chosen from."""

    tuning: Tuning
    trials: tuple[Trial, ...]
    ratios: tuple[float, ...]  # of calls that the tuning changes, measured once more, to those by default
    unasked: tuple[str, ...]  # settings for which no time was left

    @property
    def ratio(self) -> float:
        """The geometric mean of what the changed calls take over what they took; 1 where none changed."""
        return statistics.geometric_mean(self.ratios) if self.ratios else 1.0


def _square(mask: Mask | None, shape: Shape) -> tuple[Workload, Workload]:
    """Return self-attention, forward alone and with the backward pass."""
    return Workload(shape, shape, mask), Workload(shape, shape, mask, backward=True)


_CAUSAL, _WINDOW = masks.causal(), masks.causal() & masks.sliding_window(512)
_MASKED = (*_square(_CAUSAL, (1, 8, 2048, 64)), *_square(_WINDOW, (1, 2, 8192, 64)))
_FULL = _square(None, (1, 8, 2048, 64))
_SCORES = tuple(
    Workload(shape, shape, _CAUSAL)
    for shape in ((1, 8, 256, 64), (1, 4, 448, 64), (1, 8, 448, 64), (1, 8, 640, 64), (1, 8, 960, 64))
)
_PLAIN = tuple(_square(None, (8, 8, length, 64))[0] for length in (192, 320, 448))
_ROWS = tuple(Workload((1, 8, rows, 64), (1, 8, 32768, 64)) for rows in (3, 6, 12, 24))
# Those first that differ most from one kind of processor to the next.
QUESTIONS = (
    Question("full_side", _FULL, 128, 4096),
    Question("backward_cells", (_MASKED[1], _FULL[1]), 1 << 16, 1 << 29),
    Question("dense_scores", _SCORES, 1 << 16, 1 << 26),
    Question("dense_side", _PLAIN, 128, 1024),
    Question("dense_rows", _ROWS, 2, 64),
    Question("forward_cells", (_MASKED[0], _FULL[0]), 1 << 16, 1 << 29),
    Question("tile_side", _MASKED, 128, 4096),
)


def measure_tuning(questions: Sequence[Question], seconds: float, progress: Progress) -> Findings:
    """Halve and double one setting after the other, and keep what is faster, until the time is over.

    A value is kept where its calls together take less than 0.97 of the time and none more than 1.02. In the
    end all that changed is measured once more beside the defaults, which stay where it is not faster then.
    """
    begun, programs, default = time.monotonic(), _Programs(), default_tuning()
    chosen, trials, unasked = default, list[Trial](), list[str]()
    total = len(questions) + 1
    for number, question in enumerate(questions):
        if time.monotonic() - begun > seconds:
            unasked.append(question.setting)
            continue
        for halve in (True, False):
            while time.monotonic() - begun <= seconds:
                before = getattr(chosen, question.setting)
                value = before // 2 if halve else before * 2
                if not question.least <= value <= question.most:
                    break
                progress(number, total, f"{question.setting} of {value:,}, so far {before:,}")
                changed = dataclasses.replace(chosen, **{question.setting: value})
                ratios = programs.compare(question.workloads, changed, chosen)
                is_better = _is_better(ratios)
                if ratios:
                    ratio = statistics.geometric_mean(ratios)
                    trials.append(Trial(question.setting, value, before, ratio, is_better))
                if not is_better:
                    break
                chosen = changed
            if getattr(chosen, question.setting) != getattr(default, question.setting):
                break
    progress(total - 1, total, "all that changed beside the defaults")
    every = tuple(dict.fromkeys(workload for question in questions for workload in question.workloads))
    ratios = programs.compare(every, chosen, default) if chosen != default else []
    if not _is_better(ratios):
        chosen, ratios = default, []
    return Findings(chosen, tuple(trials), tuple(ratios), tuple(unasked))


def _is_better(ratios: Sequence[float]) -> bool:
    return bool(ratios) and statistics.geometric_mean(ratios) < BETTER and max(ratios) < NO_WORSE


class _Programs:
    """Programs that were compiled, by what they are."""

    def __init__(self) -> None:
        self.found: dict[tuple[Workload, Tuning], Callable[[], Any]] = {}
        self.compiled: dict[tuple[Workload, str], Callable[[], Any]] = {}

    def _compile(self, workload: Workload, tuning: Tuning) -> Callable[[], Any]:
        if (workload, tuning) not in self.found:
            lowered, arrays = workload.lower(tuning)
            key = workload, lowered.as_text()
            if key not in self.compiled:
                program = lowered.compile()
                self.compiled[key] = lambda: jax.block_until_ready(program(arrays, workload.mask))
            self.found[workload, tuning] = self.compiled[key]
        return self.found[workload, tuning]

    def compare(self, workloads: Sequence[Workload], changed: Tuning, before: Tuning) -> list[float]:
        """Return the ratio of times under two tunings of each call that they compile to two programs."""
        pairs = ([self._compile(workload, tuning) for tuning in (changed, before)] for workload in workloads)
        return [_ratio(*pair) for pair in pairs if pair[0] is not pair[1]]


def _ratio(first: Callable[[], Any], second: Callable[[], Any]) -> float:
    """Return the median of the first's seconds over the second's, round by round."""
    begun, ratios = time.monotonic(), list[float]()
    while len(ratios) < 3 or (len(ratios) < ROUNDS and time.monotonic() - begun < COMPARE_SECONDS):
        seconds = interleave({"first": first, "second": second}, 2, settle=not ratios)
        ratios += [own / theirs for own, theirs in zip(seconds["first"], seconds["second"], strict=True)]
    return statistics.median(ratios)


def lower_passes(attention: Callable[..., Any], arrays: Sequence[Any], extra: Any) -> Any:
    """Lower `attention(query, key, value, extra)`, with its VJP where a fourth array is the cotangent."""

    def run(arrays: Sequence[Any], extra: Any) -> tuple[Any, ...]:
        if len(arrays) == 3:
            return (attention(*arrays, extra),)
        output, vjp = jax.vjp(lambda *inputs: attention(*inputs, extra), *arrays[:3])
        return (output, *vjp(arrays[3]))

    return jax.jit(run).lower(arrays, extra)


def interleave(
    calls: Mapping[Any, Callable[[], Any]], rounds: int, *, settle: bool = False
) -> dict[Any, list[float]]:
    """Time every call once a round in rotating order, so that a busy moment hits all; return the seconds.

    What ran before leaves its own data in the caches, its threads spinning and its memory to be faulted in
    again: after a call that freed a gigabyte, the next two or three take up to twice as long. `settle` runs
    short calls a few times untimed first.
    """
    names = list(calls)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        order = names[first:] + names[:first]
        for name in order[:: -1 if turn % 2 else 1]:  # not always after the same one
            if settle and min(seconds[name], default=0.0) < SHORT_SECONDS:
                for _ in range(SETTLING_CALLS):
                    calls[name]()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds
