"""The explorer's page without data: small, closed, and the same script as its modules."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest

from regard.inspection.shell import detach_module, load_shell, shorten_script, shorten_style

NODE = shutil.which("node")


def test_the_shell_is_small_and_runs_its_own_script_alone():
    shell = load_shell()
    assert shell.size <= 80_000
    page = shell.fill(title="t", document="{}", chunks="", connect="'none'")
    assert page.count("<script") == page.count("</script>") == 2
    script = re.search(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert not re.search(r"<!--[A-Z]+-->", page)
    assert not re.search(
        r"""(src|href)=["']?(https?:)?//|@import|url\(["']?http|\bimport\b.*\bfrom\b|\beval\(""", page
    )


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_joined_script_is_javascript(tmp_path):
    joined = tmp_path / "joined.mjs"
    joined.write_text(load_shell().script)
    assert NODE is not None
    ran = subprocess.run(
        [NODE, "--check", str(joined)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr


TRICKY = r"""
// nothing
const url = "https://a//b", quote = 'it\'s // no';  /* gone */ const slash = /[/"]\/\/'/g;
const half = 12 / 4 / 3;
const nested = `a // ${[1, 2].map((x) => `<${x}>  //`).join("  ")} /* b */
    kept  indent`;
function minus(a, b) {
    return a - -b + +a;  // signs stay apart
}
/**
 * @param {number} x
 */
const found = "a/b".replace(/\//, " : "), test = (x) => x  ?  .5  :  1;
let i = 1
let j = i /* a
line */ i++
const last = "x\"//'".replace(slash, "y");
console.log(JSON.stringify([url, quote, last, half, nested, minus(1, 2), found, test(0), i, j]));
"""


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_shortened_script_does_the_same(tmp_path):
    short = shorten_script(TRICKY)
    assert len(short) < 0.85 * len(TRICKY)
    assert "nothing" not in short
    assert "gone" not in short
    assert shorten_script(short) == short
    out = []
    for name, text in (("a.mjs", TRICKY), ("b.mjs", short)):
        (tmp_path / name).write_text(text)
        assert NODE is not None
        ran = subprocess.run([NODE, tmp_path / name], capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        out.append(json.loads(ran.stdout))
    assert out[0] == out[1]


def test_styles_are_shortened():
    text = "/* a\n b */\n.a , .b {\n  color: red;\n  margin: 0 1px;\n}\n"
    text += "@media print {\n  .c { left: calc(1px + 2px) }\n}\n"
    assert shorten_style(text) == ".a,.b{color: red;margin: 0 1px}@media print{.c{left: calc(1px + 2px)}}"


def test_modules_are_detached():
    text = 'import { a, b } from "./c.js";\nexport function d() {}\nexport const e = "export f";\n'
    assert detach_module(text) == 'function d() {}\nconst e = "export f";\n'
