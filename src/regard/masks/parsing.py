"""Masks from the text of their expressions, the inverse of `repr`. Start from `parse`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from regard.masks import block_tables, conventions, expressions
from regard.masks.data import suggest_call
from regard.masks.mask import Mask
from regard.records import record_classes

_NAMED = (
    *(conventions.from_flash_window, conventions.from_hf_window, conventions.from_jax_window),
    *(expressions.shared_prefix, expressions.streaming),
    *(block_tables.blocks, block_tables.chosen_blocks),
)
_SYMBOLS = "masks are joined by & and | and turned by ~: write these for `and`, `or`, `not`, &&, || and !"


def list_makers() -> dict[str, Callable[..., Mask]]:
    """Return the functions that make masks of plain numbers and lists, by their names."""
    makers = [kind.maker for kind in record_classes(Mask) if kind.maker is not None]
    # A `maker` in the class's own body takes fields, and is for files alone.
    makers = [maker for maker in makers if maker.__name__ != "maker"]
    return {maker.__name__: maker for maker in (*makers, *_NAMED)}


def parse(text: str) -> Mask:
    """Make a mask from the text of its expression; nothing but mask makers and literals is understood.

    Args:
        text: such as `"causal() & sliding_window(256)"`; `repr` of a mask with small arrays reads back.

    Returns:
        The mask.

    Raises:
        TypeError: what is no text.
        ValueError: text that is not such an expression, with the names that are known.

    Example:
        >>> from regard import masks
        >>> masks.parse("~causal() | chunked(4)")
        ~causal() | chunked(4)
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected the text of a mask, got {text!r}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        is_foreign = re.search(r"&&|\|\||!", text)
        reason = _SYMBOLS if is_foreign else f"it does not read as an expression ({error})"
        raise _refusal(text, reason) from None
    try:
        return _mask(tree, text)
    except RecursionError:
        raise _refusal(text, "it is nested too deeply") from None


def _mask(node: ast.expr, text: str) -> Mask:
    makers = list_makers()
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, text) & _mask(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, text) | _mask(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand, text)
        case ast.Call(func=ast.Name(id=name)) if name in makers:
            return _call(name, makers[name], node, text)
        case ast.Call(func=ast.Attribute(value=prepared, attr="prepare")):
            return _call("prepare", _mask(prepared, text).prepare, node, text)
        case ast.BinOp() | ast.BoolOp() | ast.UnaryOp():
            raise _refusal(text, _SYMBOLS)
        case ast.Call(func=ast.Name(id=name)) if f"masks.{name}(" in suggest_call("masks", name):
            raise _refusal(text, f"{name} takes what text cannot hold")
    hint = suggest_call("masks", ast.unparse(node)).replace("masks.", "")
    raise _refusal(text, f"`{ast.unparse(node)}` is not a mask{hint}")


def _call(name: str, make: Callable[..., Mask], node: ast.Call, text: str) -> Mask:
    arguments = [_literal(arg, text) for arg in node.args]
    named = {str(word.arg): _literal(word.value, text) for word in node.keywords}
    if len(named) < len(node.keywords) or "None" in named:
        raise _refusal(text, f"{name} takes each option once, by its name")
    try:
        return make(*arguments, **named)
    except (TypeError, ValueError) as error:
        raise _refusal(text, f"{name}: {error}") from None


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        raise _refusal(text, f"`{ast.unparse(node)}` is not a number or list") from None


def _refusal(text: str, reason: str) -> ValueError:
    notation = f". Known: {', '.join(sorted(list_makers()))}; combined with & | ~"
    return ValueError(
        f"mask: expected an expression such as 'causal() & sliding_window(256)', got {text!r}: {reason}"
        f"{'' if reason.endswith('?') else notation}"
    )
