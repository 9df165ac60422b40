"""Locals say what they hold, and two values are two lines."""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "regard"
VAGUE = {"found", "one", "place", "kept", "given", "here", "left", "known", "told", "took"}
# Fields and parameters may have these names, which say what they mean where they stand.
PUBLIC = {"place", "kept", "left"}


def find_vague(tree):
    """Yield words that could mean anything where they are bound, and generators that are unpacked."""
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if name in VAGUE and id(node) not in fields:
                yield node.lineno, name
            case ast.arg(arg=name) if name in VAGUE - PUBLIC:
                yield node.lineno, name
            case ast.Assign(targets=[ast.Tuple()], value=ast.GeneratorExp()):
                yield node.lineno, "a generator that is unpacked"


def main():
    """Return what is vague under src/regard, line by line, or None."""
    bad = "for found in x: pass\na, b = (f(y) for y in z)\nlambda one: [place for place in one]"
    assert sorted(line for line, _ in find_vague(ast.parse(bad))) == [1, 2, 3, 3]
    vague = [
        f"{path.relative_to(SOURCE)}:{line}: {word}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, word in find_vague(ast.parse(path.read_text()))
    ]
    return "\n".join(vague) or None


if __name__ == "__main__":
    sys.exit(main())
