"""A program is run, and every number that it returns is compared with the definition's."""

import re
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np

import definition
from definition import Expected, step

# An error may be so many times that of the plain evaluation in the same dtype, and so many roundings of
# the size of the terms, as of few numbers the plain evaluation may round none: in float32 a millionth, where
# one of 131 keys is nearly a hundredth. The plain evaluation for float64 is in float32, at its roundings.
# Products of bfloat16 are rounded in another order, so that errors of sums are others altogether.
FACTOR, NARROW_FACTOR, FLOOR = 4, 8, 32
WORLD = vars(definition) | {"inf": np.inf, "where": np.where, "linear": SimpleNamespace(State=lambda *x: x)}
HEADS = {"linear": "Recurrence(query, key, value", "read": "read(query, key"}


@dataclass
class Outcome:
    """What became of a program: right, wrong, refused or broken, and a text that shows it."""

    kind: str
    words: str = ""


def examine(program):
    """Run a program, and compare what it returns."""
    text, space, before = program.text(), {}, jax.config.read("jax_enable_x64")
    with jax.enable_x64("float64" in program.dtypes.values()), np.errstate(all="ignore"):
        try:
            exec(text, space)
            truth = Truth(program, space)
            for name, got in space["found"].items():
                if words := truth.compare(name, np.asarray(got)):
                    return Outcome("wrong", f"{text}print(found[{name!r}]{words}")
        except NotImplementedError as error:
            return Outcome("refused", str(error))
        except Exception:
            return Outcome("broken", f"{text}\n{traceback.format_exc(limit=-4)}")
        finally:
            jax.config.update("jax_enable_x64", before)  # which a text sets for good
    return Outcome("right")


