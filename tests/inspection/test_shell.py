"""The explorer's page without data: small, closed, and the same script as its modules."""

import base64
import hashlib
import json
import os
import re
import unicodedata
import zlib
from pathlib import Path

from javascript import WEB, run_node
from regard.inspection.explorer.shell import load_shell
from regard.inspection.visible_text import show_text

LARGEST = 113_250  # with heads behind a cut, keys of the live page, and a plain view that short texts open in


def digest(script):
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def test_the_shell_is_small_and_runs_its_own_scripts_alone():
    shell = load_shell()
    page = shell.fill(title="t", document="{}", chunks="", connect="'none'")
    assert len(page.encode()) <= LARGEST
    assert page.count("<script") == page.count("</script>") == 2
    script = re.search(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.S)[1]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    # What opens the page, and what it then puts into it.
    assert parts["script-src"] == f"{digest(script)} {digest(shell.script)}"
    assert parts["default-src"] == parts["connect-src"] == parts["base-uri"] == "'none'"
    assert not re.search(r"<!--[A-Z]+-->", page)
    packed = re.search(r'openPage\("([^"\'&<>\\`\s]*)"\);$', script)[1]
    digits = packed.translate(str.maketrans(".[]:", "&<>`"))
    style, main = zlib.decompress(base64.b85decode(digits)).decode().split("\0")
    assert (style, main) == (shell.style, shell.script)


def test_modules_pass_their_tests_in_node():
    tests = sorted(Path(__file__).parent.glob("explorer/*.test.js"))
    assert len(tests) > 10
    # A colour would be an escape sequence in the report of a failure.
    run_node("--test", *tests, env={**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "0"})


def test_python_and_the_page_write_hidden_characters_alike():
    known = [chr(code) for code in range(0xE0200) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    texts = [f"a{one}{one}" for one in known if one not in "\r\n"]
    texts += ["\r\n", "\u200d\u200d", "\u202eevil", 29 * "\u0301\u0302"]
    assert [*map(show_text, texts[-2:])] == ["⟨202E⟩evil", 2 * "\u0301\u0302" + "⟨+54⟩"]
    program = f"""import {{ visibleText }} from {(WEB / "dom.js").as_uri()!r};
      import {{ readFileSync }} from "node:fs";
      console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(visibleText)));"""
    found = json.loads(run_node("--input-type=module", "-e", program, input=json.dumps(texts)))
    assert [pair for pair in zip(texts, found, strict=True) if show_text(pair[0]) != pair[1]] == []
