"""What tests of `parallel` run in a process of their own, which has eight devices; not a test by itself."""

import contextlib
import faulthandler
import functools
import io
import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from regard import attend, parallel

AUTO = jax.sharding.AxisType.Auto
# For a process of several devices: such programs may wait for one another for ever when they come from a
# file (benchmarks/NOTES.md).
WITHOUT_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def pretend(devices):
    """The environment of a process that sees so many CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # With whole tracebacks, XLA of jax 0.10 may compile for ever (benchmarks/NOTES.md).
    brief = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1"}
    return os.environ | WITHOUT_CACHE | brief | {"XLA_FLAGS": flags, "PYTHONPATH": paths}


class EightDevices:
    """A process with eight devices, which runs code for the tests of one worker until they end."""

    def __init__(self):
        command = [sys.executable, "-c", "import mesh_cases; mesh_cases.serve()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=pretend(8), **pipes)

    def run(self, code):
        """What the code prints; a failure there is a failure here."""
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process with eight devices ended with exit code {self.process.wait()}"
        printed, failure = json.loads(answer)
        assert failure is None, failure
        return printed


_started = []


def on_eight_devices(code):
    """Run code after all of this module and `masks`, with eight devices; what it prints."""
    if not _started or _started[-1].process.poll() is not None:
        _started.append(EightDevices())  # it ends when this process does, which holds its input
    return _started[-1].run(f"from mesh_cases import *\nfrom regard import masks\n{code}")


def serve():
    """Run each line of code that comes, in names of its own; answer with what it printed or how it failed."""
    make_strict()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        failure = None
        faulthandler.dump_traceback_later(600, exit=True)  # what waits for ever fails, and says where
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                exec(json.loads(line), {"__name__": "__main__"})
            except Exception:
                failure = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([printed.getvalue(), failure]), file=answers, flush=True)


def make_strict():
    """As conftest does."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.simplefilter("error")


def make_mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AUTO,) * len(axes))


def draw(*shapes, dtype=jnp.float32, seed=11):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype), dtype) for shape in shapes]


# Ways to run a call: the function, and what it is given besides.


def both_in_zigzag(query, key, value, **options):
    """Tokens put in zig-zag order and back, so that the result is comparable."""
    arrays = (parallel.to_zigzag(array, 4) for array in (query, key, value))
    return parallel.from_zigzag(parallel.all_to_all_attend(*arrays, layout="zigzag", **options), 4)


RING, BOTH = {"axis": "seq"}, {"axis": "heads", "ring_axis": "seq"}
SHARDS = {"axis": "seq", "batch_axis": "data", "head_axis": "model"}
WAYS = {
    "ring": (parallel.ring_attend, {"seq": 8}, RING),
    "balanced": (parallel.ring_attend, {"seq": 8}, RING | {"layout": "balanced"}),
    "all to all": (parallel.all_to_all_attend, {"seq": 2}, RING),
    "both": (parallel.all_to_all_attend, {"seq": 4, "heads": 2}, BOTH),
    "both zigzag": (both_in_zigzag, {"seq": 4, "heads": 2}, BOTH),
    "both balanced": (parallel.all_to_all_attend, {"seq": 4, "heads": 2}, BOTH | {"layout": "balanced"}),
    "ring of shards": (parallel.ring_attend, {"data": 2, "seq": 2, "model": 2}, SHARDS),
    "apart": (parallel.ring_attend, {"data": 2, "seq": 1, "model": 4}, SHARDS),
}


def run(way, *arrays, **options):
    """Attend in one of the ways."""
    function, axes, more = WAYS[way]
    return function(*arrays, mesh=make_mesh(**axes), **more, **options)


def evaluate(call, arrays, cotangent):
    """Output and gradients of sum(output * cotangent), compiled."""

    def loss(*arrays):
        output = call(*arrays)
        return jnp.sum(output.astype(cotangent.dtype) * cotangent), output

    grads, output = jax.jit(jax.grad(loss, tuple(range(len(arrays))), has_aux=True))(*arrays)
    return output, *grads


def check_against_definition(way, shapes, mask, **options):
    """Value and gradients as exact as a plain evaluation of the definition, in float64 the truth."""
    (*leading, T, _), (*_, S, width) = shapes[0], shapes[2]
    arrays, (cotangent,) = draw(*shapes), draw((*leading, T, width), seed=5)
    where = {name: options[name] for name in options if name.endswith(("_offset", "_positions"))}
    where = where or {"query_offset": 0}
    keep = np.asarray(mask.number_leading(tuple(leading)).dense(T, S, leading_axes=len(leading), **where))
    define = functools.partial(oracle.batched, *arrays, keep=keep, cotangent=cotangent)
    truth, same = define(), define(dtype="float32")
    found = evaluate(functools.partial(run, way, mask=mask, **options), arrays, cotangent)
    magnitudes = 0.0, np.max(same.d_query_terms), np.max(same.d_key_terms), 0.0
    for part, array, magnitude in zip(oracle.PARTS, found, magnitudes, strict=True):
        assert array.dtype == jnp.float32
        exact, rounded = (getattr(each, part) for each in (truth, same))
        oracle.assert_as_exact(array, exact, rounded, f"{way} {part}", magnitude)


def check_against_one_device(way, arrays, options, rtol=2e-5, atol=5e-6):
    """The same numbers as `attend` on one device, with gradients of everything in `arrays`."""
    (cotangent,) = draw((*arrays[0].shape[:-1], arrays[2].shape[-1]), seed=5)

    def call(function):
        return lambda *arrays: function(*arrays[:3], **options(*arrays[3:]))

    found = evaluate(call(functools.partial(run, way)), arrays, cotangent)
    expected = evaluate(call(functools.partial(attend, backend="dense")), arrays, cotangent)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=f"{way}, result {place}")
    return found
