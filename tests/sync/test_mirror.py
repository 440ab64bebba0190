"""The mirror survives being killed at any point, notices damage, and seeds itself from a local checkpoint."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparsewire.sync import Publisher, PublisherSettings, Subscriber
from sparsewire.sync.errors import ConfigError, DamagedError
from sparsewire.sync.mirror import Mirror

MakeView = Callable[[int], dict[str, Any]]
Change = Callable[..., dict[str, Any]]
SameBits = Callable[[Any, dict[str, Any]], None]


def test_a_mirror_goes_on_where_it_stopped(
    directory_url: str, tmp_path: Path, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    mirror = tmp_path / "mirror"
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(view)
        with Subscriber.open(directory_url, run="r1", mirror=mirror) as subscriber:
            subscriber.sync()
        view = change(view, 1)
        publisher.publish(view)
    with Subscriber.open(directory_url, run="r1", mirror=mirror) as subscriber:
        assert subscriber.version == 0
        assert subscriber.sync() == 1
        assert_same_bits(subscriber.tensors(), view)
    assert sorted(path.suffix for path in mirror.iterdir()) == ["", "", "", ".bin", ".patch"], (
        "only the last patch is left"
    )


def test_a_mirror_is_owned_by_one_process_and_one_run(directory_url: str, tmp_path: Path, make_view: MakeView) -> None:
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(make_view(0))
    with Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m") as subscriber:
        subscriber.sync()
        with (
            pytest.raises(ConfigError, match="in use by another"),
            Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m"),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="belongs to run 'r1'"),
        Subscriber.open(directory_url, run="r2", mirror=tmp_path / "m"),
    ):
        pass


@pytest.mark.parametrize("file", ["weights", "state", "schema"])
def test_a_damaged_mirror_starts_over(
    directory_url: str, tmp_path: Path, make_view: MakeView, assert_same_bits: SameBits, file: str
) -> None:
    view = make_view(0)
    mirror = tmp_path / "m"
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(view)
    with Subscriber.open(directory_url, run="r1", mirror=mirror) as subscriber:
        subscriber.sync()
    path = next(mirror.glob(f"{file}*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    with Subscriber.open(directory_url, run="r1", mirror=mirror) as subscriber:
        assert subscriber.version is None, "a claim that the bytes do not bear out is dropped"
        assert subscriber.sync() == 0
        assert_same_bits(subscriber.tensors(), view)


def test_damage_in_memory_is_found_on_demand(directory_url: str, tmp_path: Path, make_view: MakeView) -> None:
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(make_view(0))
    with Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m") as subscriber:
        subscriber.sync()
        assert subscriber.damaged_tensors() == []
        weights = next((tmp_path / "m").glob("weights-*.bin"))
        with weights.open("r+b") as file:
            file.seek(11)
            file.write(b"\xa5")
        assert subscriber.damaged_tensors() == ["model.embed.weight"]


_KILLED_WORKER = """
import os, signal, sys
from pathlib import Path
from sparsewire.sync import Subscriber
from sparsewire.sync import mirror as mirror_module
url, directory, point = sys.argv[1:]
real_apply = mirror_module.apply_patch
calls = 0
def dying_apply(bits, patch):
    global calls
    calls += 1
    if point == "scatter" and calls == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real_apply(bits, patch)
mirror_module.apply_patch = dying_apply
real_replace = mirror_module.Mirror._replace
def dying_replace(self, name, data):
    if point == "before_pending" and name == "pending":
        os.kill(os.getpid(), signal.SIGKILL)
    real_replace(self, name, data)
    if point == "after_pending" and name == "pending":
        os.kill(os.getpid(), signal.SIGKILL)
mirror_module.Mirror._replace = dying_replace
with Subscriber.open(url, run="r1", mirror=directory) as subscriber:
    subscriber.sync()
