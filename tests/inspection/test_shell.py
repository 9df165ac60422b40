"""The explorer's page without data: small, closed, and the same script as its modules."""

import base64
import hashlib
import json
import re
import subprocess
import zlib
from importlib import resources
from pathlib import Path

import pytest

from javascript import NODE
from regard.inspection.explorer.shell import (
    STYLES,
    detach_module,
    load_shell,
    shorten_names,
    shrink_script,
    shrink_style,
)

LARGEST = 107_300
WEB = Path(str(resources.files("regard.inspection.explorer") / "web"))


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


def test_nothing_is_loaded_from_elsewhere():
    shell = load_shell()
    everything = shell.skeleton + shell.style + shell.script + shell.boot
    assert not re.search(
        r"""(src|href)=["']?(https?:)?//|@import|url\(["']?http|\beval\(|new Function""", everything
    )
    assert not re.search(r"^\s*(import|export) ", shell.script + shell.boot, re.MULTILINE)
    assert "innerHTML" not in shell.script


def test_modules_are_joined_after_what_they_import():
    script = load_shell().script
    # What only one of the modules says: codes.js, source.js and main.js.
    for needed, needing in (("DecompressionStream", "chunk/"), ("chunk/", "rg-facts")):
        assert 0 < script.index(needed) < script.index(needing)


def test_names_are_shortened_where_they_can_mean_nothing_else():
    text = """function size(a) { return /size/.test(a) ? "size of a" : a; }
const width = (unit) => unit.width;
const tell = `${ tellAll } x`;
async function tellAll(parts) { const size = parts; return { size: 1, height }; }
class Box { #depth = depth; draw(paint) { return paint(spread()); } }
function draw() {}
const depth = 2, height = 3;
function spread() { return [spread, Box, draw]; }
    function inner() {}
"""
    shown = shorten_names(text)
    kept = {name for name in re.findall(r"\w+", text) if re.search(rf"(?<![$])\b{name}\b", shown)}
    for name in ("size", "width", "tellAll", "height", "depth", "draw", "Box", "inner"):
        assert name in kept, name
    for name in ("spread", "tell"):
        assert name not in kept, name
    assert shown.count("$0") == text.count("spread") == 3


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_joined_script_is_javascript(tmp_path):
    shell = load_shell()
    for name, text in (("main.js", shell.script), ("boot.mjs", shell.opening)):
        (tmp_path / name).write_text(text)
        assert NODE is not None
        order = [NODE, "--check", str(tmp_path / name)]
        ran = subprocess.run(order, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_page_unpacks_what_was_packed(tmp_path):
    shell = load_shell()
    (tmp_path / "boot.mjs").write_text(
        "const document={createElement:(name)=>({name}),head:{append:(part)=>parts.push(part)}},parts=[];\n"
        f"{shell.opening}\nconsole.log(JSON.stringify(parts));"
    )
    assert NODE is not None
    ran = subprocess.run(
        [NODE, tmp_path / "boot.mjs"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [
        {"name": "style", "textContent": shell.style},
        {"name": "script", "textContent": shell.script},
    ]


def test_comments_and_white_space_are_left_out_alone():
    text = """/**
 * @param {number} a
 */
  const url = "https://a//b  c";
  // nothing

  const half = /** @type {number} */ (a) / 2 - -1;
  if (half in [ 1 ]) return /[/"] {2}/u.test(x) ? `${ a } ${ b ? `c  ${'d  "'}` : "" }  e` : 'f  ';
  class A {
    #b = new Map();
    async *c() {}
  }
"""
    assert shrink_script(text) == (
        """const url="https://a//b  c";const half=(a)/2- -1;if(half in[1])return/[/"] {2}/u.test(x)?"""
        """`${ a } ${ b ? `c  ${'d  "'}` : "" }  e`:'f  ';class A{#b=new Map();async*c(){}}"""
    )
    assert shrink_style("/* a\n b */\n.a > .b,\n.c .d {\n  left: calc(1px + 2px);\n}\n") == (
        ".a>.b,.c .d{left:calc(1px + 2px)}"
    )


@pytest.mark.parametrize(
    "path", sorted(WEB.glob("*.js")) + [WEB / name for name in STYLES], ids=lambda path: path.name
)
def test_comments_are_not_taken_for_what_is_in_strings(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        place = f"{path.name}:{number}"
        assert not re.search(r"""["'`][^"'`]*/[*]""", line), place
        # The end of a line may be taken away, and would not end what is told there.
        assert line.lstrip().startswith("//") or not re.search(r"\s//\s", line), place
        # What a string over several lines holds would lose its indentation: a line ends outside of one.
        odd = line.count("`") % 2 and not re.search(r"[$][{][^`]*`$|[$][{]$|^ *}[^`]*`", line)
        assert not odd, place


@pytest.mark.parametrize("path", sorted(WEB.glob("*.js")), ids=lambda path: path.name)
def test_strings_are_shipped_as_they_are_written(path):
    text = re.sub(r"/\*.*?\*/|^\s*//.*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    shrunk = shrink_script(detach_module(text))
    found = re.findall(r"""(?<=[(=,:\[?] )"[^"\\\n]* [^"\\\n]*"(?=[,;)\]])""", text)
    assert all(literal in shrunk for literal in found)


def test_modules_are_detached():
    text = 'import { a, b } from "./c.js";\nexport function d() {}\nexport const e = "export f";\n'
    assert detach_module(text) == 'function d() {}\nconst e = "export f";\n'
