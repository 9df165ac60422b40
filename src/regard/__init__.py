"""Attention for JAX: exact, linear in memory, safe at the edges, with layers, models and figures around it.

Start from `attend`, which computes attention, `masks`, which say who may attend to whom, and `explain`, which
says what a call would do:

    from regard import attend, masks
    output = attend(query, key, value, mask=masks.causal() & masks.sliding_window(256))

- `merge`: attention over parts of the keys, merged into attention over all of them
- `masks`, `scores`, `positions`: who may attend to whom, changes of the scores, rotary turns and tables
- `KVCache`, `PagedKVCache`: keys and values while decoding
- `linear`: linear attention, with a state of fixed size
- `readouts`, `inspection`: statistics and exact windows of the weights; traces, figures, the explorer's page
- `derive`, `explain_einsum`, `theory`: attention step by step, in index notation, and as it is defined
- `parallel`, `planning`: one sequence over many devices, and which mesh is best
- `conformance`: what any function of attention promises, checked against its definition
- `layers`, `models`, `training`: Flax NNX modules, whole Transformers, a loop that resumes
- `interop`: the calls and files of jax.nn, Flax, PyTorch, ONNX and Hugging Face

Names load on first use. Layers, models, training and figures need extras: `pip install 'regard[all]'`,
in a checkout `pip install '.[all]'`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard import (
        cache,
        conformance,
        derivation,
        inspection,
        interop,
        layers,
        linear,
        masks,
        models,
        parallel,
        planning,
        positions,
        readouts,
        scores,
        theory,
        training,
    )
    from regard.attention import CHECKPOINT_NAMES, attend, explain, merge
    from regard.cache import KVCache, PagedKVCache
    from regard.derivation import derive
    from regard.theory import explain_einsum

__version__ = "0.1.0"

__all__ = ["CHECKPOINT_NAMES", "KVCache", "PagedKVCache"]
__all__ += ["attend", "derive", "explain", "explain_einsum", "merge"]
__all__ += ["cache", "conformance", "derivation", "inspection", "interop", "layers", "linear", "masks"]
__all__ += ["models", "parallel", "planning", "positions", "readouts", "scores", "theory", "training"]

__getattr__, __dir__ = defer(
    __name__,
    "all",
    __all__,
    attention="CHECKPOINT_NAMES attend explain merge",
    cache="KVCache PagedKVCache",
    derivation="derive",
    theory="explain_einsum",
)
