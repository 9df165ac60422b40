"""Numbers of theory beside those that they are to be."""

import numpy as np


def close(actual, expected, tolerance=1e-10, name=""):
    """Agree to ten digits, or to the tolerance given."""
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance, err_msg=name)
