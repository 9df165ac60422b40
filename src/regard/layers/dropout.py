"""Dropout with a checked rate and no random state at rate 0."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from regard.engine.call.canonicalization import check_rate

STREAM = "dropout"


def build_dropout(rate: float, rngs: nnx.Rngs | None) -> nnx.Dropout:
    """Build an `nnx.Dropout` with a random stream of its own, or with none where nothing can drop."""
    rate = check_rate("dropout_rate", rate)
    has_stream = rngs is not None and (STREAM in rngs or "default" in rngs)
    return nnx.Dropout(rate, rngs=rngs if rate > 0.0 and has_stream else None)


def draw_dropout(
    dropout: nnx.Dropout, deterministic: Any, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None
) -> tuple[float, jax.Array | None]:
    """Return the rate and the random key of one `attend` call, by the rules of `nnx.Dropout`."""
    off = dropout.deterministic if deterministic is None else deterministic
    if not isinstance(off, bool | np.bool_):
        raise TypeError(
            f"deterministic: expected True, False or None, got {type(off).__name__}; under jit make it static"
            " (static_argnames) or set the mode beforehand with layer.train() or layer.eval()"
        )
    if dropout.rate == 0.0 or off:
        return 0.0, None
    source: Any = dropout.rngs if rngs is None else rngs
    if isinstance(source, nnx.Rngs) and (STREAM in source or "default" in source):
        return dropout.rate, source[STREAM]()
    if isinstance(source, nnx.RngStream):
        return dropout.rate, source()
    if isinstance(source, jax.Array):
        return dropout.rate, source
    raise ValueError(
        f"rngs: dropout is on and needs a random stream '{STREAM}', got {type(source).__name__}; build the"
        " layer with nnx.Rngs(seed), pass rngs=, or switch dropout off with eval() or deterministic=True"
    )
