"""Promises about what few calls have: rows without keys, NaN, infinities, no tokens, arrays of two axes."""

from collections.abc import Iterator

import numpy as np

from regard.conformance.expectations import as_expected, expect, find_empty, find_pairs
from regard.conformance.judging import Judge
from regard.conformance.promises import MASK, Promise
from regard.conformance.report import Row
from regard.conformance.subjects import Subject
from regard.conformance.transforms import check_dropout, check_transforms
from regard.conformance.written_calls import Array, Case


def check_empty_rows(judge: Judge) -> Iterator[Row]:
    """Check queries that may attend to nothing: value 0, lse -inf, gradients 0; others as ever."""
    pairs = "np.zeros((B, H, T, S))"
    row = f"{pairs} + np.arange(T)[:, None]"
    # Of each way, the option with an empty row and without.
    ways = {
        "an empty row of a mask": ("mask", f"{row} != 3", f"{row} != -1"),
        "an empty row of a bias": ("bias", f"np.where({row} == 3, -np.inf, 0.0)", pairs),
        "an empty row of listed keys": (
            "indices", "np.where(np.zeros((B, 1, S), int) + np.arange(T)[:, None] == 3, -1, np.arange(S))",
            "np.broadcast_to(np.arange(S), (B, T, S))",
        ),
        "an empty row by a length of 0": ("lengths", "np.array([0, 3])[:B]", "np.array([S, 3])[:B]"),
    }  # fmt: skip
    for name, (option, empty, filled) in ways.items():
        if judge.subject.takes([option]):
            lse = {"lse": "True"} if judge.subject.takes(["lse"]) else {}
            cases = (Case(judge.sizes, {option: text, **lse}) for text in (empty, filled))
            yield from _check_empty_row(judge, name, *cases)


def _check_empty_row(judge: Judge, name: str, case: Case, filled: Case) -> Iterator[Row]:
    call = judge.turn_mask(case.draw())
    spelled = judge.spell(call)
    empty = find_empty(spelled)
    noise = np.random.default_rng(1).normal(size=(*empty.shape, call["value"].shape[-1]))
    answer = judge.subject.answer(call, noise * empty[..., None], np.where(empty, 1.0, 0.0))
    write = judge.row_writer(name, case)
    if answer.output is None:
        yield write("value", "refused", answer.reason)
        return
    output = answer.output[empty]
    mean = np.asarray(call["value"], np.float64).mean(-2, keepdims=True)
    if not output.any():
        yield write("value", "holds")
    elif np.isnan(output).all():
        yield write("value", "differs", "NaN in an empty row", "weights")
    elif np.allclose(output, np.broadcast_to(mean, answer.output.shape)[empty], atol=1e-5):
        yield write("value", "differs", "the mean of all values in an empty row", "weights")
    else:
        number = output.ravel()[np.argmax(np.abs(output))]
        finding = f"an empty row holds {number:.6g}, which is neither 0, NaN nor the mean of values"
        yield write("value", "wrong", finding, "weights")
    beside = judge.ask_case(filled)
    if beside.output is not None:
        difference = judge.compare(answer.output, as_expected(beside.output), ~empty[..., None])
        if difference is not None:
            finding = f"rows beside an empty one change: output{difference}"
            yield write("other rows", "wrong", finding, "weights")
    if answer.lse is not None:
        lse = answer.lse[empty]
        finding = "" if np.isneginf(lse).all() else f"lse of an empty row is {lse[0]:.3g}"
        yield write("lse", "differs" if finding else "holds", finding, "lse" if finding else "")
    gradients = [gradient.ravel() for gradient in answer.gradients.values()]
    if gradients and not np.concatenate(gradients).any():
        yield write("gradient", "holds")
    elif gradients and not np.isfinite(np.concatenate(gradients)).all():
        yield write("gradient", "wrong", "NaN in gradients, of an empty row alone", "d_scores")
    elif gradients:
        yield write("gradient", "differs", "an empty row has gradients", "d_scores")


POISONS = {"nan": "NaN", "inf": "inf"}


