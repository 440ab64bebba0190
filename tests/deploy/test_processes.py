"""Roles say who plays them, children follow their parent, and whoever is ended is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sparsewire.deploy.processes import (
    Child,
    ProcessIdentity,
    descendants,
    end_processes,
    identify,
    log_tail,
    read_pid_file,
    start_child,
    write_pid_file,
)

SLEEP = "import time; time.sleep(120)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(120)"
)


def wait_for(condition: Callable[[], object], what: str, *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str, str], Child]]:
    children: list[Child] = []

    def start(role: str, program: str) -> Child:
        child = start_child(role, [sys.executable, "-c", program], directory=tmp_path / role)
        children.append(child)
        return child

    yield start
    end_processes(children, grace=timedelta())


def alive(child: Child) -> bool:
    return child.identity is not None and child.identity.is_alive()


def test_a_pid_file_names_the_living_process_and_nobody_after_its_death(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from sparsewire.deploy.processes import write_pid_file; "
        "write_pid_file(Path(sys.argv[1])); time.sleep(120)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as process:
        wait_for(lambda: read_pid_file(tmp_path), "the pid file")
        found = read_pid_file(tmp_path)
        assert found is not None
        assert found.pid == process.pid
        process.kill()
        process.wait(10)
    assert read_pid_file(tmp_path) is None


def test_a_recycled_process_id_is_not_taken_for_the_one_that_wrote_the_file(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(json.dumps({"pid": os.getpid(), "began": "1"}))
    assert read_pid_file(tmp_path) is None
    write_pid_file(tmp_path)
    assert read_pid_file(tmp_path) == identify(os.getpid())


@pytest.mark.parametrize("content", ["", "17", "{}", '{"pid": "x", "began": "1"}', "[1]"])
def test_a_damaged_pid_file_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "pid").write_text(content)
    assert read_pid_file(tmp_path) is None


def test_ending_a_process_that_obeys_lets_it_finish(started: Callable[[str, str], Child]) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('tidied up', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(120)"
    )
    child = started("obedient", program)
    wait_for(lambda: "ready" in log_tail(child.directory), "start")
    assert end_processes([child], grace=timedelta(seconds=20)) == []
    assert child.exit_code() == 0
    assert log_tail(child.directory).endswith("tidied up")


def test_ending_a_process_that_does_not_obey_kills_it_after_the_grace(started: Callable[[str, str], Child]) -> None:
    child = started("stubborn", STUBBORN)
    wait_for(lambda: "ready" in log_tail(child.directory), "start")
    begun = time.monotonic()
    assert end_processes([child], grace=timedelta(seconds=0.5)) == ["stubborn"]
    assert 0.5 <= time.monotonic() - begun < 10
    assert child.exit_code() == -signal.SIGKILL
    assert not alive(child)


def test_ending_a_process_ends_what_it_has_started(started: Callable[[str, str], Child]) -> None:
    program = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True); time.sleep(120)"
    )
    child = started("family", program)
    wait_for(lambda: "ready" in log_tail(child.directory), "start of the grandchild")
    assert child.identity is not None
    below = descendants(child.identity)
    assert len(below) == 1
    end_processes([child], grace=timedelta(seconds=0.5))
    assert not any(member.is_alive() for member in below)


def test_ending_an_adopted_process_needs_no_parenthood(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True) as process:
        identity = identify(process.pid)
        assert identity is not None
        adopted = Child(role="adopted", directory=tmp_path, process=None, identity=identity)
        assert adopted.exit_code() is None
        assert end_processes([adopted], grace=timedelta(seconds=20)) == []
        assert adopted.exit_code() == 0
        process.wait(10)


def test_ending_what_is_gone_already_is_no_error(tmp_path: Path) -> None:
    gone = Child(role="gone", directory=tmp_path, process=None, identity=ProcessIdentity(pid=os.getpid(), began="1"))
    assert end_processes([gone], grace=timedelta(seconds=5)) == []
    assert identify(os.getpid()) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ties children to parents on Linux only")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = (
        "import time; from sparsewire.deploy.processes import follow_parent; follow_parent(); "
        "print('ready', flush=True); time.sleep(120)"
    )
    parent = (
        "import sys, time; from pathlib import Path; from sparsewire.deploy.processes import start_child; "
        f"child = start_child('role', [sys.executable, '-c', {child!r}], directory=Path(sys.argv[1])); "
        "print(child.identity.pid, flush=True); time.sleep(120)"
    )
    with subprocess.Popen([sys.executable, "-c", parent, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        identity = identify(int(process.stdout.readline()))
        assert identity is not None
        wait_for(lambda: "ready" in log_tail(tmp_path), "start of the child")
        process.kill()
        process.wait(10)
        wait_for(lambda: not identity.is_alive(), "the child's death")


def test_a_child_whose_parent_is_gone_already_refuses_to_start() -> None:
    program = "from sparsewire.deploy.processes import follow_parent; follow_parent()"
    environment = {**os.environ, "SPARSEWIRE_PARENT_PID": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (sys.platform != "linux" or os.getpid() == 1)
    assert "start it again by hand" in done.stderr
