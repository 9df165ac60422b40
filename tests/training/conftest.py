"""A tiny run that many tests of training read; who writes takes a copy."""

import jax
import pytest

from small_runs import Killer, begin, stop_after, tiny_copy, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run from start to end: its directory, outcome, listener, and the lines that a function was told."""
    directory, recorder, lines = tmp_path_factory.mktemp("whole") / "run", Killer(), []

    def listen(name, *ignored, **more):
        if "backend_compile" in name and ("preparing", "ended") in recorder.events:
            recorder.remember("compiled", None)

    jax.monitoring.register_event_duration_secs_listener(listen)
    outcome = train(directory, tiny_copy(), progress=recorder, log=lines.append)
    jax.monitoring.unregister_event_duration_listener(listen)
    return directory, outcome, recorder, lines


@pytest.fixture(scope="session")
def half(tmp_path_factory):
    """The same, stopped after step 9, with checkpoints at 7 and 9."""
    directory = tmp_path_factory.mktemp("half") / "run"
    train(directory, tiny_copy(), stop=stop_after(9))
    return directory


@pytest.fixture(scope="session")
def begun(tmp_path_factory):
    directory = tmp_path_factory.mktemp("begun") / "run"
    begin(directory, tiny_copy())
    return directory