def check_masked_slots(judge: Judge) -> Iterator[Row]:
    """Check that NaN and inf in keys and values that nobody may attend to reach nothing."""
    ways = {
        "a mask": {"mask": "np.broadcast_to(np.arange(S) < S - 4, (B, H, T, S))"},
        "a bias of -inf": {"bias": "np.where(np.arange(S) < S - 4, 0.0, -np.inf) + np.zeros((B, H, T, S))"},
        "lengths": {"lengths": "np.array([S - 4, S - 4])[:B]"},
        "listed keys": {"indices": "np.broadcast_to(np.arange(S - 4), (B, T, S - 4))"},
    }
    for way, options in ways.items():
        if judge.subject.takes(options):
            yield from _compare_with_clean(judge, f"masked NaN and inf: {way}", options)


def _compare_with_clean(judge: Judge, name: str, options: dict[str, str]) -> Iterator[Row]:
    """Compare calls whose masked slots hold NaN or inf with the function's own, whose slots hold 0."""
    reached: dict[str, list[tuple[str, str, Case]]] = {"value": [], "gradient": []}
    differentiated = False
    for poison in ("nan", "inf"):
        for array in ("key", "value"):
            case = Case(judge.sizes, options, (f"{array}[..., S - 4:, :] = np.{poison}",))
            clean = Case(judge.sizes, options, (f"{array}[..., S - 4:, :] = 0.0",))
            answer, plain = judge.ask_case(case), judge.ask_case(clean)
            if answer.output is None or plain.output is None:
                yield Row(name, "value", "refused", answer.reason or plain.reason)
                return
            results = {"output": (answer.output, plain.output)}
            differentiated = differentiated or bool(plain.gradients)
            for argument in plain.gradients:
                if argument in answer.gradients:
                    results[f"d_{argument}"] = answer.gradients[argument], plain.gradients[argument]
            for result, (number, expected) in results.items():
                difference = judge.compare(number, as_expected(expected))
                if difference is not None:
                    aspect = "value" if result == "output" else "gradient"
                    reached[aspect].append((f"{POISONS[poison]} in a {array}", f"{result}{difference}", case))
    for aspect, leaks in reached.items():
        if leaks:
            poisons = ", ".join(dict.fromkeys(poison for poison, _, _ in leaks))
            write = judge.row_writer(name, leaks[0][2])
            line = "masked" if aspect == "value" else "d_scores"
            yield write(aspect, "wrong", f"{poisons} reaches it: {leaks[0][1]}", line)
        elif aspect == "value" or differentiated:
            yield Row(name, aspect, "holds")


def check_attended_nan(judge: Judge) -> Iterator[Row]:
    """Check that rows that meet NaN are NaN, and that a key of NaN reaches no row that may not meet it."""
    mask = {"mask": "np.broadcast_to(np.tri(T, S, dtype=bool), (B, H, T, S))"}
    for options in ({}, mask):
        if not judge.subject.takes(options):
            continue
        for poison in ("nan", "inf"):
            for array in ("key", "value", "query"):
                if array != "query" or (poison == "nan" and not options):
                    beside = ", masked for earlier queries" if options else ""
                    name = f"attended NaN and inf: {POISONS[poison]} in a {array}{beside}"
                    yield _meet_poison(judge, name, options, array, poison)


def _meet_poison(judge: Judge, name: str, options: dict[str, str], array: str, poison: str) -> Row:
    case = Case(judge.sizes, options, (f"{array}[..., 5, 0] = np.{poison}",))
    clean = Case(judge.sizes, options, (f"{array}[..., 5, 0] = 0.0",))
    answer = judge.ask_case(case, differentiate=False)
    plain = judge.ask_case(clean, differentiate=False)
    write = judge.row_writer(name, case)
    if answer.output is None or plain.output is None:
        return write("value", "refused", answer.reason or plain.reason)
    call = judge.turn_mask(clean.draw())
    pairs = find_pairs(judge.spell(call))
    meets = pairs[..., 5]
    if array == "query":
        meets = np.broadcast_to(np.arange(pairs.shape[-2]) == 5, pairs.shape[:-1])
    untouched = ~meets
    if array == "value":
        is_nonfinite = ~np.isfinite(answer.output[..., 0])
    else:
        is_nonfinite = np.isnan(answer.output).min(-1, initial=True)
        if poison == "inf":  # a product is inf or -inf by the query's sign, and -inf takes no part
            meets = meets & (np.asarray(call["query"], np.float64)[..., 0] > 0)
    if not is_nonfinite[meets].all():
        index = tuple(int(axis) for axis in np.argwhere(meets & ~is_nonfinite)[0])
        finding = f"row {index} meets it, and holds {answer.output[index][0]:.6g}"
        return write("value", "wrong", finding, "weights")
    difference = judge.compare(answer.output, as_expected(plain.output), untouched[..., None])
    if difference is None:
        return write("value", "holds")
    if array == "value":
        finding = f"{POISONS[poison]} in a value reaches rows that may not attend to it"
        return write("value", "differs", finding, "output")
    finding = f"it reaches a row that may not attend to it: output{difference}"
    return write("value", "wrong", finding, "masked")


