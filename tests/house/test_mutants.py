"""The planted faults of `make mutants` fit the package and the tests that are to see them."""

import functools
import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "mutants"))
import run  # noqa: E402

FAULTS = run.read_faults()
read = functools.cache(pathlib.Path.read_text)


@pytest.mark.parametrize("table", sorted({fault.table for fault in FAULTS}))
def test_every_fault_can_be_planted_and_its_tests_are_there(table):
    for fault in FAULTS:
        if fault.table == table:
            source = read(run.SOURCE / fault.file)
            assert fault.plant(source) != source, fault.name
            assert fault.tests, fault.name
            for test in fault.tests:
                file, _, function = test.partition("::")
                assert (TESTS / file).exists(), (fault.name, test)
                assert not function or f"def {function}(" in read(TESTS / file), (fault.name, test)


def test_a_fault_whose_place_is_gone_is_refused():
    with pytest.raises(ValueError, match="has its `before` 0 times"):
        FAULTS[0].plant("nothing of it")


def test_there_are_faults_enough_in_every_room():
    assert len(FAULTS) >= 150
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    rooms = {fault.file.partition("/")[0] for fault in FAULTS}
    assert rooms >= {path.name for path in run.SOURCE.iterdir() if (path / "__init__.py").exists()}


def test_every_slow_case_is_there():
    for case in read(TESTS / "slow_cases.txt").splitlines():
        file, _, function = case.partition("[")[0].partition("::")
        assert f"def {function}(" in read(run.ROOT / file), case
