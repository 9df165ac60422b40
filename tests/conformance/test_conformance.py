"""Checks of attention functions: faults are told by name, conventions are none, and nothing ends a check."""

import functools
import json
import time

import jax
import numpy as np
import pytest

import kernels
from definition import Attention, Mask
from regard import conformance
from regard.conformance import judging
from regard.conformance.subjects import KEYWORDS
from regard.theory import definition

# Of each planted fault, the promise that is broken and words of what is said about it.
MISTAKES = {
    "scale twice": ("the definition", "scaled twice"),
    "scale ignored": ("a scale", "scale has no effect"),
    "last block dropped": ("127 tokens", "last multiple of 32 are dropped"),
    "a last block of zeros": ("1025 tokens", "up to a multiple of 32"),
    "last queries unwritten": ("127 tokens", "last multiple of 32 are not written"),
    "the first key head": ("grouped heads", "all query heads read the first key head"),
    "softcap ignored": ("a softcap", "softcap has no effect"),
    "softcap before scale": ("a softcap", "before the scale"),
    "softcap clips": ("a softcap", "cut at the cap"),
    "bias subtracted": ("a bias", "subtracted"),
    "causal hides itself": ("causal", "does not see its own key"),
    "causal sees ahead": ("causal", "sees the key after its own"),
    "window sees the future": ("a window without a right side", "no edge"),
    "window wide": ("a window", "too wide on the left"),
    "lengths one more": ("lengths", "key after the last"),
    "segments ignored": ("segments", "segments has no effect"),
    "segments of the first row": ("segments", "first row's segments"),
    "indices ignored": ("listed keys", "indices has no effect"),
    "-1 is the last key": ("listed keys", "-1 reads the last key"),
    "mask ignored": ("a boolean mask", "mask has no effect"),
    "mask of the first head": ("a boolean mask", "first head's mask"),
    "offset subtracted": ("causal with an offset", "offset is subtracted"),
    "sinks ignored": ("sinks", "sinks has no effect"),
    "a sink per block": ("sinks", "once per block of 32"),
    "no maximum": ("large scores", "is nan"),
    "exponentials of five digits": ("the definition", "output["),
    "not normalised": ("the definition", "not divided by the sum"),
    "NaN lost": ("attended NaN and inf: NaN in a key", "meets it, and holds"),
    "masked NaN leaks": ("masked NaN and inf: a mask", "NaN in a value"),
    "empty rows hold garbage": ("an empty row of a mask", "holds 0.25"),
    "float64 in float32": ("float64", "computed in float32"),
    "float32 for all": ("bfloat16", "an output of float32 for arrays of bfloat16"),
    "bfloat16 products": ("the definition", "multiply in bfloat16"),
    "lse without maximum": ("lse", "lacks the largest score"),
    "lse in the arrays' dtype": ("lse in bfloat16", "lse is bfloat16"),
    "integers": ("the definition", "an output of int32"),
    "another shape": ("the definition", "an output of shape (2, 128, 4, 64)"),
    "NaN everywhere": ("the definition", "is nan"),
    "writes to its inputs": ("the definition", "writes to query"),
    "random": ("the same bits", "other bits"),
}
CONVENTIONS = {
    "True hides": "True hides", "bottom-right": "bottom-right",
    "window counts itself": "counts the query's own key", "key heads in turn": "in turn",
    "each listing counts": "listed twice counts twice", "softcap after bias": "after the bias",
    "empty rows are means": "mean of all values", "empty rows are NaN": "NaN in an empty row",
    "lse in base 2": "base 2",
}  # fmt: skip
GRADIENTS = {
    "gradient without softcap": ("a softcap and a scale", "without a softcap"),
    "gradient without scale": ("the definition", "lacks the scale"),
    "no query gradient": ("the definition", "query has no gradient"),
    "no key gradient": ("the definition", "key has no gradient"),
    "no value gradient": ("the definition", "value has no gradient"),
    "no bias gradient": ("a bias that heads share", "bias has no gradient"),
    "no sink gradient": ("sinks and a mask", "sinks has no gradient"),
    "shared heads averaged": ("causal and grouped heads", "averaged"),
    "lse stopped": ("lse, causal", "stopped"),
    "NaN in gradients of empty rows": ("an empty row of a mask", "NaN in gradients"),
    "dropout does not grow": ("dropout", "do not grow"),
    "dropout renormalised": ("dropout", "divided by their sum again"),
    "the rate survives": ("dropout", "probability to survive"),
    "gradient without dropout": ("dropout", "lacks dropout"),
}


