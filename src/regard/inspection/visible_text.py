"""Texts as they are written in figures and titles: `show_text` gives what would hide in them a sign."""

import itertools
import unicodedata

# Joiners and variants of what they follow, then signs that are seen though Unicode calls them controls.
_JOINED = frozenset(map(chr, (0x200C, 0x200D, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
_SEEN = frozenset(" \u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0")
MOST_MARKS = 4  # that lie on one letter
_SIGNS = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\n": "↵", "\t": "⇥", "\x7f": "␡"}


def show_text(text: object) -> str:
    r"""Write a text with a sign for every character that would not show, or would turn its line around.

    Of marks on one letter, four are kept, and how many more there are: they would lie over other lines.
    The page's `visibleText` in dom.js has the same signs.

    Example:
        >>> show_text("\u202eevil\n")
        '⟨202E⟩evil↵'
    """
    written, before = [], ""
    for character in _thin_marks(str(text).replace("\r\n", "\n")):
        kind = unicodedata.category(character)
        is_shown = character in _SEEN or (before and character in _JOINED)
        unseen = kind in ("Cc", "Cf", "Zl", "Zp", "Zs") or character in _BLANK or character in _JOINED
        before = character if is_shown or not unseen else ""
        if is_shown or not (unseen or kind == "Cs"):
            written.append(character)
        elif kind == "Cs":
            written.append("\ufffd")
        else:
            written.append(_SIGNS.get(character, f"⟨{ord(character):X}⟩"))
    return "".join(written)


def _thin_marks(text: str) -> str:
    """Return a text with the number of the marks beyond four in a row in place of them."""
    if len(text) <= MOST_MARKS:
        return text
    parts = []
    for are_marks, run in itertools.groupby(text, lambda sign: unicodedata.category(sign)[0] == "M"):
        part = "".join(run)
        more = len(part) - MOST_MARKS if are_marks else 0
        parts.append(f"{part[:MOST_MARKS]}⟨+{more}⟩" if more > 0 else part)
    return "".join(parts)
