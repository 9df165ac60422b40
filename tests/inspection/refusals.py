"""Wrong calls, and what is said of them."""

import pytest


def check_refusals(*refusals):
    """Each call raises what matches its message: a ValueError, or the error that follows."""
    for call, message, *error in refusals:
        with pytest.raises(error[0] if error else ValueError, match=message):
            call()