class Truth:
    """What a program should return, by the definition, in float64 and in float32."""

    def __init__(self, program, space):
        self.program, self.space = program, space
        self.floats = {name: np.asarray(array) for name, array in space["floats"].items()}
        main = {self.floats[name].dtype for name in ("query", "key", "value") if name in self.floats}
        self.epsilon = np.finfo(np.float64 if np.dtype(np.float64) in main else np.float32).eps
        self.narrow = main == {np.dtype(ml_dtypes.bfloat16)} and not program.setup.get("int8")
        self.own = self.floats["query"].dtype
        if program.setup.get("int8"):
            self.floats |= {name: quantize(self.floats[name]) for name in ("key", "value")}
        self.mapped = self.floats.keys() & set(program.mapped)
        self.lanes = range(2) if self.mapped else [...]
        self.outer = bool(self.mapped) and program.wrap != "vmap of all"  # whether lanes share gradients
        self.exact, self.plain = self._join(np.float64), self._join(np.float32)

    def _drawn(self, name):
        return {n: np.asarray(array).astype(float) for n, array in self.space[name].items()}

    def _call(self, lane, dtype, moves=None):
        """Return the results of one lane, the definition of the call, and the world that it lies in."""
        world = WORLD | {name: one for name, one in self.space.items() if name in self.program.arrays}
        world |= {"own": self.own, "survivors": self.space.get("survivors")}
        for name, array in self.floats.items():
            array = array.astype(dtype) + (0 if moves is None else moves[name])
            world[name] = array[lane] if name in self.mapped else array
        given = self.program.spelled(**self.program.facts)
        if dtype == np.float32 and self.program.family != "linear":
            given |= {"narrow": str(self.narrow), "own": "own"}
        options = "".join(f", {name}={text}" for name, text in given.items())
        call = eval(f"{HEADS.get(self.program.family, 'Attention(query, key, value')}{options})", world)
        found = call if isinstance(call, dict) else call.results()
        for name in {"weights", "scores"} & found.keys():
            value, free = np.broadcast_arrays(found[name].value, found[name].free)
            chosen = self._chosen(value.shape)
            found[name] = Expected(value[chosen], free[chosen])
        return found, call, world

    def _chosen(self, shape):
        """Return the index of the rows and heads that are asked for."""
        places = [np.arange(size) for size in shape]
        for axis, name in ((-2, "rows"), (-3, "heads")):
            if name in self.program.extras:
                places[axis] = np.array(eval(self.program.extras[name]))
        return np.ix_(*places)

    def _join(self, dtype):
        """Return the results of all lanes."""
        lanes = [self._results(lane, dtype) for lane in self.lanes]
        if not self.mapped:
            return lanes[0]
        joined = {}
        for name, first in lanes[0].items():
            values = np.stack([lane[name].value for lane in lanes])
            free = np.stack([np.broadcast_to(lane[name].free, first.value.shape) for lane in lanes])
            if self.outer and name[:2] in ("d_", "h_") and name[2:] not in self.mapped:
                values, free = values.sum(0), free.any(0)
            joined[name] = Expected(values, free, max(lane[name].size for lane in lanes))
        return joined

    def _results(self, lane, dtype):
        kind, (found, *call) = self.program.derivative, self._call(lane, dtype)
        if kind == "vjp":
            found |= {f"d_{name}": one for name, one in self._vjp(lane, *call).items()}
        if kind == "jvp":
            small = step(np.zeros(0, dtype))
            complex_type = np.result_type(dtype, np.complex64)
            moves = {n: np.asarray(small * one, complex_type) for n, one in self._drawn("tangents").items()}
            moved = self._call(lane, dtype, moves)[0]
            for name in self.program.smooth:
                tangent = np.nan_to_num(moved[name].value.imag / abs(small), posinf=0, neginf=0)
                found[f"t_{name}"] = Expected(tangent)
        if kind == "hvp":
            drawn = self._drawn("tangents").items()
            moves = ({n: size * one for n, one in drawn} for size in (1e-5, -1e-5, 0))
            ahead, behind, still = (self._vjp(lane, *self._call(lane, np.float64, one)[1:]) for one in moves)
            for name, one in ahead.items():
                # Where terms are 0, as with a scale of 0, they are as large as they grow.
                size = max(8 * one.size, abs(one.size - still[name].size) / 1e-5)
                found[f"h_{name}"] = Expected((one.value - behind[name].value) / 2e-5, one.free, size)
        return found

    def _vjp(self, lane, call, world):
        cotangents = self._drawn("cotangents")
        for name, one in cotangents.items():
            cotangents[name] = one[lane] if self.outer else one
            if name in ("weights", "scores"):
                whole = np.zeros(call.weights.shape)
                whole[self._chosen(whole.shape)] = cotangents[name]
                cotangents[name] = whole
        score = self.program.spelled().get("score", "[]")
        named = set(re.findall(r"\w+", score)) & self.floats.keys() - {"metric", "query", "key"}
        remake = lambda bumped: eval(score, world | bumped)
        return call.vjp(cotangents, {name: world[name] for name in named}, remake)

    def compare(self, name, got):
        """Return words for the first wrong number, or None."""
        exact, epsilon = self.exact[name], self.epsilon
        want = np.asarray(exact.value, float)
        own = 0.0 if got.dtype.kind in "iub" else ml_dtypes.finfo(got.dtype).eps
        if got.shape != want.shape:
            return f".shape)  # expected {want.shape}, got {got.shape}"
        got, checked = got.astype(float), ~np.broadcast_to(exact.free, want.shape)
        finite = np.isfinite(want) & checked
        size = max(np.nan_to_num(exact.size), abs(want[finite]).max(initial=0))  # NaN says nothing of others
        missed = np.nan_to_num(abs(self.plain[name].value - want)[finite], posinf=0).max(initial=0)
        factor = (NARROW_FACTOR if self.narrow else FACTOR) * epsilon / np.finfo(np.float32).eps
        allowed = factor * missed + FLOOR * epsilon * size
        # Results are rounded to their dtype; what is merged, or a sum of gradients, was before, when larger.
        derivative, family = name[1] == "_", self.program.family
        own = max(own, ml_dtypes.finfo(self.own).eps) if family == "merge" else own
        apart = {"weights", "scores", "max_score"} & {*self.program.smooth}  # with gradients of their own
        summed = family == "merge" or (derivative and (self.mapped or family == "cache" or apart))
        if derivative and family == "cache":  # of each step, and of each sum of two
            own *= self.floats["query"].shape[-2]
        allowed = np.broadcast_to(allowed + own * (size if summed else abs(want)), want.shape)
        if derivative and self.narrow:  # a row's mean is that of the output, of weights that were rounded
            allowed = allowed + 2.0**-9 * size
        same = np.where(finite, abs(got - want) <= allowed, (got == want) | (np.isnan(got) & np.isnan(want)))
        wrong = np.argwhere(checked & ~same)
        if not wrong.size:
            return None
        place = tuple(wrong[0].tolist())
        most = np.nanmax(abs(got - want)[finite], initial=0)
        numbers = f"expected {want[place]:.9g}, got {got[place]:.9g}, allowed {allowed[place]:.3g}"
        return f"{list(place)})  # {numbers}; {len(wrong)} of {want.size} wrong, by {most:.3g} at most"


def quantize(tokens):
    """Round to int8 with a scale per token, as caches do."""
    tokens = tokens.astype(np.float32)
    scale = abs(tokens).max(-1, keepdims=True) * np.float32(1 / 127)
    return np.round(tokens * (1 / np.where(scale > 0, scale, 1))) * scale


def shrink(program, outcome):
    """Leave out one thing after another while the same goes wrong."""
    last = lambda one: one.words.splitlines()[-1][:40] if one.kind == "broken" else one.kind
    for simpler in program.simpler():
        if simpler != program and last(seen := examine(simpler)) == last(outcome):
            return shrink(simpler, seen)
    return program, outcome
