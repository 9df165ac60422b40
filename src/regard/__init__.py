"""Regard: attention for JAX. Names load on first use, so that `regard --help` answers at once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard import linear as linear
    from regard import masks as masks
    from regard import parallel as parallel
    from regard import planning as planning
    from regard import positions as positions
    from regard import readouts as readouts
    from regard import scores as scores
    from regard import theory as theory
    from regard.attention import attend as attend
    from regard.attention import explain as explain
    from regard.cache import KVCache as KVCache
    from regard.cache import PagedKVCache as PagedKVCache
    from regard.derivation import derive as derive
    from regard.theory.notation import explain_einsum as explain_einsum

__version__ = "0.1.0"

# Where each public name lives; a module's own name stands for the module.
_HOMES = {
    "KVCache": "regard.cache",
    "PagedKVCache": "regard.cache",
    "attend": "regard.attention",
    "derive": "regard.derivation",
    "explain": "regard.attention",
    "explain_einsum": "regard.theory.notation",
    "linear": "regard.linear",
    "masks": "regard.masks",
    "parallel": "regard.parallel",
    "planning": "regard.planning",
    "positions": "regard.positions",
    "readouts": "regard.readouts",
    "scores": "regard.scores",
    "theory": "regard.theory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    module = import_module(_HOMES[name])
    value = module if _HOMES[name] == f"regard.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
