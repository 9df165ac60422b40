"""Supervision of one of several processes that train: a parent outlives it and says what ended it.

When JAX loses the other processes, it ends this one on the spot: no exception, no exit code of ours. So the
command starts itself once more as a child, passes signals on to it, and puts its end into words. A child
whose parent is gone ends too: what was killed does not go on training.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from regard.cli import FAILED, INTERRUPTED, MISUSED
from regard.cli.command_words import translate_message
from regard.cli.commands import Train
from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.continuation import describe_start, spell_continuation
from regard.cli.interruption import STOPPING, handle_signals
from regard.training.membership import Membership, Patience, find_membership

ANNOUNCED_AFTER = 10
LINE = "REGARD_SUPERVISED_BY"  # the environment variable that tells a child its socket to the parent
JOINED, TOLD = b"j", b"t"
# How the runtimes of JAX, gloo and NCCL speak of others that are gone.
LOSS = re.compile(
    "(?i)gloo|nccl|unavailable|deadline|aborted|coordination|heartbeat|barrier|connection|socket"
)


def supervise_training(command: Train, console: Console) -> int:
    """Train in this process, or in a child of it where there are several; return the exit code."""
    with expected_errors():
        patience = command.patience
        membership = find_membership(command.coordinator, command.processes, command.process, os.environ)
    if membership is None:
        from regard.cli.training import run_training

        return run_training(command, console)
    if os.name == "posix" and LINE not in os.environ:
        return _watch(command, console, membership)
    return _take_part(command, console, membership, patience)


# The parent


def _watch(command: Train, console: Console, membership: Membership) -> int:
    """Run the command in a child; return its exit code, or explain the signal that ended it."""
    ours, theirs = socket.socketpair()
    program = "import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", program, *console.words],
        env=os.environ | {LINE: str(theirs.fileno())},
        pass_fds=(theirs.fileno(),),
        process_group=0,  # Ctrl-C comes here alone, and is passed on once
    )
    theirs.close()
    # The child may still save when this process is asked to stop.
    with ours, handle_signals(lambda number, frame: child.send_signal(number), *STOPPING):
        code = child.wait()
        ours.setblocking(False)
        messages = b""
        with suppress(BlockingIOError, ConnectionError):
            messages = ours.recv(64)
    if code >= 0:
        return code
    if JOINED not in messages and -code in STOPPING:
        console.fail("interrupted before all processes had come")
        return INTERRUPTED
    if TOLD not in messages:
        console.fail(_explain_end(-code, JOINED in messages, command, console.words, membership))
    return FAILED


def _explain_end(
    number: int, joined: bool, command: Train, words: Sequence[str], membership: Membership
) -> str:
    if not joined and number in (signal.SIGABRT, signal.SIGSEGV):
        return _explain_absence(membership)
    if number == signal.SIGABRT:
        return explain_loss("the lines above say more", command, words, membership)
    name = signal.Signals(number).name
    hint = ", as by a system out of memory" if number == signal.SIGKILL else ""
    return f"{membership} was ended by {name}{hint}\n{_advise(command, words)}"


def _explain_absence(membership: Membership) -> str:
    remedy = "start them all with the same --coordinator, the address of process 0"
    reason = f"not all of them came in time, or the address is wrong; {remedy}"
    return f"{membership} did not find the others{_locate(membership)}: {reason}"


def _locate(membership: Membership) -> str:
    return f" at {membership.coordinator}" if membership.coordinator else ""


def explain_loss(detail: str, command: Train, words: Sequence[str], membership: Membership) -> str:
    """Explain the loss of another process, and how to go on."""
    reason = f"it failed or was killed, or its machine or network did ({detail})"
    return f"{membership} stops, as another process was lost: {reason}\n{_advise(command, words)}"


def _advise(command: Train, words: Sequence[str]) -> str:
    again = spell_continuation(words, lost_devices=True)
    return (
        f"nothing is lost but what came after: this {describe_start(command.directory)}, on one process or, "
        f"with --coordinator, --processes and --process, on those that are left\n  {again}\n"
        "a mesh with * takes the devices that there are; a run goes on on any mesh"
    )


# The child


def _take_part(command: Train, console: Console, membership: Membership, patience: Patience) -> int:
    line = _open_line()
    _redirect_foreign_output()
    import jax

    from regard.cli.training import run_training
    from regard.training import processes

    try:
        with expected_errors(), _announce_waiting(console, line, membership, patience.join_seconds):
            processes.join(membership, patience)
    except UsageError:
        _tell(line, TOLD)
        raise
    _tell(line, JOINED)
    if not processes.is_first():
        console = Console(quiet=True, words=console.words)
    try:
        code = run_training(command, console)
    except (UsageError, processes.PeerError) as error:
        is_loss = not isinstance(error, processes.PeerError) and _is_loss(error.__cause__)
        if is_loss:
            console.fail(explain_loss(_shorten(error), command, console.words, membership))
        else:
            console.fail(translate_message(str(error), command))
        code = FAILED if is_loss else getattr(error, "code", MISUSED)
        _tell(line, TOLD)
        if is_loss or (code == FAILED and not processes.is_known(error.__cause__)):
            _end(code)  # the others wait for what will not come
    except Exception as error:
        # Anything may be on its way to the others, or never come: nobody is waited for.
        if _is_loss(error):
            console.fail(explain_loss(_shorten(error), command, console.words, membership))
        else:
            traceback.print_exc()
        _tell(line, TOLD)
        _end(FAILED)
    jax.distributed.shutdown()  # waits until all are done
    return code


@contextmanager
def _announce_waiting(
    console: Console, line: socket.socket | None, membership: Membership, seconds: float
) -> Iterator[None]:
    """Say now and then, while a block waits for the others, that it does; in the end, end this process."""
    came = threading.Event()

    def watch() -> None:
        passed = 0.0
        waiting = f"for the others{_locate(membership)}; it gives up after {seconds:g} s"
        for moment in (ANNOUNCED_AFTER, *range(60, int(seconds), 60)):
            if moment < seconds:
                if came.wait(moment - passed):
                    return
                passed = moment
                console.remark(f"{membership} has waited {moment:g} s {waiting}")
        if not came.wait(seconds - passed):
            console.fail(_explain_absence(membership))
            _tell(line, TOLD)
            _end(FAILED)

    with handle_signals(signal.SIG_DFL, signal.SIGINT):  # JAX waits without hearing Python's handlers
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            came.set()


def _is_loss(error: BaseException | None) -> bool:
    return isinstance(error, ValueError | RuntimeError) and bool(LOSS.search(str(error)))


def _shorten(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _open_line() -> socket.socket | None:
    """Open the socket to the parent; when that is gone, this process ends."""
    if (number := os.environ.pop(LINE, None)) is None:
        return None
    line = socket.socket(fileno=int(number))

    def wait() -> None:
        with suppress(OSError):
            line.recv(1)
        os._exit(FAILED)

    threading.Thread(target=wait, daemon=True).start()
    return line


def _tell(line: socket.socket | None, what: bytes) -> None:
    if line is not None:
        with suppress(OSError):
            line.sendall(what)


def _redirect_foreign_output() -> None:
    """Send to standard error what libraries print past Python: standard output may be read by a program."""
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=encoding, errors=errors)
    os.dup2(2, 1)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