def check(fault, **options):
    fn = functools.partial(kernels.attention, fault=fault)
    return conformance.check(fn, arrays="numpy", features=FEATURES, **options)


FEATURES = [name for name in KEYWORDS if name not in ("dropout", "rng", "grouped")]


@pytest.fixture
def few_sizes(monkeypatch):
    """What is wrong is not made smaller: JAX compiles a program for every size that is tried."""
    monkeypatch.setattr(judging, "SMALLER", {})


def test_a_right_kernel_holds_every_promise():
    report = check("", sizes="full")
    assert not report.wrong, str(report)
    assert set(report.conventions) == {
        f"{x} in a value reaches rows that may not attend to it" for x in ("NaN", "inf")
    }
    assert report.count("holds") > 100


@pytest.mark.parametrize("fault", MISTAKES)
def test_a_mistake_is_told_by_its_name(fault):
    promise, words = MISTAKES[fault]
    report = check(fault, only=promise)
    assert any(words in row.finding for row in report.wrong), str(report)


@pytest.mark.parametrize("fault", CONVENTIONS)
def test_a_right_kernel_of_another_convention_has_no_wrong_row(fault):
    report = check(fault)
    assert not report.wrong, str(report)
    assert any(CONVENTIONS[fault] in convention for convention in report.conventions), str(report)


@pytest.mark.parametrize("fault", GRADIENTS)
def test_a_wrong_derivative_is_told_by_its_name(fault, few_sizes):
    promise, words = GRADIENTS[fault]
    fn = functools.partial(kernels.differentiable, fault=fault)
    # A stranger's function need not be strict.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        report = conformance.check(fn, only=promise)
    assert any(words in row.finding for row in report.wrong), str(report)


def test_what_jax_answers_is_known(few_sizes):
    """Known answers (float64 in float32, lse in bfloat16 without gradient, two axes), and nothing else."""
    started = time.process_time()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        report = conformance.check(jax.nn.dot_product_attention, layout="BTNH")
    assert time.process_time() - started < 120  # a minute of two cores, whatever runs beside
    findings = {(row.promise, row.aspect): row.finding for row in report.wrong}
    assert findings.pop(("float64", "value")) == "float64 is computed in float32"
    assert findings.pop(("lse", "gradient")) == "the gradient of lse is stopped"
    assert findings.pop(("lse in bfloat16", "lse dtype")) == "lse is bfloat16, its sums are float32"
    assert findings.pop(("arrays of two axes", "value")) == "the value is returned as it is"
    assert findings.pop(("an empty row of a bias", "gradient")).startswith("NaN in gradients")
    masked = [promise for promise, _ in findings if promise.startswith("masked NaN and inf")]
    assert set(masked) == {f"masked NaN and inf: {way}" for way in ("a mask", "a bias of -inf", "lengths")}
    rest = {finding for (promise, _), finding in findings.items() if promise not in masked}
    assert rest <= {"the gradient of lse is stopped"}
    assert "the mean of all values in an empty row" in report.conventions
    assert all("from jax.nn import dot_product_attention" in row.program for row in report.wrong)
    (row,) = (x for x in report.wrong if (x.promise, x.aspect) == ("an empty row of a bias", "gradient"))
    exec(row.program, room := {})
    assert np.isnan(room["gradients"][0]).any(), "as the row says of the output's gradient, not of lse's"