def check_no_tokens(judge: Judge) -> Iterator[Row]:
    """Check that no keys give 0 and no queries nothing."""
    for name, sizes in {"no tokens: no keys": {"S": 0}, "no tokens: no queries": {"T": 0}}.items():
        case = Case({**judge.sizes, **sizes})
        answer = judge.ask_case(case, differentiate=False)
        write = judge.row_writer(name, case)
        if answer.output is None:
            yield write("value", "refused", answer.reason)
        elif not answer.output.any():
            yield write("value", "holds")
        elif np.isnan(answer.output).all():
            yield write("value", "differs", "NaN in an empty row", "weights")
        else:
            yield write("value", "wrong", "numbers, where there are no keys", "weights")


def check_float_masks(judge: Judge) -> Iterator[Row]:
    """Check that an additive mask passed as `mask` is refused or added, never read as booleans."""
    if not judge.subject.takes(["mask"]):
        return
    case = Case(judge.sizes, {"mask": f"np.where({MASK}, 0.0, -np.inf).astype(np.float32)"})
    write, call = judge.row_writer("a float mask", case), case.draw()
    zeros = np.zeros((*call["query"].shape[:-1], call["value"].shape[-1])), np.zeros(call["query"].shape[:-1])
    asked, _ = judge.ask(call | {"mask": call["mask"] == 0}, differentiate=False)
    if asked.output is None:  # for another reason than its dtype
        yield write("value", "refused", asked.reason)
        return
    answer = judge.subject.answer(call, *zeros, differentiate=False)
    if answer.output is None:
        yield write("value", "holds", f"refused: {answer.reason}")
        return
    bare = {name: array for name, array in call.items() if name != "mask"}
    meant = {
        "": {"bias": call["mask"]},
        "the mask is read as booleans: 0 hides, -inf shows": {"mask": call["mask"] != 0},
    }
    for finding, options in meant.items():
        if judge.compare(answer.output, expect(bare | options, zeros, differentiate=False)["output"]) is None:
            yield write("value", "wrong", finding, "masked") if finding else write("value", "holds")
            return
    yield write("value", "wrong", "the mask is neither refused nor added", "masked")


def check_determinism(judge: Judge) -> Iterator[Row]:
    """Check that the same arrays give the same bits."""
    case = Case(judge.sizes)
    first, second = judge.ask_case(case), judge.ask_case(case)
    if first.output is None or second.output is None:
        return
    pairs: list[tuple[str, Array, Array]] = [("value", first.output, second.output)]
    pairs += [("gradient", gradient, second.gradients[name]) for name, gradient in first.gradients.items()]
    write = judge.row_writer("the same bits", case)
    for aspect, array, repeat in pairs:
        if not np.array_equal(array, repeat, equal_nan=True):
            yield write(aspect, "wrong", "a second call of the same arrays gives other bits")
            return
    yield write("all", "holds")


def check_two_axes(judge: Judge) -> Iterator[Row]:
    """Check that arrays (T, D) of one head are served, or refused."""
    if judge.subject.layout == "TD":
        return
    alone = Subject(judge.subject.fn, "TD", {}, judge.subject.kind, judge.subject.seconds)
    inner = Judge(alone, judge.imported, judge.name, judge.tolerance)
    inner.conventions = list(judge.conventions)
    inner.sizes |= {letter: judge.sizes[letter] for letter in "TDE"} | {"S": judge.sizes["T"]}
    rows = inner.keep_promise(Promise("arrays of two axes", "output"))
    yield from (row for row in rows if row.aspect == "value")


# The names of all rows of a check begin with its own.
EDGES = {
    "an empty row": check_empty_rows,
    "masked NaN and inf": check_masked_slots,
    "attended NaN and inf": check_attended_nan,
    "no tokens": check_no_tokens,
    "a float mask": check_float_masks,
    "the same bits": check_determinism,
    "arrays of two axes": check_two_axes,
    "dropout": check_dropout,
    "transforms": check_transforms,
}
