"""A program: what a random call is made of, its text, and the programs that have one thing less."""

import re
from dataclasses import dataclass, field, replace

IMPORTS = """\
import jax, jax.numpy as jnp, numpy as np
from jax.numpy import where
from numpy import inf, nan
from regard import KVCache, PagedKVCache, attend, linear, masks, merge, parallel, readouts, scores
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
def pair(found): return found if isinstance(found, tuple) else (found, {})
"""
DEVICES = 'import os; os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"\n'
CALLS = {
    "attend": "    output, aux = pair(attend(query, key, value{options}))",
    "small tiles": "    output, aux = tiled.run(canonicalize(query, key, value{options}), {tiles})",
    "ring": "    output, aux = pair(parallel.ring_attend(query, key, value{options}{mesh}))",
    "merge": """\
    def part(first, last, **more):
        parted = (array[..., first:last, :] for array in (key, value))
        output, aux = attend(query, *parted{options}, key_offset=first, aux=("lse",), **more)
        return output, aux["lse"]
    output, lse = merge([part(0, {cut}{sinks}), part({cut}, {length})])
    aux = {{"lse": lse}}""",
    "cache": """\
    cache = {cache}.append(key[:, :, :{cut}], value[:, :, :{cut}], counts=starts)
    found = []
    for step in range(query.shape[2]):
        token = (starts + step)[:, None, None, None]
        cache = cache.append(jnp.take_along_axis(key, token, 2), jnp.take_along_axis(value, token, 2))
        found.append(pair(cache.attend(query[:, :, step : step + 1]{options})))
    output, aux = jax.tree.map(lambda *steps: jnp.concatenate(steps, 2), *found)""",
    "linear": """\
    output, state = linear.attend(query, key, value{options}, return_state=True)
    aux = {{name: one for name, one in vars(state).items() if one is not None}}""",
    "read": """\
    readout = readouts.read(query, key{options})
    output, aux = None, {{name: one for name, one in vars(readout).items() if hasattr(one, "shape")}}
    for name in ("top_keys", "trust"): aux.pop(name)""",
}
WRAPS = {
    "checkpoint": "one = jax.checkpoint(one)",
    "vmap": "one = jax.vmap(one, ({axes}, None))",
    "scan": """\
inner = one
def one(floats, ints):
    def step(count, lane): return count + 1, inner(floats | lane, ints)
    return jax.lax.scan(step, 0, {{name: floats[name] for name in {mapped}}})[1]""",
}
RUNS = {
    None: """\
    smooth, rest = one(floats, ints)
    return smooth | rest""",
    "vjp": """\
    smooth, pull, rest = jax.vjp(lambda floats: one(floats, ints), floats, has_aux=True)
    return smooth | rest | {f"d_{name}": grad for name, grad in pull(cotangents)[0].items()}""",
    "jvp": """\
    smooth, moved, rest = jax.jvp(lambda floats: one(floats, ints), (floats,), (tangents,), has_aux=True)
    return smooth | rest | {f"t_{name}": tangent for name, tangent in moved.items()}""",
    "hvp": """\
    def grad(floats): return jax.vjp(lambda floats: one(floats, ints), floats, has_aux=True)[1](cotangents)[0]
    return {f"h_{name}": one for name, one in jax.jvp(grad, (floats,), (tangents,))[1].items()}""",
}

DRAWN = "{{n: jnp.asarray(rng('{} ' + n).normal(size=x.shape), x.dtype) for n, x in {}.items()}}"
COTANGENTS = f"cotangents = {DRAWN.format('d', 'jax.eval_shape(one, lane, ints)[0]')}"
TANGENTS = f"tangents = {DRAWN.format('t', 'lane')}"


