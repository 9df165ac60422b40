"""Checkpoints: whole training states on disk, complete or absent, verified byte by byte before they are used.

A checkpoint is a folder named after its step with the arrays (written by orbax) and `checkpoint.json`, which
lists every array's shape and dtype and every file (`checkpoint_files`). It is assembled under a hidden name
and moved into place in one step, so a kill leaves either the old checkpoints or the old ones and the new one.

Orbax writes while training goes on. Its CheckpointManager would number, commit and drop checkpoints too, but
has no public hook between its last write and its commit, where the digests must be taken; without them,
damage to metadata passes unseen.

Arrays that are divided over a mesh are written by the processes that hold them, and read back in whatever
parts are wanted: nothing in a checkpoint depends on the mesh.
"""

import functools
import itertools
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from regard.paths import read_path
from regard.training import checkpoint_files, processes
from regard.training.checkpoint_files import INDEX, Check, CheckpointError, finish_digests, verify_files

__all__ = ["INDEX", "Check", "Checkpoint", "CheckpointError", "Saving", "finish_digests", "fit"]
__all__ += ["list_checkpoints", "load", "load_newest", "save", "start_saving", "tidy", "verify_files"]

_SAVES = itertools.count()  # of all processes, which save alike


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, whose arrays are read when they are asked for."""

    path: Path
    step: int
    kinds: dict[str, tuple[tuple[int, ...], np.dtype]]  # by path in the state, such as `params/head/kernel`
    record: dict[str, Any]  # what was saved beside the arrays, plain JSON values
    files: checkpoint_files.Files = field(default_factory=dict)  # size and SHA-256 of each, by path

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by path, whole, as NumPy arrays of this process."""
        try:
            templates = {name: np.zeros(*kind) for name, kind in self.kinds.items()}
        except (MemoryError, ValueError) as error:
            raise CheckpointError(f"{self.path} lists arrays that memory cannot hold: {error}") from error
        return self.read(templates)

    @property
    def note(self) -> str | None:
        """Say which files had no digests yet when their processes ended; None when all had."""
        bare = sum(digest is None for _, digest in self.files.values())
        counted = f"{bare} of {len(self.files)} files of {self.path} were checked by size alone"
        return f"{counted}: training ended before it had taken their SHA-256" if bare else None

    def read(self, templates: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays in the form of templates: NumPy arrays, or `jax.ShapeDtypeStruct` with a sharding."""
        on_host = all(isinstance(template, np.ndarray) for template in templates.values())
        process, alone = jax.process_index(), on_host and jax.process_count() > 1
        readers = {"primary_host": process, "active_processes": {process}} if alone else {}
        options = ocp.options.MultiprocessingOptions(**readers)
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
        reader = ocp.Checkpointer(handler, multiprocessing_options=options)
        try:
            wanted = ocp.args.StandardRestore(_nest(templates))
            nested = reader.restore((self.path / "state").absolute(), args=wanted)
        except Exception as error:  # orbax and tensorstore raise many types; all mean the same here
            raise CheckpointError(f"{self.path} cannot be read by orbax-checkpoint: {error}") from error
        return {name: _make_empty(template) for name, template in templates.items()} | _leaves(nested)


class Saving:
    """A checkpoint that is being written while training goes on, and its folder, once it is whole."""

    def __init__(self, path: Path, finish: Callable[[], None]):
        self.path, self._written = path, Future[None]()
        threading.Thread(target=self._run, args=(finish,), name="checkpoint", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """True when this process has nothing more to write, or has failed to."""
        return self._written.done()

    def wait(self) -> Path:
        """Return its folder when it is whole; where there are several processes, all of them call this."""
        processes.everyone(self.end)
        return self.path

    def end(self) -> None:
        """Wait for this process's part; raise what went wrong with it."""
        self._written.result()

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            self._written.set_result(finish())
        except BaseException as error:  # for the thread that waits
            self._written.set_exception(error)


def save(directory: Path, step: int, state: Any, record: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Save a state as `start_saving`, wait until it is whole and has its digests; return the new folder."""
    path = start_saving(directory, step, state, record, keep=keep).wait()
    processes.everyone(finish_digests)
    return path


def demand_plain(directory: Path) -> None:
    """Raise for a path that Orbax takes for a pattern or an address: it would not find what it wrote."""
    path = directory.absolute()
    if {"[", "\\"} & {*path.as_posix()} or any(part.endswith(":") for part in path.parts[1:]):
        raise CheckpointError(
            f"{directory}: expected a path without [ and \\, and without : at the end of a name, also of the"
            " folders around it, as Orbax reads them as patterns and addresses; give another directory"
        )


def start_saving(
    directory: Path, step: int, state: Any, record: Mapping[str, Any], *, keep: int = 2
) -> Saving:
    """Save a state so that it appears complete or not at all, then drop all but the newest checkpoints.

    Returns when the state was copied: an update may then take its memory. Where there are several processes,
    all of them call this; each writes what it holds. `step`, the updates done so far, names the checkpoint,
    `record` holds JSON values to keep beside the arrays, and `keep`, at least 1, counts the checkpoints to
    keep. One checkpoint is written at a time: wait for it before the next. Nothing is overwritten.
    """
    demand_plain(directory := read_path("directory", directory))
    target, draft = directory / f"{step:08d}", directory / f".{step:08d}.draft"
    # Orbax gets arrays of one device as NumPy arrays; those that share memory with JAX's keep it.
    arrays = {
        name: leaf if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 else np.asarray(leaf)
        for name, leaf in _leaves(state).items()
    }
    kinds = {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}

    def prepare() -> None:
        if target.exists():
            raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    processes.alone(prepare)
    number, divided, seconds = next(_SAVES), jax.process_count() > 1, processes.patience.wait_seconds
    writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), timeout_secs=seconds)
    with _writing(draft, target):
        writer.save((draft / "state").absolute(), args=ocp.args.StandardSave(_nest(arrays)))

    def commit() -> None:
        checkpoint_files.write_index(draft, step, kinds, record, divided=divided)
        draft.rename(target)
        _sync_folder(directory)
        for stale in list_checkpoints(directory)[:-keep]:
            discard = stale.with_name(f".{stale.name}.draft")
            stale.rename(discard)  # half-deleted checkpoints must not look like damaged ones
            shutil.rmtree(discard, ignore_errors=True)

    def finish() -> None:
        try:
            with _writing(draft, target):
                writer.close()  # waits; where there are several processes, for all
            if processes.is_first():
                commit()
        finally:
            meet = ocp.multihost.get_barrier_sync_fn()  # nobody looks before the folder is in its place
            meet(key=f"regard save {number}", timeout_ms=1000 * seconds)
        if divided:
            checkpoint_files.start_digests(target, jax.process_index())

    return Saving(target, finish)


def tidy(directory: Path) -> None:
    """Remove what kills left of checkpoints that were being written or dropped."""
    for draft in directory.glob(".*.draft"):
        shutil.rmtree(draft, ignore_errors=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoint folders from oldest to newest; a missing directory has none."""
    if not directory.is_dir():
        return []
    folders = (path for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())
    return sorted(folders, key=lambda path: int(path.name))


def load(path: Path, *, check: Check = verify_files) -> Checkpoint:
    """Open one checkpoint after checking its files; by default, that every one is what was written."""
    index = checkpoint_files.read_index(path)
    check(path, index["files"])
    kinds = {name: (tuple(shape), jax.numpy.dtype(dtype)) for name, (shape, dtype) in index["arrays"].items()}
    return Checkpoint(path, index["step"], kinds, index["record"], index["files"])


def load_newest(
    directory: Path, *, check: Check = verify_files, skip_damaged: bool = False
) -> tuple[Checkpoint | None, dict[Path, CheckpointError]]:
    """Open the newest checkpoint, or None; return with it the damaged ones that were skipped."""
    damaged: dict[Path, CheckpointError] = {}
    saved = list_checkpoints(directory)
    while saved:
        newest = saved.pop()
        try:
            return load(newest, check=check), damaged
        except CheckpointError as error:
            damaged[newest] = error
            if saved and skip_damaged:
                continue
            then = f"go on from step {int(saved[-1].name)}" if saved else "start again"
            hint = "; open_run(..., resume='newest-whole') does so by itself" if saved else ""
            raise CheckpointError(f"{error}\nnothing was changed; remove {newest} to {then}{hint}") from error
    return None, damaged


def fit(checkpoint: Checkpoint, template: Any, *, prefix: str = "", places: Any = None) -> Any:
    """Put a checkpoint's arrays below the path `prefix` into a template of their shapes and dtypes.

    Where `places`, a pytree of shardings like it, is given, every process reads its parts of every array, and
    all must call this; else arrays are whole, on JAX's default device. A moving average of the parameters
    that only the template has begins as they are; one that only the checkpoint has is left out.
    """
    expected = {f"{prefix}{name}": (leaf.shape, leaf.dtype) for name, leaf in _leaves(template).items()}
    saved = {name: kind for name, kind in checkpoint.kinds.items() if name.startswith(prefix)}
    sources = {name: name for name in expected}
    if not prefix and _drop_average(expected) == expected:
        saved = _drop_average(saved)
    elif not prefix and _drop_average(saved) == saved:
        sources = {name: name.replace("average/", "params/", 1) for name in expected}
        saved = {name: saved[source] for name, source in sources.items() if source in saved} | saved
    differences = [
        f"  {name}: expected {_describe(expected.get(name))}, found {_describe(saved.get(name))}"
        for name in sorted(expected.keys() | saved.keys())
        if expected.get(name) != saved.get(name)
    ]
    if differences:
        if len(differences) > 8:
            differences[8:] = [f"  and {len(differences) - 8} more"]
        lines = "\n".join(differences)
        raise CheckpointError(f"{checkpoint.path} holds another model or optimizer:\n{lines}")
    if places is None:
        held = {name: jax.numpy.asarray(checkpoint.arrays[name]) for name in sources.values()}
    else:
        placed = zip(expected.items(), jax.tree.leaves(places), strict=True)
        shapes = {name: jax.ShapeDtypeStruct(*kind, sharding=sharding) for (name, kind), sharding in placed}
        # Orbax reads all that there is: an average that is left out, too.
        averages = {name: name.replace("average/", "params/", 1) for name in checkpoint.kinds.keys() - saved}
        held = checkpoint.read(
            {source: shapes[name] for name, source in sources.items()}
            | {name: shapes[param] for name, param in averages.items()}
        )
    # Copied where two have one source, as both are donated to the first update.
    arrays = {
        name: held[source] if name == source else jax.numpy.copy(held[source])
        for name, source in sources.items()
    }
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in expected])


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by readable path, in the order of the tree."""
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in entries}


@contextmanager
def _writing(draft: Path, target: Path) -> Iterator[None]:
    """Remove the draft where orbax fails, and tell troubles of the system as such."""
    try:
        with _hush_writers():
            yield
    except Exception as error:  # tensorstore tells troubles of the system in the text of a ValueError
        _discard(draft)
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(target)) from error


def _discard(draft: Path) -> None:
    """Remove a draft that failed, and what writers that were still under way put there."""
    for _ in range(30):
        shutil.rmtree(draft, ignore_errors=True)
        time.sleep(0.1)
        if not draft.exists():
            return


@contextmanager
def _hush_writers() -> Iterator[None]:
    """Keep quiet what orbax's threads print about an error beside raising it, hundreds of lines."""
    logger, before = logging.getLogger("absl"), sys.unraisablehook
    was_disabled, logger.disabled = logger.disabled, True
    logging.getLogger("asyncio").addFilter(_is_news)

    def print_others(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            before(raised)

    sys.unraisablehook = print_others
    try:
        yield
        sys.unraisablehook = before  # after an error writers that were still under way have more to say
    finally:
        logger.disabled = was_disabled


def _is_news(entry: logging.LogRecord) -> bool:
    """Return False where asyncio tells, at some time later, of a write whose failure was raised."""
    return not (entry.exc_info and "os_error_code" in str(entry.exc_info[1]))


def _make_empty(template: Any) -> Any:
    """Return the array for a template without elements, which orbax does not keep; others as they are."""
    if isinstance(template, np.ndarray) or template.size:
        return template
    return jax.numpy.zeros(template.shape, template.dtype, device=template.sharding)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest leaves by path, without the empty ones: orbax refuses them, and the index knows their shapes."""
    return unflatten_dict({path: leaf for path, leaf in flat.items() if leaf.size}, sep="/")


def _describe(kind: tuple[tuple[int, ...], Any] | None) -> str:
    return "nothing" if kind is None else f"{kind[1]}{list(kind[0])}"


def _sync_folder(directory: Path) -> None:
    """Make a rename in this folder survive a power cut, where the system allows it."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _drop_average(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a state without those of its moving average."""
    return {name: kind for name, kind in kinds.items() if not name.startswith("average/")}
