"""How others answer: several libraries, checked by `regard.conformance`, as the page docs/answers.md.

`python -m benchmarks.answers` checks every library that is installed; names check those alone. What was
found is kept in build/answers, a file per library, and the page is written from all of them; `ruff format
docs/answers.md` then lays out its programs, as `make lint` wants them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "answers"
PAGE = ROOT / "docs" / "answers.md"
NAMES = {"differs": "Conventions", "wrong": "Wrong by the definition", "refused": "Refused"}

HEAD = """# How others answer

Functions of attention of several libraries, each checked by
[`regard.conformance`](guides/conformance.md) on a CPU, on {dates}. A row holds where the function answers as
[the definition](guides/conformance.md#the-definition) does; it differs where its answer is another
convention that has a name; it is wrong where the answer is neither; and it is refused where the function
raises. The definition is Regard's: that an empty row is 0, for example, or that NaN which is masked reaches
nothing, is a promise that not every library makes. What a library's documentation says of each row was not
looked up.

`python -m benchmarks.answers` checks again what is installed, and writes this page.
"""


@dataclass(frozen=True)
class Library:
    """A function that is checked, and how."""

    name: str
    packages: tuple[str, ...]
    imported: str  # the line that imports it
    layout: str
    arrays: str = "jax"
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    remark: str = ""
    features: Callable[[], Mapping[str, Any] | None] = field(default=lambda: None)

    def find(self) -> Callable[..., Any]:
        """Import the function."""
        module, name = re.fullmatch(r"from (\S+) import (\w+)", self.imported).groups()  # pyright: ignore[reportOptionalMemberAccess]
        return getattr(importlib.import_module(module), name)


def name_features_of_equinox() -> Mapping[str, Any]:
    """Return features of equinox's function, which takes dropout as a layer."""
    from equinox.nn import Dropout  # pyright: ignore[reportMissingImports]

    return {"mask": "mask", "dropout": lambda rate: {"dropout": Dropout(rate)}, "rng": "key"}


def call_flex_attention(
    query: Any, key: Any, value: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
    softcap: float | None = None, scale: float | None = None, lse: bool = False,
) -> Any:  # fmt: skip
    """Call FlexAttention, not compiled, on arrays of NumPy, with its score_mod and mask_mod."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import flex_attention as flex  # pyright: ignore[reportMissingImports]

    shape, dtype = (*query.shape[:-1], key.shape[-2]), query.dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    query, key, value = (
        torch.from_numpy(x.astype(wide)).to(getattr(torch, dtype.name)) for x in (query, key, value)
    )
    mask = None if mask is None else torch.from_numpy(mask).expand(shape)
    bias = None if bias is None else torch.from_numpy(bias.astype(wide)).to(query.dtype).expand(shape)

    def score_mod(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[b, h, row, column]

    def mask_mod(b: Any, h: Any, row: Any, column: Any) -> Any:
        keep = column <= row if causal else column >= 0
        return keep if mask is None else keep & mask[b, h, row, column]

    block_mask = None
    if causal or mask is not None:
        block_mask = flex.create_block_mask(mask_mod, *shape, device="cpu")
    results = flex.flex_attention(
        query, key, value, score_mod=None if bias is None and softcap is None else score_mod,
        block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1], return_lse=lse,
    )  # fmt: skip
    if lse:
        return results[0].to(torch.float64).numpy().astype(dtype), results[1].numpy()
    return results.to(torch.float64).numpy().astype(dtype)


LIBRARIES = [
    Library("jax.nn.dot_product_attention", ("jax",), "from jax.nn import dot_product_attention", "BTHD"),
    Library("flax.nnx.dot_product_attention", ("flax", "jax"),
            "from flax.nnx import dot_product_attention", "BTHD"),
    Library("flax.linen.dot_product_attention", ("flax", "jax"),
            "from flax.linen import dot_product_attention", "BTHD"),
    Library("equinox dot_product_attention", ("equinox", "jax"),
            "from equinox.nn._attention import dot_product_attention", "TD",
            features=name_features_of_equinox,
            remark="The function inside `equinox.nn.MultiheadAttention`, for one head."),
    Library("tokamax.dot_product_attention", ("tokamax", "jax"),
            "from tokamax import dot_product_attention", "BTHD",
            remark="Its implementation for CPUs, which it chooses itself."),
    Library("torch scaled_dot_product_attention", ("torch",),
            "from torch.nn.functional import scaled_dot_product_attention", "BHTD", "torch",
            features=lambda: {
                "mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal", "scale": "scale",
                "dropout": "dropout_p", "rng": "rng", "grouped": "enable_gqa"},
            remark="It takes either a mask or a bias, both as `attn_mask`; both at once are not asked for."),
    Library("torch FlexAttention", ("torch",), "from benchmarks.answers import call_flex_attention",
            "BHTD", "numpy",
            remark="Eager, not compiled, through `call_flex_attention` of `benchmarks/answers.py`: options "
            "are its score_mod and mask_mod. It has no gradients on CPUs; none were asked for."),
    Library("regard.attend", ("jax",), "from regard.conformance.ours import attend_by_keywords", "BHTD",
            remark="Through `regard.conformance.ours.attend_by_keywords`, with a keyword for each feature."),
]  # fmt: skip


def check_library(library: Library, seconds: float) -> dict[str, Any]:
    """Check one library; return its report as a dictionary, with versions."""
    from regard.conformance import check

    report = check(
        library.find(), layout=library.layout, features=library.features(), arrays=library.arrays,  # pyright: ignore[reportArgumentType]
        dtypes=library.dtypes, seconds=seconds,
        progress=lambda done, of, name: print(f"  {done}/{of} {name}", flush=True),
    )  # fmt: skip
    rows = report.to_dict()["rows"]
    versions = {package: importlib.metadata.version(package) for package in library.packages}
    for row in rows:
        lines = [name_import(line, library) for line in row["program"].splitlines()]
        row["program"] = "\n".join(lines)
    found = {"name": library.name, "versions": versions, "date": time.strftime("%Y-%m-%d")}
    return report.to_dict() | found | {"rows": rows}


def name_import(line: str, library: Library) -> str:
    """Return a line of a program, which imports the function from where its users do."""
    return library.imported if line.startswith(("from ", "# fn")) else line


def write_page(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page."""
    dates = sorted({report["date"] for report in reports})
    yield HEAD.format(dates=" and ".join(dates[:1] + dates[1:][-1:]))
    yield "| | versions | holds | differs | wrong | refused |"
    yield "|---|---|---|---|---|---|"
    for report in reports:
        counts = [count_rows(report, verdict) for verdict in ("holds", "differs", "wrong", "refused")]
        versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
        cells = [f"[{report['name']}](#{name_anchor(report['name'])})", versions, *map(str, counts)]
        yield f"| {' | '.join(cells)} |"
    for report in reports:
        yield from write_library(report)
    yield from write_programs(reports)


def count_rows(report: dict[str, Any], verdict: str) -> int:
    """Return how many rows of a report have a verdict."""
    return sum(row["verdict"] == verdict for row in report["rows"])


def name_anchor(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")


def escape(text: str) -> str:
    """Return text that may stand in a cell of a table: what is an array's place is code."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def write_library(report: dict[str, Any]) -> Iterator[str]:
    """Yield what one library does otherwise, in a table of each verdict."""
    library = next(one for one in LIBRARIES if one.name == report["name"])
    yield f"\n## {report['name']}\n"
    axes = f'`layout="{report["layout"]}"`'
    lacking = ", ".join(report["not_offered"])
    yield f"{library.remark} {axes}.{f' Not offered: {lacking}.' if lacking else ''}".strip()
    for verdict, title in NAMES.items():
        promises: dict[tuple[str, str], list[str]] = {}
        for row in report["rows"]:
            if row["verdict"] == verdict:
                promises.setdefault((row["aspect"], row["finding"]), []).append(row["promise"])
        if promises:
            yield f"\n**{title}**\n"
            yield from ("| promise | of | what was found |", "|---|---|---|")
            for (aspect, finding), names in promises.items():
                yield f"| {'; '.join(names)} | {aspect} | {escape(finding)} |"


def write_programs(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a program for each kind of wrong answer, of the first library that gives it."""
    kinds: dict[str, dict[str, dict[str, Any]]] = {}
    for report in reports:
        for row in report["rows"]:
            if row["verdict"] == "wrong" and row["program"]:
                kinds.setdefault(name_kind(row), {}).setdefault(report["name"], row)
    yield "\n## Programs\n\nOne for each kind of wrong answer."
    for found in kinds.values():
        (library, row), *others = found.items()
        yield f"\n:::{{dropdown}} {library}: {row['promise']}, {row['aspect']}"
        yield escape(row["finding"]) + (
            f". So do others: {', '.join(name for name, _ in others)}." if others else ""
        )
        yield f"```python\n{row['program']}\n```\n:::"


def name_kind(row: dict[str, Any]) -> str:
    """Return what wrong rows of one kind have in common: their words, without numbers and names of arrays."""
    if row["promise"].startswith("masked"):
        return f"{row['promise']} {row['aspect']}"
    words = r"\[.*|\d\S*|\b(d_)?(output|query|key|value|bias|sinks)\b"
    return f"{row['aspect']} {row['line']} {re.sub(words, '', row['finding'])}"


def main() -> None:
    """Check libraries, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words of the names of libraries; all, if none")
    parser.add_argument("--seconds", type=float, default=120.0, help="the longest time of one call")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        if options.page or not all(word in library.name for word in options.names):
            continue
        print(library.name, flush=True)
        try:
            library.find()
        except ImportError as error:
            print(f"  left out: {error}")
            continue
        found = check_library(library, options.seconds)
        (KEPT / f"{name_anchor(library.name)}.json").write_text(json.dumps(found, indent=1))
    files = [KEPT / f"{name_anchor(library.name)}.json" for library in LIBRARIES]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    PAGE.write_text("\n".join(write_page(reports)) + "\n")


if __name__ == "__main__":
    main()
