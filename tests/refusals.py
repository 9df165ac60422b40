"""Wrong calls, and what is said of them."""

import pytest


def assert_refused(*refusals, error=ValueError, run=lambda call: call()):
    """Each call, as `run` makes it, raises what matches its message: this error, or the one that follows."""
    for call, message, *other in refusals:
        with pytest.raises(other[0] if other else error, match=message):
            run(call)
