"""Which tokens sit at the queries and at the keys of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.engine.call.problem import Problem
from regard.inspection.tokens import Tokens, read_tokens


@dataclass(frozen=True)
class Sequences:
    """The tokens that a caller gave, to be found again for each call."""

    every: Tokens | None  # for all calls that it fits
    by_length: Mapping[int, Tokens]
    by_name: Mapping[str, Tokens]

    @classmethod
    def read(cls, tokens: Any) -> Sequences:
        """What was passed as `tokens`."""
        if not isinstance(tokens, Mapping):
            return cls(None if tokens is None else read_tokens("tokens", tokens), {}, {})
        by_length, by_name = {}, {}
        for name, given in tokens.items():
            one = read_tokens(f"tokens[{name!r}]", given)
            if isinstance(name, str):
                by_name[name] = one
            elif isinstance(name, int) and not isinstance(name, bool):
                if len(one) != name:
                    raise ValueError(f"tokens[{name}]: expected {name} tokens, got {len(one)}")
                by_length[name] = one
            else:
                raise TypeError(
                    f"tokens: expected keys that are lengths or the beginnings of layers' names, got {name!r}"
                )
        return cls(None, by_length, by_name)

    @property
    def given(self) -> bool:
        """Whether there are any."""
        return self.every is not None or bool(self.by_length) or bool(self.by_name)

    def find(self, name: str, kind: str, problem: Problem) -> tuple[Tokens | None, Tokens | None]:
        """The tokens at the queries and keys of a call; None where none fit."""
        first, start = int(problem.query_offset), int(problem.key_offset or 0)
        if kind == "cross":
            asked = self._along(self._of_queries(name, problem.T), first, problem.T)
            held = self._of_memory(problem.S)
            return asked, held if held is not None and len(held) == problem.S else None
        whole = self._of_queries(name, problem.S if problem.S != problem.T else problem.T)
        if whole is None:
            whole = self._of_queries(name, first + problem.T)
        asked = self._along(whole, first, problem.T)
        if whole is None or asked is None:
            return None, None
        # Beyond the tokens lie slots of a cache that are still empty.
        return asked, whole.part(start, problem.S)

    def _of_queries(self, name: str, length: int) -> Tokens | None:
        beginnings = [given for given in self.by_name if given != "memory" and _begins(name, given)]
        if beginnings:
            return self.by_name[max(beginnings, key=len)]
        return self.by_length.get(length, self.every)

    def _of_memory(self, length: int) -> Tokens | None:
        for given in ("memory", "encoder"):
            if given in self.by_name:
                return self.by_name[given]
        return self.by_length.get(length, self.every)

    @staticmethod
    def _along(tokens: Tokens | None, first: int, count: int) -> Tokens | None:
        """Those at positions first to first + count - 1, if there are so many."""
        if tokens is None or first < 0 or first + count > len(tokens):
            return None
        return tokens.part(first, count)


def _begins(name: str, beginning: str) -> bool:
    return name == beginning or name.startswith(f"{beginning}.") or beginning == ""
