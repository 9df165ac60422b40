"""Records: frozen dataclasses as pytrees whose structures know their classes. Start from `record`."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import jax
from jax import export
from jax.tree_util import GetAttrKey

C = TypeVar("C", bound=type)


def static() -> Any:
    """Return a dataclass field that is part of the tree structure, not a leaf."""
    return dataclasses.field(metadata={"static": True})


def derived(static: bool = False) -> Any:
    """Return a dataclass field that a record's `maker` computes from the others: files do without it."""
    return dataclasses.field(metadata={"derived": True, "static": static})


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(static, derived, dataclasses.field)
)
def record(cls: C) -> C:
    """Make a class a frozen dataclass and a pytree; `static` fields go to the tree structure.

    `jax.tree_util.register_dataclass` makes structures that compare equal whatever their class (jax 0.10 and
    0.12), if their fields do. Where one of several classes may stand, as masks do in a call, `jax.jit` then
    now and then runs the program of another class. Nodes registered as here compare classes, too.
    """
    made: Any = dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(made)
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    rest = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(tree, name) for name in leaves), tuple(getattr(tree, name) for name in rest)

    def flatten_with_keys(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, aux = flatten(tree)
        return tuple(zip(map(GetAttrKey, leaves), children, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], children: Any) -> Any:
        # Not through __init__: inside tree functions anything may stand for a leaf.
        tree = object.__new__(made)
        for name, value in (*zip(leaves, children, strict=True), *zip(rest, aux, strict=True)):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return exportable(made)


def exportable(cls: C) -> C:
    """Let exported programs that take or return a pytree be serialized, if JSON holds its static fields."""

    def refuse(value: Any) -> Any:
        raise TypeError(
            f"{cls.__name__}: expected what JSON holds in a program that is serialized, got {value!r}; make"
            " it within the program"
        )

    with contextlib.suppress(ValueError):  # a class that is defined once more, as in a notebook
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=lambda aux: json.dumps(aux, default=refuse).encode(),
            deserialize_auxdata=lambda text: _freeze(json.loads(text)),
        )
    return cls


def _freeze(value: Any) -> Any:
    """Return what JSON holds with tuples in place of lists."""
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def delegate(field: str, *names: str) -> Callable[[C], C]:
    """Let what a field holds answer for these attributes of a class."""

    def add(cls: C) -> C:
        for name in names:
            setattr(cls, name, property(lambda self, name=name: getattr(getattr(self, field), name)))
        return cls

    return add


def record_classes(base: type) -> Iterator[type]:
    """Yield the dataclasses among a class and those derived from it, in the order of their definition."""
    if "__dataclass_fields__" in vars(base):
        yield base
    for derived in base.__subclasses__():
        yield from record_classes(derived)
