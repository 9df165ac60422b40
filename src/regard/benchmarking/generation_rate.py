"""Writing with a model of ten million parameters in Llama's shape, beside Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from regard.benchmarking.measuring import interleave
from regard.benchmarking.peers import UnavailableError, demand_package
from regard.models import PRESETS, Decoder, TransformerConfig, generate

CONFIG = dataclasses.replace(
    PRESETS["llama-7b"].config,
    d_model=256,
    num_heads=8,
    num_key_heads=4,
    d_ff=1024,
    num_layers=8,
    vocab_size=8192,
    tied_output=True,
)
PROMPT = 16


def measure_generation_rate(
    rounds: int, *, max_tokens: int = 128, config: TransformerConfig = CONFIG
) -> dict[str, Any]:
    """Seconds of one greedy call for a single row, prompt included, compiling left out."""
    model = Decoder(config, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, config.vocab_size or 1, (1, PROMPT))
    calls: dict[str, Callable[[], Any]] = {
        "regard": lambda: jax.block_until_ready(generate(model, prompt, max_tokens=max_tokens).tokens)
    }
    absent = None
    try:
        calls["transformers"] = _build_transformers(config, prompt, max_tokens)
    except UnavailableError as error:
        absent = str(error)
    for call in calls.values():
        call()
    seconds = interleave(calls, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "median_seconds": medians,
        "tokens_per_second": {name: max_tokens / taken for name, taken in medians.items()},
        "gain": None if absent else medians["transformers"] / medians["regard"],
        "absent": absent,
    }


def _build_transformers(config: TransformerConfig, prompt: Any, max_tokens: int) -> Callable[[], Any]:
    """The same architecture with weights of its own, for as many tokens."""
    for package in ("torch", "transformers"):
        demand_package(package)
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.d_model,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_key_heads,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            vocab_size=config.vocab_size,
            tie_word_embeddings=True,
        )
    ).eval()
    tokens = torch.from_numpy(prompt)

    def run() -> Any:
        with torch.no_grad():
            return model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    return run


def describe_generation_rate(found: dict[str, Any]) -> Iterator[str]:
    """One line."""
    line = (
        f"writing with {found['parameters'] / 1e6:.1f} million parameters:"
        f" {found['tokens_per_second']['regard']:,.0f} tokens per second"
    )
    if found["gain"] is None:
        yield f"{line}; transformers: {found['absent']}"
    else:
        yield f"{line}, {found['gain']:.3g} times those of transformers"
