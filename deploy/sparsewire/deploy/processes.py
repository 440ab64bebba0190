"""Processes of a run: how a role says that it runs, and how its parent starts, watches and ends it.

A role (`learner`, `worker-eu`) writes `pid` into its folder when it starts: the process id with the moment at which
that process began, so that a recycled id is never taken for it. A supervisor finds by it also a process that was
restarted by hand. A child started with `start_child` dies with its parent: on Linux the kernel kills it (the child
asks for that in `follow_parent`); everywhere the parent ends it by id.

`end_processes` is SIGTERM, a bounded wait, SIGKILL for what is left, descendants included, and returns when all are
gone. Nothing here ends a process that it has not been given.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

from sparsewire.sync.errors import DeadlineExceededError, SparsewireError

PARENT_VARIABLE = "SPARSEWIRE_PARENT_PID"
"""Environment variable by which a parent tells a child whom to follow."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
_KILL_DEADLINE = timedelta(seconds=10)
_LOG_TAIL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of this machine's history: an id together with when it began."""

    pid: int
    began: str
    """Opaque; differs between two processes that had the same id."""

    def is_alive(self) -> bool:
        """Say whether this very process still runs; a zombie does not."""
        return _began(self.pid) == self.began


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process; None when there is none with this id."""
    began = _began(pid)
    return None if began is None else ProcessIdentity(pid=pid, began=began)


def _began(pid: int) -> str | None:
    """Return when a running process began, in the system's own terms; None for an absent one and for a zombie."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The command name in parentheses may hold anything; state is the first field after it, start time the 20th.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    shown = subprocess.run(
        ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, timeout=10
    )
    state, _, began = shown.stdout.strip().partition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def write_pid_file(directory: Path) -> None:
    """Say that this process now plays the role of `directory`; replaces whoever did before."""
    identity = identify(os.getpid())
    if identity is None:
        raise SparsewireError(f"cannot tell when process {os.getpid()} began; is /proc mounted?")
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / f".pid.{identity.pid}"
    scratch.write_text(json.dumps({"pid": identity.pid, "began": identity.began}) + "\n")
    scratch.replace(directory / "pid")


def read_pid_file(directory: Path) -> ProcessIdentity | None:
    """Return the living process that plays the role of `directory`; None when there is none."""
    try:
        fields = json.loads((directory / "pid").read_text())
        identity = ProcessIdentity(pid=int(fields["pid"]), began=str(fields["began"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return identity if identity.is_alive() else None


def follow_parent() -> None:
    """Die when the parent dies, if a parent asked for it in the environment; Linux only, elsewhere nothing happens.

    Raises:
        SparsewireError: the parent is dead already.
    """
    wanted = os.environ.pop(PARENT_VARIABLE, None)
    if wanted is None or sys.platform != "linux":
        return
    die_with_parent()
    if os.getppid() != int(wanted):
        raise SparsewireError("the process that started this one is gone; start it again by hand without it")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; survives exec. Linux only."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


@dataclass(slots=True, kw_only=True)
class Child:
    """A process started here, or restarted by hand and adopted by its pid file."""

    role: str
    directory: Path
    process: subprocess.Popen[bytes] | None
    identity: ProcessIdentity | None
    """None for a child that ended before it could be identified."""

    def exit_code(self) -> int | None:
        """Return how it ended (negative for a signal), 0 for an adopted one that is gone; None while it runs."""
        if self.process is not None:
            return self.process.poll()
        return None if self.identity is not None and self.identity.is_alive() else 0


def start_child(
    role: str, command: Sequence[str], *, directory: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Start a role with its output appended to `directory/log.txt`; call it from the main thread.

    The kernel ties a child to the thread that started it: were that thread to end, the child would be killed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "log.txt").open("ab") as log:
        process = _spawn(command, log, {**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())})
    return Child(role=role, directory=directory, process=process, identity=identify(process.pid))


def _spawn(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )


def log_tail(directory: Path, num_lines: int = 15) -> str:
    """Return the last lines of a role's log."""
    path = directory / "log.txt"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])


def end_processes(children: Iterable[Child], *, grace: timedelta) -> list[str]:
    """End all `children`: SIGTERM, up to `grace` for them to finish, SIGKILL for what is left, descendants included.

    Returns the roles that had to be killed, after every process is gone.

    Raises:
        DeadlineExceededError: a process outlives SIGKILL (uninterruptible I/O); the message names it.
    """
    children = list(children)
    family: dict[str, set[ProcessIdentity]] = {}
    for child in children:
        if child.identity is not None:
            family[child.role] = {child.identity, *descendants(child.identity)}
            if child.identity.is_alive():
                _signal(child.identity, signal.SIGTERM)
    _wait_until_gone(children, family, grace)
    killed = [role for role, members in family.items() if any(member.is_alive() for member in members)]
    for role in killed:
        for member in tuple(family[role]):
            family[role] |= descendants(member)
        for member in family[role]:
            _signal(member, signal.SIGKILL)
    _wait_until_gone(children, family, _KILL_DEADLINE)
    left = [f"{role} (pid {m.pid})" for role, members in family.items() for m in members if m.is_alive()]
    if left:
        raise DeadlineExceededError(f"still running {_KILL_DEADLINE} after SIGKILL: {', '.join(left)}")
    return killed


def _wait_until_gone(children: Sequence[Child], family: Mapping[str, set[ProcessIdentity]], limit: timedelta) -> None:
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        for child in children:
            if child.process is not None:
                child.process.poll()
        if not any(member.is_alive() for members in family.values() for member in members):
            return
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _signal(identity: ProcessIdentity, number: signal.Signals) -> None:
    if not identity.is_alive():
        return
    try:
        os.kill(identity.pid, number)
    except ProcessLookupError:
        return


def descendants(identity: ProcessIdentity) -> set[ProcessIdentity]:
    """Return the living processes below one; Linux only, elsewhere empty (torchrun ends its own ranks)."""
    if sys.platform != "linux":
        return set()
    found: set[ProcessIdentity] = set()
    frontier = [identity.pid] if identity.is_alive() else []
    while frontier:
        pid = frontier.pop()
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                pids = [int(word) for word in listing.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            for child in pids:
                member = identify(child)
                if member is not None and member not in found:
                    found.add(member)
                    frontier.append(child)
    return found