def test_rows_beside_an_empty_one_are_looked_at():
    def fn(query, key, value, *, mask=None):
        output = kernels.attention(query, key, value, mask=mask)
        return output if mask is None or mask.any(-1).all() else output * np.float32(1.5)

    report = conformance.check(fn, arrays="numpy", only="an empty row")
    assert [row.aspect for row in report.wrong] == ["other rows"], str(report)


def raises(query, key, value):
    raise KeyError("nothing here")


def hangs_on_one_token(query, key, value):
    if query.shape[2] == 1:
        time.sleep(5)
    return kernels.attention(query, key, value)


def leaves(query, key, value):
    raise SystemExit(3)


HOSTILE = {
    "raises": (raises, "refused", "KeyError: 'nothing here'"),
    "leaves": (leaves, "refused", "SystemExit: 3"),
    "nothing": (lambda query, key, value: None, "wrong", "an output of NoneType"),
    "one number": (lambda query, key, value: np.float32(1.0), "wrong", "an output of shape ()"),
    "an empty tuple": (lambda query, key, value: (), "wrong", "an output of tuple"),
    "text": (lambda query, key, value: "text", "wrong", "an output of str"),
    "complex numbers": (lambda query, key, value: value + 1j, "wrong", "an output of complex"),
    "objects": (lambda query, key, value: value.astype(object), "wrong", "an output of object"),
    "other arguments": (lambda query: query, "refused", "TypeError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_function_does_becomes_a_row(name):
    fn, verdict, words = HOSTILE[name]
    row = conformance.check(fn, arrays="numpy", only="the definition").rows[0]
    assert (row.verdict, words in row.finding) == (verdict, True), row
    assert conformance.check(fn, only="the definition").rows[0].verdict in ("refused", "wrong")


@pytest.mark.parametrize("answer", ["text", 3.0, {"lse": object()}])
def test_an_lse_that_is_none_becomes_a_row(answer):
    def fn(query, key, value, *, lse=False):
        return kernels.attention(query, key, value), answer

    rows = conformance.check(fn, arrays="numpy", only="lse").rows
    assert {row.verdict for row in rows} == {"wrong"}, rows


def test_a_function_that_leaves_when_it_is_transformed_becomes_a_row():
    def fn(query, key, value):
        if query.ndim != 4 or isinstance(query, jax.core.Tracer):
            raise SystemExit(3)
        return value

    assert {row.finding for row in conformance.check(fn, only="transforms").rows} == {"SystemExit: 3"}


def test_a_function_that_hangs_on_a_shape_is_left_behind():
    report = conformance.check(hangs_on_one_token, arrays="numpy", seconds=0.5, only="one query and one key")
    assert report.rows[0].finding == "no answer within 0.5 s"


def test_a_program_shows_what_its_row_says():
    row = next(row for row in check("scale twice", only="the definition").wrong)
    assert len(row.program.splitlines()) <= 13
    room = {"fn": functools.partial(kernels.attention, fault="scale twice")}
    exec(row.program, room)
    arrays = (np.float64(room[name]) for name in ("query", "key", "value"))
    assert not np.allclose(room["result"], definition.attention(*arrays).output, atol=1e-5)


@pytest.mark.parametrize("layout", ["BHTD", "BTHD", "TBHD", "THD", "TD"])
def test_layouts_are_followed(layout):
    """Axes are moved, not reshaped: sizes differ."""
    axes = [letter for letter in "BHTD" if letter in layout]

    def fn(query, key, value):
        inward = lambda x: x.transpose([layout.index(letter) for letter in axes])[(None,) * (4 - len(axes))]
        output = kernels.attention(*(inward(x) for x in (query, key, value)))
        return output[(0,) * (4 - len(axes))].transpose([axes.index(letter) for letter in layout])

    report = conformance.check(fn, layout=layout, arrays="numpy")
    assert not report.wrong, str(report)
    assert report.count("holds") > 10


def test_conventions_combine():
    """A window that counts itself at the bottom right, whose function reads True as hidden."""

    def fn(query, key, value, *, mask=None, window=None):
        window = None if window is None else (window[0] - 1, window[1])
        return kernels.attention(
            query, key, value, mask=None if mask is None else ~mask, window=window, fault="bottom-right"
        )

    report = conformance.check(fn, arrays="numpy")
    assert not report.wrong, str(report)
    assert "True hides" in report.conventions
    together = " ".join(report.conventions)
    assert "bottom-right" in together
    assert "counts the query's own key" in together


def test_wrong_arguments_are_named():
    for options, words in (
        ({"layout": "BHT"}, "layout: expected letters of BHTD"),
        ({"layout": "BHHTD"}, "layout"),
        ({"features": ["masks"]}, "features: expected some of mask"),
        ({"sizes": "huge"}, "sizes: expected 'quick' or 'full'"),
        ({"dtypes": ["int8"]}, "dtypes: expected some of float32"),
        ({"arrays": "tensorflow"}, "arrays: expected one of jax, numpy, torch"),
    ):
        with pytest.raises(ValueError, match=words):
            conformance.check(kernels.attention, **options)
    with pytest.raises(TypeError, match="fn: expected a function"):
        conformance.check("jax.nn")


def test_a_report_is_a_table_text_and_json():
    report = check("softcap ignored", only="a softcap")
    assert report.summary.startswith("0 hold, 0 differ by convention, 5 are wrong")
    assert "contradicts C = cap tanh(X / cap)" in str(report)
    assert str(report).count("import numpy") == 1  # a program for each kind of mistake
    assert "T, S, D, E = 1, 1, 1, 1" in str(report) or "T, S, D, E = 1, 2, 1, 1" in str(report)
    assert report.to_markdown().splitlines()[2] == "| a softcap | value | wrong | softcap has no effect |"
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["line"] == "capped"


def test_features_may_be_functions_and_progress_is_told():
    told = []
    report = conformance.check(
        lambda query, key, value, hidden=None: kernels.attention(query, key, value, mask=hidden),
        features={"mask": lambda mask: {"hidden": mask}},
        arrays="numpy", only="a boolean mask", progress=lambda *step: told.append(step),
    )  # fmt: skip
    assert {row.verdict for row in report.rows} == {"holds"}
    assert told[0] == (0, 3, "a boolean mask")


def test_the_definition_is_that_of_the_random_programs():
    """Two who wrote it down from the same text, with every option at once."""
    rng = np.random.default_rng(3)
    query, key, value = (rng.normal(size=shape) for shape in ((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 4)))
    bias, sinks, keep = rng.normal(size=(2, 6, 5, 11)), rng.normal(size=6), rng.random((2, 6, 5, 11)) < 0.6
    survivors = (rng.random((2, 6, 5, 11)) < 0.7) / 0.7
    keep[:, :, 3] = False
    options = {"bias": bias, "sinks": sinks, "survivors": survivors, "scale": 0.4}
    forward = definition.attention(query, key, value, keep=keep, softcap=1.3, **options)
    options |= {"mask": Mask(lambda at: keep), "score": (lambda x, at: 1.3 * np.tanh(x / 1.3),)}
    call = Attention(query, key, value, **options)
    results = call.results()
    np.testing.assert_allclose(forward.output, results["output"].value, atol=1e-12)
    np.testing.assert_allclose(forward.lse, results["lse"].value, atol=1e-12)
    d_output, d_lse = rng.normal(size=forward.output.shape), rng.normal(size=forward.lse.shape)
    found = definition.gradients(forward, d_output, d_lse)
    expected = call.vjp({"output": d_output, "lse": np.where(forward.lse == -np.inf, 0, d_lse)}, {}, None)
    for name in ("query", "bias"):
        np.testing.assert_allclose(found[name], expected[name].value, atol=1e-12)
    for name in ("key", "value"):
        shared = found[name].reshape(2, 3, 2, 11, -1).sum(2)
        np.testing.assert_allclose(shared, expected[name].value, atol=1e-12)
    np.testing.assert_allclose(found["sinks"].sum((0, 2)), expected["sinks"].value, atol=1e-12)
