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


__all__ = ["compilation", "corpora", "figures", "inspection", "jax", "jnp", "masks", "models", "np"]
__all__ += ["optax", "token_files", "vocabularies"]

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from regard import inspection, masks, models
    from regard.inspection import figures
    from regard.training import compilation, corpora, token_files, vocabularies
else:
    jax, jnp, np = LazyModule("jax"), LazyModule("jax.numpy"), LazyModule("numpy")
    optax, masks, models = LazyModule("optax"), LazyModule("regard.masks"), LazyModule("regard.models")
    inspection, figures = LazyModule("regard.inspection"), LazyModule("regard.inspection.figures")
    compilation, corpora = LazyModule("regard.training.compilation"), LazyModule("regard.training.corpora")
    token_files = LazyModule("regard.training.token_files")
    vocabularies = LazyModule("regard.training.vocabularies")
