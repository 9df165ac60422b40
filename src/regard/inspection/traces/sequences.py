"""Sequences of tokens, and those at the queries and keys of a call."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from regard.inspection.tokens import Tokens, read_tokens
from regard.inspection.traces.calls import Call


@dataclass(frozen=True)
class Sequences:
    """The tokens that a caller gave, to be found again for each call."""

    every: Tokens | None  # for all calls that it fits
    by_length: Mapping[int, Tokens]
    by_name: Mapping[str, Tokens]

    @classmethod
    def read(cls, tokens: Any) -> Self:
        """Read the argument `tokens`."""
        if not isinstance(tokens, Mapping):
            return cls(None if tokens is None else read_tokens("tokens", tokens), {}, {})
        by_length, by_name = {}, {}
        for name, texts in tokens.items():
            sequence = read_tokens(f"tokens[{name!r}]", texts)
            if isinstance(name, str):
                by_name[name] = sequence
            elif isinstance(name, int) and not isinstance(name, bool):
                if len(sequence) != name:
                    raise ValueError(f"tokens[{name}]: expected {name} tokens, got {len(sequence)}")
                by_length[name] = sequence
            else:
                expected = "keys that are lengths or the beginnings of layers' names"
                raise TypeError(f"tokens: expected {expected}, got {name!r}")
        return cls(None, by_length, by_name)

    @classmethod
    def across(cls, tokens: Any, key_tokens: Any, calls: Iterable[Call]) -> Self:
        """Read the texts at the queries and at the keys of cross-attention."""
        texts, sides = {}, [("tokens", "", "rows", tokens), ("key_tokens", "memory", "keys", key_tokens)]
        for name, prefix, side, text in sides:
            if text is not None:
                texts[prefix] = read_tokens(name, text)
                lengths = sorted({getattr(call, side) for call in calls})
                if len(texts[prefix]) not in lengths:
                    raise ValueError(f"{name}: expected one per position, {lengths}; got {texts[prefix]!r}")
        return cls(None, {}, texts)

    def lay(self, calls: Iterable[Call]) -> tuple[Call, ...]:
        """Lay the tokens to the calls that they fit, at least one if there are any."""
        laid = []
        for call in calls:
            asked, held = self.find(call.name, call)
            laid.append(replace(call, query_tokens=asked, key_tokens=held))
        ends = [max(call.query_offset + call.rows, call.key_offset + call.keys) for call in laid]
        if self.every is not None and max(ends, default=len(self.every)) < len(self.every):
            raise ValueError(
                f"tokens: expected one per position, of which there are {max(ends)}; got {self.every!r}"
            )
        has_tokens = self.every is not None or self.by_length or self.by_name
        if has_tokens and not any(call.query_tokens or call.key_tokens for call in laid):
            got = {**self.by_length, **self.by_name} if self.every is None else self.every
            lengths = sorted({size for call in laid for size in (call.rows, call.keys)})
            expected = f"one per position of some call, whose lengths are {', '.join(map(str, lengths))}"
            raise ValueError(f"tokens: expected {expected}; got {got!r}. Is a first or last token missing?")
        return tuple(laid)

    def find(self, name: str, call: Call) -> tuple[Tokens | None, Tokens | None]:
        """Find the tokens at the queries and keys of a call; None where none fit."""
        first, rows, keys = call.query_offset, call.rows, call.keys
        if call.kind == "cross":
            memory = self.by_name.get("memory", self.by_name.get("encoder"))
            held = self.by_length.get(keys, self.every) if memory is None else memory
            asked = _take(self._of_queries(name, rows), first, rows)
            return asked, held if held is not None and len(held) == keys else None
        whole = self._of_queries(name, keys)
        if whole is None:
            whole = self._of_queries(name, first + rows)
        asked = _take(whole, first, rows)
        if whole is None or asked is None:
            return None, None
        # Beyond the tokens lie slots of a cache that are still empty.
        return asked, whole.part(call.key_offset, keys)

    def _of_queries(self, name: str, length: int) -> Tokens | None:
        parts = name.split(".")
        for count in range(len(parts), -1, -1):  # the longest beginning counts
            prefix = ".".join(parts[:count])
            if prefix in self.by_name and prefix != "memory":
                return self.by_name[prefix]
        return self.by_length.get(length, self.every)


def _take(tokens: Tokens | None, first: int, count: int) -> Tokens | None:
    """Take those at positions first to first + count - 1, if there are so many."""
    if tokens is None or not 0 <= first <= len(tokens) - count:
        return None
    return tokens.part(first, count)
