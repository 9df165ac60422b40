import dataclasses
import importlib.util
import sys
from typing import get_args

import jax
import pytest

from regard.layers.feed_forward import ACTIVATIONS


def load_unchecked():
    """The config's module without the type checks of conftest, which would answer before its own messages."""
    spec = importlib.util.find_spec("regard.models.config")
    spec = importlib.util.spec_from_file_location("unchecked_config", spec.origin)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


config_module = load_unchecked()
TransformerConfig = config_module.TransformerConfig
SIZES = {"d_model": 12, "num_heads": 6, "d_ff": 17, "num_layers": 2, "vocab_size": 19}


def test_defaults_are_pre_norm_with_biases_and_without_dropout():
    config = TransformerConfig(**SIZES)
    assert (config.positions, config.norm, config.activation) == ("sinusoidal", "pre", "gelu_tanh")
    assert config.attention_bias
    assert config.dropout_rate == config.attention_dropout_rate == 0.0
    assert config.head_width == 2
    assert dataclasses.replace(config, head_dim=5).head_width == 5


def test_a_config_is_a_value():
    config = TransformerConfig(**SIZES)
    assert config == TransformerConfig(**SIZES)
    assert hash(config) == hash(TransformerConfig(**SIZES))
    assert TransformerConfig(**dataclasses.asdict(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model: expected an integer of at least 1, got 0"),
        ({"d_ff": 2.5}, "d_ff: expected an integer of at least 1, got 2.5"),
        ({"num_layers": -1}, "num_layers: expected an integer of at least 0, got -1"),
        ({"num_layers": True}, "num_layers: expected an integer"),
        ({"max_length": 0}, "max_length: expected an integer of at least 1"),
        ({"num_heads": 5}, "num_heads: expected a divisor of d_model = 12, got 5"),
        ({"num_key_heads": 4}, "num_key_heads: expected a divisor of num_heads = 6, got 4"),
        ({"num_key_heads": 0}, "num_key_heads: expected an integer of at least 1"),
        ({"head_dim": 0}, "head_dim: expected an integer of at least 1"),
        (
            {"positions": "rotary", "rotary_width": 4},
            "rotary_width: expected at most the head width, 2; got 4",
        ),
        ({"vocab_size": None}, "vocab_size, input_width: expected exactly one"),
        ({"input_width": 3}, "vocab_size, input_width: expected exactly one"),
        ({"positions": "sinus"}, r"positions: expected one of .*\(nearest: sinusoidal\)"),
        ({"norm": "Pre"}, r"norm: expected one of pre, post, both; got 'Pre' \(nearest: pre\)"),
        ({"norm_kind": "batch"}, "norm_kind: expected one of layer, rms"),
        ({"activation": "gelu"}, "'gelu' has two meanings: choose gelu_tanh.*or gelu_erf"),
        ({"activation": "swilu"}, r"nearest: silu"),
        ({"remat": "dots"}, r"remat: expected one of full, .*; got 'dots' \(nearest: dots_saveable\)"),
        ({"remat": True}, "remat: expected one of full"),
        ({"num_experts": 0}, "num_experts: expected an integer of at least 1, got 0"),
        ({"num_experts": 3, "experts_per_token": 4}, "experts_per_token: expected at most num_experts = 3"),
        ({"dense_layers": (1,)}, r"dense_layers: expected a tuple of layers below 0 where there are experts"),
        ({"num_experts": 3, "dense_layers": (2,)}, r"dense_layers: .* below 2 .*, got \(2,\)"),
        ({"gate_limit": 7.0}, "gate_limit: expected None, or a number above 0 with gated=True"),
        ({"dropout_rate": 1.0}, r"dropout_rate: expected a rate in \[0, 1\), got 1.0"),
        ({"attention_dropout_rate": -0.1}, r"attention_dropout_rate: expected a rate in \[0, 1\)"),
        ({"norm_epsilon": True}, "norm_epsilon: expected a number above 0, got True"),
        ({"windows": (True,)}, r"windows: expected None or numbers of keys .*, got \(True,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SIZES, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": "no"}, "attention_bias: expected True or False.*; got 'no'"),
        ({"output_bias": 0}, "output_bias: expected True or False.*; got 0"),
        ({"sinks": None}, "sinks: expected True or False.*; got None"),
        (
            {"rotary_scaling": {"rope_type": "linear", "factor": 4.0}},
            r"rotary_scaling: expected Scaling or None, got dict; .* such as Linear\(4.0\)",
        ),
    ],
)
def test_what_is_of_another_kind_is_refused(change, message):
    with pytest.raises(TypeError, match=message):
        TransformerConfig(**{**SIZES, **change})


def test_policies_are_those_of_jax_by_name_or_as_functions():
    policy = jax.checkpoint_policies.save_only_these_names("a name")
    assert TransformerConfig(**SIZES, remat=policy).remat is policy
    names = {name for name in get_args(config_module.Remat) if name != "full"}
    assert all(callable(getattr(jax.checkpoint_policies, name)) for name in names)


def test_own_head_width_lifts_the_divisibility():
    config = TransformerConfig(**{**SIZES, "num_heads": 5, "head_dim": 7})
    assert config.head_width == 7


def test_activations_are_those_of_the_layers():
    assert set(get_args(config_module.Activation)) == set(ACTIVATIONS)
