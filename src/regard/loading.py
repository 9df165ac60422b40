"""Loading on first use: packages whose names cost nothing until one is asked for."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def remedy(extra: str) -> str:
    """Return the command that installs an extra, and its form in a checkout."""
    return f"pip install 'regard[{extra}]' (in a checkout: pip install '.[{extra}]')"


def defer(
    package: str, extra: str, names: Sequence[str], /, **homes: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package whose names load on first use.

    `extra` brings what its modules import, `names` is its `__all__`. Each keyword is a module, with the names
    that it holds, separated by spaces; other names are modules themselves.
    """
    home_of = {name: home for home, held in homes.items() for name in held.split()}

    def load_name(name: str) -> Any:
        if name not in names:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(names))}"
            )
        try:
            value = import_module(f"{package}.{home_of.get(name, name)}")
        except ModuleNotFoundError as error:
            missing = (error.name or "regard").partition(".")[0]
            if missing == "regard":
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {missing}, which is not installed: {remedy(extra)}",
                name=missing,
            ) from error
        if name in home_of:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load_name, list_names
