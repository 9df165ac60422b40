"""What a run of fewer cases takes."""

import types

import economy

CASES = [types.SimpleNamespace(nodeid=f"test_one.py::test_this[{case}]") for case in range(1000)]


def test_one_case_in_five_is_about_a_fifth_and_no_other_is_taken_because_of_it():
    taken = economy.take_one_in(5, CASES)
    assert 160 < len(taken) < 240
    assert taken == [case for case in CASES if case in taken]
    assert economy.take_one_in(5, CASES[1:]) == [case for case in CASES[1:] if case in taken]
    # A list of five backends in the names does not decide which of them are run.
    assert {CASES.index(case) % 5 for case in taken} == {0, 1, 2, 3, 4}


def test_one_case_in_one_is_all():
    assert economy.take_one_in(1, CASES) == CASES
