"""Less work while testing: fewer cases in the quick run; and for JAX, contexts and lowerings are shared."""

import contextlib
import itertools
import zlib

import jax
import pytest
from jax._src import compiler, config, core
from jax._src.interpreters import mlir

# For a process of several devices that does not call `save_work`: such programs may wait for one another for
# ever when they come from a file (benchmarks/NOTES.md).
WITHOUT_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def mostly_slow(cases, *quick):
    """Cases of a test, by their names: all but `quick` are marked slow. Of several arguments, tuples."""
    cases = list(cases)
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow]
        )
        for case in cases
    ]


def take_one_in(count, items):
    """One case in so many: by its name, so that a new case changes nothing for the others."""
    return [item for item in items if zlib.crc32(item.nodeid.encode()) % count == 0]


@contextlib.contextmanager
def optimized():
    """Compile as users do: where computing takes longer than compiling, that is quicker."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


PROGRAMS = 50  # to a context; what it holds is freed with it
_make_context, _make_module = mlir.make_ir_context, mlir.ModuleContext.__init__
_make_key = compiler._get_cache_key
_programs, _shared = itertools.count(), {}


def save_work():
    """Let fifty programs share an MLIR context, and in it what simple primitives were lowered to.

    JAX makes both anew for every program. And keep the programs of one device, in whatever process. And say
    of a tracer without its history that it has no sharding: Flax asks for every random number of a model.
    """
    jax.config.update("jax_enable_compilation_cache", True)
    mlir.make_ir_context = _share_context
    mlir.ModuleContext.__init__ = _share_rules
    compiler._get_cache_key = _name_program
    core.Tracer.sharding = property(_refuse_sharding)


def _name_program(*arguments, devices, **options):
    return _make_key(*arguments, devices=devices, **options) if devices.size == 1 else None


def _refuse_sharding(tracer):
    raise AttributeError("a tracer has no sharding")


def _share_context():
    if mlir.ir.Context.current is not None:
        return _make_context()  # a program that is made while another one is must not become a part of it
    if next(_programs) % PROGRAMS == 0:
        _shared.clear()
        _shared["context"] = _make_context()
    return _shared["context"]


def _share_rules(self, *arguments, **options):
    _make_module(self, *arguments, **options)
    # Rules for several devices may name functions of the program that they were made for.
    alone = getattr(self.axis_context, "num_devices", 0) == 1
    if alone and self.context is _shared.get("context") and type(self.lowering_cache) is dict:
        # Whatever a rule may look at besides its operands is in the key.
        place = (self.axis_context, config.trace_context(), self.lowering_parameters)
        self.lowering_cache = _Rules(_shared.setdefault(place, {}))


class _Rules(dict):
    """What primitives were lowered to in one program, and what it may take from others."""

    def __init__(self, others):
        self.others = others

    def __setitem__(self, key, entry):
        super().__setitem__(key, entry)
        if entry.inline and not entry.const_args and not key.effects and _is_closed(entry.func):
            self.others[key] = entry

    def get(self, key, default=None):
        return super().get(key) or self.others.get(key, default)


def _is_closed(op):
    """Whether nothing in it names what stands elsewhere in its program."""
    return all(
        inner.operation.name.startswith(("stablehlo.", "chlo.", "func.return")) and _is_closed(inner)
        for region in op.regions
        for block in region
        for inner in block.operations
    )