@dataclass
class Program:
    """One call, the texts of its parts. A mask is a text, or ("~", mask), ("&", mask, mask), ("|", ...)."""

    seed: int
    number: int
    family: str
    arrays: dict = field(default_factory=dict)
    dtypes: dict = field(default_factory=dict)  # of arrays that are differentiated
    changes: list = field(default_factory=list)  # statements that plant NaN, or remove keys by a bias
    mask: object = None
    score: list = field(default_factory=list)
    options: dict = field(default_factory=dict)  # of the call and of the definition
    extras: dict = field(default_factory=dict)  # of the call alone
    facts: dict = field(default_factory=dict)  # of the definition alone, which the call knows by itself
    setup: dict = field(default_factory=dict)  # what the text of the family needs
    prelude: list = field(default_factory=list)
    smooth: list = field(default_factory=lambda: ["output"])  # results that are differentiated
    traced: bool = False  # whether integers are arguments of what is compiled
    wrap: str | None = None
    mapped: tuple = ()  # arrays with a first axis of lanes, for wraps
    derivative: str | None = None
    jit: bool = True

    def spelled(self, **more):
        """Return the text of options that call and definition share, and more."""
        given = self.options | ({"score": f"[{', '.join(self.score)}]"} if self.score else {})
        masks = [one for one in (spell_mask(self.mask), more.pop("mask", None)) if one]
        return given | more | ({"mask": " & ".join(f"({one})" for one in masks)} if masks else {})

    def call(self):
        """Return the text of the call, and the names of the arrays in it."""
        given, setup = self.spelled(**self.extras), dict(self.setup)
        if self.family == "merge":
            given |= {"bias": setup["bias"]} if "bias" in given else {}
            setup["sinks"] = f", sinks={given.pop('sinks')}" if "sinks" in given else ""
        options = "".join(f", {name}={text}" for name, text in given.items())
        body = CALLS[self.family].format(options=options, **setup)
        return body, [name for name in self.arrays if re.search(rf"\b{name}\b", body)]

    def text(self):
        """Return the whole program."""
        body, names = self.call()
        floats = [name for name in names if name in self.dtypes]
        ints = [name for name in names if name not in self.dtypes and self.traced]
        axes = {name: 0 if name in self.mapped else None for name in floats}
        mapped = [name for name in floats if name in self.mapped]
        lines = ['jax.config.update("jax_enable_x64", True)'] * ("float64" in self.dtypes.values())
        seeds = f"[{self.seed}, {self.number}, *name.encode()]"
        lines += [f"def rng(name): return np.random.default_rng({seeds})"]
        lines += [f"{name} = {self.arrays[name]}" for name in names]
        lines += [change for change in self.changes if change.split("[")[0] in names] + self.prelude
        shown = (f"{name!r}: jnp.asarray({name}, '{self.dtypes[name]}')" for name in floats)
        lines += [f"floats = {{{', '.join(shown)}}}", f"ints = dict({', '.join(f'{n}={n}' for n in ints)})"]
        lines += [f"def call({', '.join(floats + ints)}):", body]
        lines += ['    results = aux if output is None else {"output": output, **aux}']
        lines += [f"    return {{name: results.pop(name) for name in {self.smooth}}}, results"]
        lines += ["def one(floats, ints): return call(**floats, **ints)"]
        lines += [WRAPS[self.wrap].format(axes=axes, mapped=mapped)] if self.wrap in WRAPS else []
        inner = mapped if self.wrap == "vmap of all" else []
        lines += [f"lane = floats | {{n: floats[n][0] for n in {inner}}}"] * (self.derivative is not None)
        lines += [COTANGENTS] * (self.derivative in ("vjp", "hvp"))
        lines += [TANGENTS] * (self.derivative in ("jvp", "hvp"))
        lines += ["def run(floats, ints):", RUNS[self.derivative]]
        lines += [f"run = jax.vmap(run, ({axes}, None))"] * (self.wrap == "vmap of all")
        lines += [f"found = {'jax.jit(run)' if self.jit else 'run'}(floats, ints)"]
        return DEVICES * (self.family == "ring") + IMPORTS + "\n".join(lines) + "\n"

    def simpler(self):
        """Yield programs with one thing less."""
        yield from (replace(self, derivative=None), replace(self, jit=True), replace(self, traced=False))
        yield replace(self, wrap=self.wrap if self.mapped else None)
        yield replace(self, smooth=self.smooth[:1], dtypes=dict.fromkeys(self.dtypes, "float32"))
        if self.family == "small tiles":
            yield replace(self, family="attend", extras=self.extras | {"backend": "'tiled'"})
        for mask in (None, *(self.mask[1:] if isinstance(self.mask, tuple) else ())):
            yield replace(self, mask=mask)
        for name in ("score", "changes"):
            every = getattr(self, name)
            yield from (replace(self, **{name: every[:n] + every[n + 1 :]}) for n in range(len(every)))
        for name in ("options", "extras"):
            every = getattr(self, name)
            for less in every.keys() - {"aux", "rng", "dropout_rate"}:
                yield replace(self, **{name: {one: text for one, text in every.items() if one != less}})


def spell_mask(mask):
    if not isinstance(mask, tuple):
        return mask
    *left, right = (f"({spell_mask(one)})" for one in mask[1:])
    return f"{' '.join(left)}{mask[0]}{right}"
