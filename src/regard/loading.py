"""Loading on first use: packages whose names cost nothing until one is asked for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def remedy(extra: str) -> str:
    """Return the command that installs an extra, and its form in a checkout."""
    return f"pip install 'regard[{extra}]' (in a checkout: pip install '.[{extra}]')"


class MissingExtraError(ModuleNotFoundError):
    """A package is not installed that an extra brings."""


@contextmanager
def name_extra(module: str, extra: str | None = None) -> Iterator[None]:
    """Say what to install, an extra or the package, where one is missing that is imported in a block."""
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        missing = (error.name or "regard").partition(".")[0]
        if missing == "regard":
            raise
        command = f"pip install {missing}" if extra is None else remedy(extra)
        raise MissingExtraError(
            f"{module} needs {missing}, which is not installed: {command}", name=missing
        ) from error


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
        with name_extra(f"{package}.{name}", extra):
            value = import_module(f"{package}.{home_of.get(name, name)}")
        if name in home_of:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load_name, list_names