"""


@pytest.mark.parametrize(("point", "version"), [("before_pending", 0), ("after_pending", 1), ("scatter", 1)])
def test_a_kill_in_the_middle_of_an_advance_finishes_or_rolls_back(
    directory_url: str,
    tmp_path: Path,
    make_view: MakeView,
    change: Change,
    assert_same_bits: SameBits,
    point: str,
    version: int,
) -> None:
    views = [make_view(0)]
    views.append(change(views[0], 1, 0.05))
    mirror = tmp_path / "m"
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(views[0])
        with Subscriber.open(directory_url, run="r1", mirror=mirror) as subscriber:
            subscriber.sync()
        publisher.publish(views[1])
    killed = subprocess.run([sys.executable, "-c", _KILLED_WORKER, directory_url, str(mirror), point], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with Mirror(path=mirror, run="r1") as recovered:
        assert recovered.version == version
        assert_same_bits(recovered.arrays(), views[version])
    with Subscriber.open(directory_url, run="r1", mirror=mirror) as subscriber:
        assert subscriber.sync() == 1
        assert_same_bits(subscriber.tensors(), views[1])


def _write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    names = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(array.tobytes() for array in tensors.values()))


def test_a_seed_keeps_the_starting_weights_off_the_wire(
    directory_url: str, tmp_path: Path, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    names = sorted(view)
    _write_safetensors(
        checkpoint / "model-1.safetensors", {name: view[name] for name in names[:3]} | {"lm_head": view[names[0]]}
    )
    as_float = {
        name: view[name].astype(np.float32) if view[name].dtype == ml_dtypes.bfloat16 else view[name]
        for name in names[3:]
    }
    _write_safetensors(checkpoint / "model-2.safetensors", as_float)
    with Publisher.open(directory_url, run="r1", settings=PublisherSettings(anchor_fraction=1e9)) as publisher:
        manifest = publisher.publish(view)
        view = change(view, 1)
        publisher.publish(view)
        for pack in manifest.packs:
            publisher.store.delete(f"r1/{pack.key}")
    with Subscriber.open(directory_url, run="r1", seed=checkpoint) as subscriber:
        assert subscriber.sync() == 1, "the anchor's bytes are gone, so the seed must have served"
        assert_same_bits(subscriber.tensors(), view)


def test_a_seed_that_is_no_version_of_the_run_is_not_used(
    directory_url: str, tmp_path: Path, make_view: MakeView, assert_same_bits: SameBits
) -> None:
    view, other = make_view(0), make_view(1)
    _write_safetensors(tmp_path / "other.safetensors", other)
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(view)
    with Subscriber.open(directory_url, run="r1", seed=tmp_path / "other.safetensors") as subscriber:
        assert subscriber.sync() == 0
        assert_same_bits(subscriber.tensors(), view)
    with (
        Subscriber.open(directory_url, run="r1", seed=tmp_path / "absent") as subscriber,
        pytest.raises(ConfigError, match="absent"),
    ):
        subscriber.sync()
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    with (
        Subscriber.open(directory_url, run="r1", seed=tmp_path / "bad.safetensors") as subscriber,
        pytest.raises(DamagedError, match="bad"),
    ):
        subscriber.sync()


def test_staged_updates_fold_versions_and_survive_retries(
    directory_url: str, tmp_path: Path, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    from sparsewire.sync.delta import apply_patch, undo_patch

    view = make_view(0)
    with (
        Publisher.open(directory_url, run="r1") as publisher,
        Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m", stage=True) as subscriber,
    ):
        publisher.publish(view)
        subscriber.sync()
        update = subscriber.staged()
        assert update is not None
        assert (update.full, update.base_version, update.version) == (True, None, 0)
        engine = {name: array.copy() for name, array in subscriber.tensors().items()}
        subscriber.release(0)
        assert subscriber.staged() is None
        start = view
        for seed in range(1, 4):
            view = change(view, seed, 0.03)
            publisher.publish(view)
            subscriber.sync()
        update = subscriber.staged()
        assert update is not None
        assert (update.full, update.base_version, update.version) == (False, 0, 3)
        names = [spec.name for spec in subscriber.schema]
        for _ in range(2):
            for patch in update.patches():
                flat = engine[names[patch.tensor]].reshape(-1)
                apply_patch(flat.view(f"u{flat.itemsize}"), patch)
        assert_same_bits(engine, view)
        assert set(update.digests) == {name for name in names if view[name].tobytes() != start[name].tobytes()}
        for patch in update.patches():
            flat = engine[names[patch.tensor]].reshape(-1)
            undo_patch(flat.view(f"u{flat.itemsize}"), patch)
        assert_same_bits(engine, start)
        with pytest.raises(ValueError, match="cannot release"):
            subscriber.release(2)
        subscriber.release(3)
        assert len(list((tmp_path / "m").glob("*.patch"))) == 1, "only that of the last version, for the next"
        subscriber.require_full()
        update = subscriber.staged()
        assert update is not None
        assert update.full


def test_a_staged_patch_file_that_is_damaged_is_refused(
    directory_url: str, tmp_path: Path, make_view: MakeView, change: Change
) -> None:
    view = make_view(0)
    with (
        Publisher.open(directory_url, run="r1") as publisher,
        Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m", stage=True) as subscriber,
    ):
        publisher.publish(view)
        subscriber.sync()
        subscriber.release(0)
        publisher.publish(change(view, 1))
        subscriber.sync()
        update = subscriber.staged()
        assert update is not None
        path = next((tmp_path / "m").glob("*.patch"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedError, match="hash"):
            list(update.patches())


def test_a_temporary_mirror_of_a_killed_process_is_removed_by_the_next(
    directory_url: str, tmp_path: Path, make_view: MakeView, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(make_view(0))
    dead = temporary / "sparsewire-mirror-dead"
    dead.mkdir()
    (dead / "weights-1.bin").write_bytes(b"0" * 100)
    (dead / "lock").touch()
    with Subscriber.open(directory_url, run="r1") as first:
        assert dead.exists(), "it might be about to be locked"
        first.sync()
        for path in temporary.iterdir():
            os.utime(path / "lock", (0, 0))
        with Subscriber.open(directory_url, run="r1") as second:
            second.sync()
            assert not dead.exists()
            assert first.damaged_tensors() == []
    assert list(temporary.iterdir()) == []
