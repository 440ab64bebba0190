"""The spool: durable, bounded, in order, and loud about damage."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    LimitExceededError,
    SpoolFullError,
    StoreUnavailableError,
)
from sparsewire.sync.trajectories import Lease, SamplingParams, Trajectory, TrajectorySpool
from sparsewire.sync.trajectories.wire import encode_trajectory

Complete = Callable[..., Trajectory]

LEASE = Lease(
    group=0,
    attempt=0,
    task="addition",
    item=1,
    samples=(0, 1),
    expires_in=timedelta(seconds=60),
    sampling=SamplingParams(temperature=1.0, max_new_tokens=12),
)


def samples_in(spool: TrajectorySpool) -> list[int]:
    return [spooled.key.sample for spooled in spool.peek(after=0, max_trajectories=1000, max_bytes=1 << 30)]


def test_entries_keep_order_survive_reopening_and_leave_on_removal(tmp_path: Path, complete: Complete) -> None:
    path = tmp_path / "deep" / "spool"
    with TrajectorySpool(path=path, run="r1") as spool:
        for sample in (4, 2, 9):
            spool.append(complete(LEASE, sample))
        spool.append(complete(LEASE, 2))
        assert (spool.num_trajectories, samples_in(spool)) == (3, [4, 2, 9])
    with TrajectorySpool(path=path, run="r1") as spool:
        first, second, _ = spool.peek(after=0, max_trajectories=9, max_bytes=1 << 30)
        assert first.payload == encode_trajectory(complete(LEASE, 4))
        assert [s.key.sample for s in spool.peek(after=first.entry, max_trajectories=1, max_bytes=1)] == [2]
        spool.remove([first.entry, second.entry, second.entry, 12345])
        assert (spool.num_trajectories, samples_in(spool)) == (1, [9])
        assert spool.num_bytes == len(encode_trajectory(complete(LEASE, 9)))
    with TrajectorySpool(path=path, run="r1") as spool:
        spool.append(complete(LEASE, 1))
        assert samples_in(spool) == [9, 1]
        assert spool.peek(after=0, max_trajectories=9, max_bytes=1 << 30)[-1].entry > second.entry


def test_peek_stays_within_its_bounds_but_gives_at_least_one(tmp_path: Path, complete: Complete) -> None:
    with TrajectorySpool(path=tmp_path / "s", run="r1") as spool:
        for sample in range(5):
            spool.append(complete(LEASE, sample, num_tokens=1000))
        size = spool.num_bytes // 5
        assert len(spool.peek(after=0, max_trajectories=9, max_bytes=1)) == 1
        assert len(spool.peek(after=0, max_trajectories=9, max_bytes=3 * size + 50)) == 3
        assert len(spool.peek(after=0, max_trajectories=2, max_bytes=1 << 30)) == 2


def test_a_full_spool_refuses_and_accepts_again_when_drained(tmp_path: Path, complete: Complete) -> None:
    size = len(encode_trajectory(complete(LEASE, 1, num_tokens=1000)))
    with TrajectorySpool(path=tmp_path / "s", run="r1", max_bytes=3 * size + 100) as spool:
        for sample in range(3):
            spool.append(complete(LEASE, sample, num_tokens=1000))
        with pytest.raises(SpoolFullError, match="3 of 100000 trajectories"):
            spool.append(complete(LEASE, 3, num_tokens=1000))
        with pytest.raises(SpoolFullError):
            spool.append_when_room(complete(LEASE, 3, num_tokens=1000), timeout=timedelta(milliseconds=20))
        assert samples_in(spool) == [0, 1, 2]
        waiting = threading.Thread(
            target=spool.append_when_room,
            args=(complete(LEASE, 3, num_tokens=1000),),
            kwargs={"timeout": timedelta(seconds=30)},
        )
        waiting.start()
        spool.remove([spool.peek(after=0, max_trajectories=1, max_bytes=1)[0].entry])
        waiting.join(30)
        assert samples_in(spool) == [1, 2, 3]
        with pytest.raises(LimitExceededError, match="raise max_bytes"):
            spool.append(complete(LEASE, 9, num_tokens=10_000))
    with TrajectorySpool(path=tmp_path / "s", run="r1", max_trajectories=3) as spool, pytest.raises(SpoolFullError):
        spool.append(complete(LEASE, 4))


def test_waiting_sees_new_entries_and_emptiness(tmp_path: Path, complete: Complete) -> None:
    now, soon = timedelta(0), timedelta(seconds=30)
    with TrajectorySpool(path=tmp_path / "s", run="r1") as spool:
        assert not spool.wait_for_entry(after=0, timeout=now)
        assert spool.wait_until_empty(timeout=now)
        thread = threading.Thread(target=spool.append, args=(complete(LEASE, 0),))
        thread.start()
        assert spool.wait_for_entry(after=0, timeout=soon)
        thread.join()
        (spooled,) = spool.peek(after=0, max_trajectories=9, max_bytes=1 << 30)
        assert not spool.wait_for_entry(after=spooled.entry, timeout=now)
        assert not spool.wait_until_empty(timeout=now)
        spool.remove([spooled.entry])
        assert spool.wait_until_empty(timeout=now)
        assert not spool.wait_for_entry(after=0, timeout=now)


def test_a_spool_belongs_to_one_run_and_one_process(tmp_path: Path, complete: Complete) -> None:
    path = tmp_path / "s"
    with TrajectorySpool(path=path, run="r1") as spool, pytest.raises(ConfigError, match="belongs to run 'r2'"):
        spool.append(complete(LEASE, 0, run="r2"))
    with pytest.raises(ConfigError, match="made for run 'r1', not 'r2'"), TrajectorySpool(path=path, run="r2"):
        pass
    with pytest.raises(StoreUnavailableError, match="not open"):
        spool.append(complete(LEASE, 0))
    program = (
        "import sys; from pathlib import Path; from sparsewire.sync.trajectories import TrajectorySpool\n"
        "with TrajectorySpool(path=Path(sys.argv[1]), run='r1'): print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="in use by another process"), TrajectorySpool(path=path, run="r1"):
            pass
        other.kill()
    with TrajectorySpool(path=path, run="r1") as spool:
        assert spool.num_trajectories == 0


def filled(path: Path, complete: Complete) -> bytes:
    with TrajectorySpool(path=path, run="r1") as spool:
        for sample in range(20):
            spool.append(complete(LEASE, sample, num_tokens=500))
    return path.read_bytes()


def test_damage_of_the_file_is_named_with_the_remedy(tmp_path: Path, complete: Complete) -> None:
    path = tmp_path / "s"
    content = filled(path, complete)
    payload = encode_trajectory(complete(LEASE, 7, num_tokens=500))
    inside = content.index(payload[-200:]) + 50
    damages = {
        "bit": content[:inside] + bytes([content[inside] ^ 4]) + content[inside + 1 :],
        "empty": b"",
        "short": content[:100],
        "half": content[: len(content) // 2],
        "tail": content[:-4096],
        "not a database": b"x" * len(content),
        "page": content[:8192] + bytes(4096) + content[12288:],
    }
    for damage in damages.values():
        path.write_bytes(damage)
        with (
            pytest.raises(DamagedError, match=r"spool .*/s is damaged: .*; move the file away"),
            TrajectorySpool(path=path, run="r1"),
        ):
            pass
        assert path.read_bytes() == damage
    path.write_bytes(content)
    with TrajectorySpool(path=path, run="r1") as spool:
        assert spool.num_trajectories == 20


def test_entries_that_vanish_are_damage(tmp_path: Path, complete: Complete) -> None:
    path = tmp_path / "s"
    filled(path, complete)
    outside = sqlite3.connect(path)
    outside.execute("DELETE FROM trajectories WHERE sample = 3")
    outside.commit()
    outside.close()
    with pytest.raises(DamagedError, match="holds 19 entries"), TrajectorySpool(path=path, run="r1"):
        pass


def test_a_log_without_its_file_is_damage(tmp_path: Path, complete: Complete) -> None:
    path = tmp_path / "s"
    path.with_name("s-wal").write_bytes(b"x" * 100)
    with pytest.raises(DamagedError, match="the file is gone"), TrajectorySpool(path=path, run="r1"):
        pass


def test_what_was_appended_survives_sigkill(tmp_path: Path) -> None:
    program = (
        "import sys, os; from pathlib import Path; import numpy as np\n"
        "from sparsewire.sync.trajectories import *\n"
        "ints = np.arange(9, dtype=np.int32)\n"
        "with TrajectorySpool(path=Path(sys.argv[1]), run='r1') as spool:\n"
        "    for sample in range(1000):\n"
        "        spool.append(Trajectory(run='r1', key=TrajectoryKey(group=1, sample=sample, attempt=0), task='t', item=1,\n"
        "            worker_id='w', region='eu', prompt_token_ids=ints, completion_token_ids=ints,\n"
        "            logprobs=-np.ones(9, np.float32), spans=(VersionSpan(version=0, start=0, stop=9),), reward=1.0,\n"
        "            finish_reason=FinishReason.STOP, created_unix_seconds=1.0))\n"
        "        os.write(1, b'%d\\n' % sample)\n"
    )
    path = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, bufsize=0)
    with process:
        assert process.stdout is not None
        said = b""
        while said.count(b"\n") < 50:
            data = os.read(process.stdout.fileno(), 1 << 16)
            assert data
            said += data
        process.kill()
        said += process.stdout.read()
    num_said = said.count(b"\n")
    with TrajectorySpool(path=path, run="r1") as spool:
        assert samples_in(spool)[:num_said] == list(range(num_said))
        assert spool.num_trajectories in (num_said, num_said + 1)
