"""Index notation: contractions are read as they are evaluated, and mistakes are named."""

import jax
import numpy as np
import pytest

from regard.theory import contract, explain_einsum


def test_indices_are_told_their_roles():
    found = explain_einsum("hia,hja->hij")
    assert (found.batch, found.free, found.summed, found.diagonal) == (("h",), ("i", "j"), ("a",), ())
    assert (found.sizes, found.output_shape, found.multiplications) == (None, None, None)
    assert "contracted" in str(found)
    found = explain_einsum("ij->i")
    assert (found.free, found.summed, found.batch) == (("i",), ("j",), ())
    assert "in one operand only: added up" in str(found)


def test_a_missing_arrow_sorts_the_result():
    assert explain_einsum("ba,ca").output == "bc"
    assert explain_einsum("ba").output == "ab"
    assert explain_einsum("...ia,...ja").output == "...ij"


def test_a_repeated_index_is_named_a_diagonal():
    # One letter for batch and width: the public package attn_tensors reads a diagonal there.
    found = explain_einsum("bib,hba->bhia", np.ones((3, 5, 3)), np.ones((2, 3, 7)))
    assert found.diagonal == ("b",)
    assert "b = 3: twice in one operand: only its diagonal is read" in str(found)
    with pytest.raises(ValueError, match=r"operand 0: expected size 4 for index 'b', as in operand 0; got 3"):
        explain_einsum("bib,hba->bhia", np.ones((4, 5, 3)), np.ones((2, 3, 7)))


def test_leading_axes_broadcast():
    arrays = np.ones((7, 1, 2, 3)), jax.ShapeDtypeStruct((5, 11, 3), np.float32)  # shapes alone are read
    found = explain_einsum("...ia,...ja->...ij", *arrays)
    assert found.output_shape == (7, 5, 2, 11)
    assert found.multiplications == 7 * 5 * 2 * 11 * 3
    assert "leading axes that broadcast, (7, 5)" in str(found)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "message"),
    [
        ("ia,ja->ij", [(2, 3)], r"arrays: expected 2, one per operand of 'ia,ja->ij'; got 1"),
        ("ia,ja->ij", [(2, 3), (5, 7)], r"operand 1: expected size 3 for index 'a', as in operand 0; got 7"),
        ("ia,ja->ij", [(2, 3), (5,)], r"operand 1: expected 2 axes, one per index of 'ja', got 1"),
        ("i...a->...i", [(2,)], r"operand 0: expected at least 2 axes"),
        ("ia,ja->ik", [], r"index 'k' of the result is in no operand"),
        ("ia,ja->ii", [], r"index 'i' is twice in the result"),
        ("i1,ja->ij", [], r"expected letters.*got '1'"),
        ("ia,ja->i->j", [], r"expected letters"),
        ("...i...->i", [], r"at most one '...'"),
        ("...i->i", [], r"'...' is in an operand, not in the result"),
        ("i->...i", [], r"'...' is in the result of '.*' only"),
        ("...i,...i->...", [(2, 5), (3, 5)], r"axes under '...' that broadcast, got \[\(2,\), \(3,\)\]"),
    ],
)
def test_errors_name_the_index(subscripts, shapes, message):
    with pytest.raises(ValueError, match=message):
        explain_einsum(subscripts, *(np.ones(shape) for shape in shapes))
    with pytest.raises(ValueError, match=message):
        contract(subscripts, *(np.ones(shape) for shape in shapes or [(2, 2), (2, 2)]))


def test_kinds_are_checked():
    with pytest.raises(TypeError, match="subscripts: expected a string"):
        explain_einsum(("ia", "ja"))
    with pytest.raises(TypeError, match="operand 1: expected a floating-point array, got int32"):
        contract("i,i->", np.ones(2), np.ones(2, np.int32))
