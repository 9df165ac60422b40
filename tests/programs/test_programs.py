"""Random programs, and faults that the comparison has to see."""

import jax
import jax.numpy as jnp
import pytest

from checking import examine
from fuzz import run_all
from generator import generate
from program import Program
from regard import attend, masks

SEED = 6464706  # always the same here, for MUTANTS.md; `make fuzz` and `.ci/run` draw others


@pytest.mark.parametrize("number", [*range(12, 30), 616, 783, 2009, 6281])  # scales of 0 or less
def test_a_random_program_is_right(number):
    ((_, _, outcome, _),) = run_all(SEED, [number])
    again = f"make fuzz SEED={SEED} FUZZ='--only {number}'"
    assert outcome.kind in ("right", "refused"), f"{again}\n{outcome.words}"


def test_a_program_is_the_same_wherever_it_runs():
    assert generate(3, 5) == generate(3, 5) != generate(3, 6)


def with_options(**more):
    return lambda *arrays, **options: attend(*arrays, **options | more)


def forget_a_key(query, key, value, **options):
    return attend(query, key, value, **options | {"mask": options["mask"] & masks.prefix(130)})


def drop_a_gradient(query, key, value, **options):
    return attend(query, key.at[..., 5, :].set(jax.lax.stop_gradient(key[..., 5, :])), value, **options)


def hide_nan(*arrays, **options):
    output, aux = attend(*arrays, **options)
    return jnp.nan_to_num(output), aux


def let_nan_through(query, key, value, **options):
    output, aux = attend(query, key, value, **options)
    return output + 0 * value.sum(-2, keepdims=True), aux


MASK = ("&", "masks.causal()", "masks.prefix(130)")
FAULTS = {
    "the mask is off by one": (with_options(query_offset=1), {}),
    "one of 131 keys is forgotten": (forget_a_key, {}),
    "one of 131 keys is forgotten, in bfloat16": (forget_a_key, {"dtypes": "bfloat16"}),
    "a key has no gradient": (drop_a_gradient, {}),
    "NaN becomes 0": (hide_nan, {"changes": ["query[0, 3] = nan"], "derivative": None}),
    "NaN behind a mask comes through": (let_nan_through, {"changes": ["value[:, 130] = nan"], "mask": MASK}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(fault, monkeypatch):
    faulty, more = FAULTS[fault]
    arrays = {name: f"rng('{name}').normal(size=(2, 131, 8))" for name in ("query", "key", "value")}
    parts = {"mask": "masks.causal()", "extras": {"aux": "('lse',)"}, "derivative": "vjp", **more}
    parts["dtypes"] = dict.fromkeys(arrays, parts.get("dtypes", "float32"))
    program = Program(0, 0, "attend", arrays, **parts)
    assert examine(program).kind == "right"
    monkeypatch.setattr("regard.attend", faulty)
    outcome = examine(program)
    assert outcome.kind == "wrong"
    assert "expected" in outcome.words.splitlines()[-1]
