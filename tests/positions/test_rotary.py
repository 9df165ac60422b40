"""Rotary positions against their definition in complex numbers, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusals import assert_refused
from regard import positions

BASE = 10_000.0


def truth(features, position, width=None, base=BASE, interleaved=False, scaling=None):
    """Pairs as complex numbers times e^(i angle)."""
    features = np.asarray(features, np.float64)
    width = features.shape[-1] if width is None else width
    rule = positions.Scaling() if scaling is None else scaling
    angle = np.asarray(position, np.float64)[..., None] * rule.frequencies(width, base)
    turn = rule.amplitude * np.exp(1j * angle)
    if turn.ndim == 3:
        turn = turn.reshape((turn.shape[0], *(1,) * (features.ndim - 3), *turn.shape[1:]))
    result = features.copy()
    half = width // 2
    first, second = slice(0, half), slice(half, width)
    if interleaved:
        first, second = slice(0, width, 2), slice(1, width, 2)
    turned = (features[..., first] + 1j * features[..., second]) * turn
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(3).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "width"), [((7, 10), None), ((3, 7, 10), 6), ((2, 3, 5, 7, 10), 6)])
def test_features_are_turned(shape, width, interleaved):
    features = draw(*shape)
    turned = positions.rotary(features, 11, width=width, interleaved=interleaved)
    assert turned.dtype == features.dtype
    expected = truth(features, np.arange(11, 18), width, interleaved=interleaved)
    np.testing.assert_allclose(turned, expected, rtol=1e-6, atol=2e-6)
    if width is not None:
        np.testing.assert_array_equal(turned[..., width:], features[..., width:])


def test_positions_may_be_per_row_and_per_batch():
    features, rng = draw(2, 3, 7, 10), np.random.default_rng(1)
    given = [rng.integers(-5000, 5000, shape) for shape in ((7,), (2, 7), (1, 7), (2, 3, 7), (2, 1, 7))]
    several = jax.jit(lambda given: [positions.rotary(features, position) for position in given])(given)
    for position, turned in zip(given, several, strict=True):
        np.testing.assert_allclose(turned, truth(features, position), rtol=1e-6, atol=3e-6)
    expected = positions.rotary(features)
    for position in (np.arange(7), list(range(7))):
        np.testing.assert_array_equal(positions.rotary(features, position), expected)


def test_any_position_is_exact():
    features, traced = draw(7, 10), jax.jit(positions.rotary)
    for start in (0, 31, 32, 1000, 1_000_000, 2**31 - 8, -3, -37, -(2**31) + 1):
        expected = truth(features, start + np.arange(7, dtype=np.int64))
        for turned in (positions.rotary(features, start), traced(features, np.int32(start))):
            np.testing.assert_allclose(turned, expected, rtol=0, atol=5e-6, err_msg=str(start))


def test_float64_is_float64(x64):
    features = draw(7, 10, dtype=np.float64)
    turned = positions.rotary(features, 1_000_000)
    assert turned.dtype == jnp.float64
    np.testing.assert_allclose(turned, truth(features, np.arange(1_000_000, 1_000_007)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_features_lose_one_rounding(dtype):
    features = draw(3, 7, 10, dtype=dtype)
    turned = positions.rotary(features, 1_000_000)
    assert turned.dtype == dtype
    expected = truth(features.astype(jnp.float32), np.arange(1_000_000, 1_000_007))
    error = np.abs(turned.astype(np.float32) - expected)
    assert (error <= float(jnp.finfo(dtype).eps) * np.abs(expected) + 1e-5).all()


def test_settings_as_a_value_are_those_of_the_call():
    features, scaling = draw(2, 3, 7, 10), positions.Linear(2.0)
    turn = positions.Rotary(base=500.0, width=6, interleaved=True, scaling=scaling)
    expected = truth(features, np.arange(5, 12), 6, 500.0, interleaved=True, scaling=scaling)
    np.testing.assert_allclose(turn(features, 5), expected, rtol=1e-6, atol=2e-6)


def test_no_rows_stay_no_rows():
    assert positions.rotary(np.zeros((2, 0, 4), np.float32), 5).shape == (2, 0, 4)


# Scalings.


def plain(width, base=BASE):
    return base ** (-np.arange(0, width, 2) / width)


def test_linear_and_dynamic_frequencies_are_their_formulas():
    np.testing.assert_allclose(positions.Linear(4.0).frequencies(16, BASE), plain(16) / 4, rtol=1e-15)
    same = positions.DynamicNTK(4.0, 2048, 1000).frequencies(16, BASE)
    np.testing.assert_allclose(same, plain(16), rtol=1e-15)
    longer = positions.DynamicNTK(4.0, 2048, 8192).frequencies(16, BASE)
    np.testing.assert_allclose(longer, plain(16, BASE * (4 * 8192 / 2048 - 3) ** (16 / 14)), rtol=1e-14)
    assert longer[0] == 1
    assert positions.DynamicNTK(4.0, 8, 64).frequencies(2, BASE) == [1.0]


def test_llama3_is_its_rule_feature_by_feature():
    """Llama 3.1's own numbers: width 128, base 500000, factor 8, 8192 tokens."""
    found, usual = positions.Llama3(8.0).frequencies(128, 500_000.0), plain(128, 500_000.0)
    share = np.clip(((8192 * usual / (2 * np.pi)) - 1) / (4 - 1), 0, 1)
    np.testing.assert_allclose(found, (1 - share) * usual / 8 + share * usual, rtol=1e-12)
    assert found[0] == usual[0]
    np.testing.assert_allclose(found[-1], usual[-1] / 8)
    assert ((share > 0) & (share < 1)).any()


