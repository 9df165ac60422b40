"""Modules imported on first use, for task files: the command line reads settings before it loads JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A stand-in that imports the module of this name when one of its attributes is first read."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import jax as jax
    import jax.numpy as jnp
    import numpy as np
    import optax as optax
    from flax import nnx as nnx

    from regard import inspection as inspection
    from regard import masks as masks
    from regard import models as models
    from regard.inspection import figures as figures
    from regard.training import compilation as compilation
    from regard.training import corpora as corpora
    from regard.training import token_files as token_files
    from regard.training import vocabularies as vocabularies
else:
    jax, jnp, np = LazyModule("jax"), LazyModule("jax.numpy"), LazyModule("numpy")
    optax, nnx = LazyModule("optax"), LazyModule("flax.nnx")
    inspection, figures = LazyModule("regard.inspection"), LazyModule("regard.inspection.figures")
    masks, models = LazyModule("regard.masks"), LazyModule("regard.models")
    compilation = LazyModule("regard.training.compilation")
    corpora, vocabularies = LazyModule("regard.training.corpora"), LazyModule("regard.training.vocabularies")
    token_files = LazyModule("regard.training.token_files")
