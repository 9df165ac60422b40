import dataclasses
import importlib.util
import sys
from typing import get_args

import jax
import numpy as np
import pytest

from regard.layers.feed_forward import ACTIVATIONS
from regard.positions import Linear, Rotary


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


def test_a_config_is_a_value():
    """Pre-norm, with biases and without dropout, unless told otherwise."""
    config = TransformerConfig(**SIZES)
    assert (config.positions, config.norm, config.activation) == ("sinusoidal", "pre", "gelu_tanh")
    assert config.attention_bias
    assert config.dropout_rate == config.attention_dropout_rate == 0.0
    assert (config.head_width, dataclasses.replace(config, head_dim=7).head_width) == (2, 7)
    assert config == TransformerConfig(**dataclasses.asdict(config))
    assert hash(config) == hash(TransformerConfig(**SIZES))


def test_layers_with_a_window_may_have_a_rotary_base_of_their_own():
    config = TransformerConfig(**{**SIZES, "num_layers": 3}, windows=(2, None), positions="rotary")
    config = dataclasses.replace(config, rotary_base=50.0, rotary_scaling=Linear(3.0))
    full = Rotary(50.0, scaling=Linear(3.0))
    assert [config.rotary(layer) for layer in range(3)] == [full] * 3
    config = dataclasses.replace(config, rotary_window_base=7.0)
    assert [config.rotary(layer) for layer in range(3)] == [Rotary(7.0), full, Rotary(7.0)]
    assert [config.window(layer) for layer in range(3)] == [2, None, 2]
    assert dataclasses.replace(config, positions="none").rotary(0) is None


def test_numbers_of_numpy_become_those_of_python():
    config = TransformerConfig(**{**SIZES, "d_ff": np.int64(SIZES["d_ff"]), "norm_epsilon": np.float32(0.5)})
    assert type(config.d_ff) is int
    assert config == TransformerConfig(**SIZES, norm_epsilon=0.5)


def test_what_does_not_fit_is_refused():
    for change, message in (
        ({"d_ff": 2.5}, "d_ff: expected an integer of at least 1, got 2.5"),
        ({"num_layers": -1}, "num_layers: expected an integer of at least 0, got -1"),
        ({"num_heads": 5}, "num_heads: expected a divisor of d_model = 12, got 5"),
        ({"num_key_heads": 4}, "num_key_heads: expected a divisor of num_heads = 6, got 4"),
        ({"positions": "rotary", "rotary_width": 4}, "rotary_width: expected at most the head width, 2; got"),
        ({"positions": "rotary", "head_dim": 7}, "'rotary' turns pairs of features, got a head width of 7"),
        ({"vocab_size": None}, "vocab_size, input_width: expected exactly one"),
        ({"class_token": True}, "class_token: expected real vectors"),
        ({"vocab_size": None, "input_width": 3, "num_token_types": 2}, "num_token_types: expected 0"),
        ({"norm": "Pre"}, r"norm: expected one of pre, post, both; got 'Pre' \(nearest: pre\)"),
        ({"activation": "gelu"}, "'gelu' has two meanings: choose gelu_tanh.*or gelu_erf"),
        ({"remat": "dots"}, r"remat: expected one of full, .*; got 'dots' \(nearest: dots_saveable\)"),
        ({"num_experts": 3, "experts_per_token": 4}, "experts_per_token: expected at most num_experts = 3"),
        ({"dense_layers": (1,)}, r"dense_layers: expected a tuple of layers below 0 where there are experts"),
        ({"num_experts": 3, "dense_layers": (2,)}, r"dense_layers: .* below 2 .*, got \(2,\)"),
        ({"gate_limit": 7.0}, "gate_limit: expected None, or a number above 0 with gated=True"),
        ({"dropout_rate": 1.0}, r"dropout_rate: expected a rate in \[0, 1\), got 1.0"),
        ({"norm_epsilon": True}, "norm_epsilon: expected a number above 0, got True"),
        ({"windows": ()}, r"windows: expected a tuple such as \(None,\)"),
        ({"windows": (-1,)}, "windows: expected None or numbers of keys"),
        ({"attention_bias": "no"}, "attention_bias: expected True or False.*; got 'no'"),
        ({"rotary_scaling": {"factor": 4.0}}, r"rotary_scaling: expected Scaling or None, got dict; .* such"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            TransformerConfig(**{**SIZES, **change})


def test_choices_are_those_of_jax_and_of_the_layers():
    policy = jax.checkpoint_policies.save_only_these_names("a name")
    assert TransformerConfig(**SIZES, remat=policy).remat is policy
    names = {name for name in get_args(config_module.Remat) if name != "full"}
    assert all(callable(getattr(jax.checkpoint_policies, name)) for name in names)
    assert set(get_args(config_module.Activation)) == set(ACTIVATIONS)