@pytest.mark.parametrize(
    ("rule", "width", "base", "ends"),
    [
        # gpt-oss's numbers: feature i turns L base^(-2i/d) / 2 pi times: 32 times at i = 8.09, once at 17.40.
        (positions.YaRN(32.0, 4096, whole_features=True), 64, 150_000.0, (8, 18)),
        (positions.YaRN(32.0, 4096, whole_features=False), 64, 150_000.0, (8.0927791, 17.3980245)),
        # 64 tokens: the first feature turns 10.2 times and none 32 times; feature 8.06 turns once.
        (positions.YaRN(32.0, 64), 64, BASE, (0, 9)),
        # All features turn seldom, or all often.
        (positions.YaRN(4.0, 3), 6, 2.0, (-2, -1)),
        (positions.YaRN(4.0, 10**6), 6, 2.0, (3, 4)),
    ],
    ids=str,
)
def test_yarn_is_its_rule_feature_by_feature(rule, width, base, ends):
    usual = plain(width, base)
    seldom = np.clip((np.arange(width // 2) - ends[0]) / (ends[1] - ends[0]), 0, 1)
    expected = usual * (1 - seldom) + usual / rule.factor * seldom
    np.testing.assert_allclose(rule.frequencies(width, base), expected, rtol=2e-6)


def test_yarn_sharpens_scores():
    features, rule = draw(3, 7, 10), positions.YaRN(4.0, 16)
    turned = positions.rotary(features, 100, scaling=rule)
    expected = truth(features, np.arange(100, 107), scaling=rule)
    np.testing.assert_allclose(turned, expected, rtol=1e-5, atol=1e-5)
    norms = np.linalg.norm(turned, axis=-1) / np.linalg.norm(features, axis=-1)
    np.testing.assert_allclose(norms, 0.1 * np.log(4) + 1, rtol=1e-6)
    np.testing.assert_allclose(positions.YaRN(32.0, 4096).amplitude, 1.3465736, rtol=1e-7)
    assert positions.YaRN(32.0, 4096, sharpness=0.5).amplitude == 0.5


# Bad input.

X = np.ones((2, 7, 10), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: positions.rotary(X, width=5), "width: expected an even number in 2..10.*got 5"),
        (lambda: positions.rotary(X, width=12), "width: expected an even number in 2..10.*got 12"),
        (lambda: positions.rotary(X, width=0), "width: .*got 0"),
        (lambda: positions.rotary(X, interleaved="a"), "interleaved: expected True or False.*got 'a'"),
        (lambda: positions.Rotary(base=1.0), "base: expected more than 1, got 1.0"),
        (lambda: positions.YaRN(8.0, 5, whole_features="no"), "whole_features: expected True or .*'no'"),
        (lambda: positions.YaRN(8.0, 5, sharpness="1"), "sharpness: expected a number .*got '1'"),
        (lambda: positions.rotary(X[..., :5]), "width: .*got 5"),
        (lambda: positions.rotary(X, width="half"), "width: expected an even number in 2..10.*got 'half'"),
        (lambda: positions.rotary(X, width=4.0), "width: expected an even number in 2..10.*got 4.0"),
        (lambda: positions.rotary(X, base="1e4"), "base: expected a number known before tracing, got '1e4'"),
        (lambda: positions.Linear(None), "factor: expected a number known before tracing, got None"),
        (lambda: positions.YaRN(8.0, 5, "32"), "fast_turns: expected a number .*got '32'"),
        (lambda: positions.rotary(X, base=1.0), "base: expected more than 1, got 1.0"),
        (lambda: positions.rotary(X, 2**31 - 5), "position: .*below 2147483647.*up to 2147483649"),
        (lambda: positions.rotary(X, np.int64(2**31 - 5)), "position: .*up to 2147483649"),
        (lambda: positions.rotary(X, -(2**31) - 1), "position: .*got -2147483649"),
        (lambda: positions.sinusoidal_at(np.array([0, 2**40]), 4), "position: .*got 1099511627776"),
        (lambda: positions.rotary(X, np.arange(6)), r"position: .*\(7,\) or \(2, 7\), got \(6,\)"),
        (lambda: positions.rotary(X, np.zeros((3, 7), int)), r"position: .*got \(3, 7\)"),
        (lambda: positions.rotary(X[0], np.zeros((2, 7), int)), r"position: .*\(7,\), got \(2, 7\)"),
        (lambda: positions.rotary(X, 0.5), "position: expected integers, got float64"),
        (lambda: positions.rotary(X.astype(int)), "features: expected a floating-point array"),
        (lambda: positions.rotary(X[0, 0]), "features: expected a floating-point array"),
        (lambda: positions.rotary(X, scaling="yarn"), "scaling: .*Linear, DynamicNTK, Llama3, YaRN.*'yarn'"),
        (lambda: positions.Linear(0.5), "factor: expected at least 1, got 0.5"),
        (lambda: positions.YaRN(float("nan"), 64), "factor: expected at least 1, got nan"),
        (lambda: positions.DynamicNTK(2.0, 0, 5), "trained_length: expected at least 1, got 0"),
        (lambda: positions.Llama3(8.0, low_frequency=4.0), "low_frequency, high_frequency: .*4.0 and 4.0"),
        (lambda: positions.YaRN(8.0, 5, 1.0, 1.0), "slow_turns, fast_turns: .*1.0 and 1.0"),
    ],
)
def test_bad_input_is_explained(call, message):
    assert_refused((call, message), error=(ValueError, TypeError))
