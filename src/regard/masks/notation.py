"""The inverse of `repr`: a mask from the text of its expression."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from regard.masks import conventions, documents, keys, positional, stored
from regard.masks.algebra import Mask

MAKERS: Mapping[str, Callable[..., Mask]] = {
    maker.__name__: maker
    for maker in (
        positional.causal,
        positional.sliding_window,
        positional.chunked,
        positional.dilated,
        positional.global_tokens,
        keys.prefix,
        keys.lengths,
        keys.valid_keys,
        documents.segments,
        stored.from_array,
        conventions.from_flash_window,
        conventions.from_hf_window,
        conventions.from_jax_window,
    )
}


def parse(text: str) -> Mask:
    """Make a mask from the text of its expression; nothing but mask makers and literals is understood.

    Args:
        text: such as `"causal() & sliding_window(256)"`; `repr` of a mask with small arrays reads back.

    Returns:
        The mask.

    Raises:
        ValueError: text that is not such an expression, with the names that are known.

    Example:
        >>> from regard import masks
        >>> masks.parse("~causal() | chunked(4)")
        ~causal() | chunked(4)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _refusal(text, f"it does not read as an expression ({error})") from None
    try:
        return _mask(tree, text)
    except RecursionError:
        raise _refusal(text, "it is nested too deeply") from None


def _mask(node: ast.expr, text: str) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, text) & _mask(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, text) | _mask(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in MAKERS:
            named = {str(word.arg): _literal(word.value, text) for word in keywords}
            try:
                return MAKERS[name](*(_literal(arg, text) for arg in args), **named)
            except (TypeError, ValueError) as error:
                raise _refusal(text, f"{name}: {error}") from None
    raise _refusal(text, f"`{ast.unparse(node)}` is not a mask")


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _refusal(text, f"`{ast.unparse(node)}` is not a number or list") from None


def _refusal(text: str, reason: str) -> ValueError:
    return ValueError(
        f"mask: expected an expression such as 'causal() & sliding_window(256)', got {text!r}: {reason}."
        f" Known: {', '.join(MAKERS)}; combined with & | ~"
    )
