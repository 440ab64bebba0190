"""What only a directory can get wrong: crashes, permissions, a full disk, other writers in the same files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparsewire.sync.errors import NotFoundError, StoreAccessError, StoreUnavailableError
from sparsewire.sync.store import Store, open_store

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The store's directory, not yet created."""
    return tmp_path / "some where" / "store"


@pytest.fixture
def store(root: Path) -> Store:
    """A store opened for writing."""
    return open_store(str(root), writable=True)


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that every user can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run the block as a user whom file permissions bind."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def files_of(root: Path) -> list[str]:
    """Every file below `root` but the lock."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != ".~lock")


def test_a_plain_path_and_a_file_url_are_the_same_store(store: Store, root: Path) -> None:
    store.put("a/b", b"1")
    assert store.url == root.as_uri()
    assert open_store(root.as_uri()).get("a/b").data == b"1"
    assert (root / "a" / "b").read_bytes() == b"1"


def test_own_files_are_neither_listed_nor_left(store: Store, root: Path) -> None:
    store.put("a", b"1")
    store.put_if_absent("b", b"1")
    with store.write("c") as writer:
        writer.append(b"1")
        assert [info.key for info in store.list("")] == ["a", "b"]
    assert files_of(root) == ["a", "b", "c"]
    assert [info.key for info in store.list("")] == ["a", "b", "c"]


def test_leftovers_of_crashed_writers_are_removed_once_they_are_old(store: Store, root: Path) -> None:
    old, young = root / ".~temporary" / "1-old", root / ".~temporary" / "1-young"
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    long_ago = time.time() - 3700
    os.utime(old, (long_ago, long_ago))
    open_store(str(root))
    assert old.exists()
    open_store(str(root), writable=True)
    assert (old.exists(), young.exists()) == (False, True)


def test_a_writer_killed_in_mid_write_leaves_no_object(root: Path) -> None:
    script = (
        "import sys, time\n"
        "from sparsewire.sync.store import open_store\n"
        "store = open_store(sys.argv[1], writable=True)\n"
        "with store.write('pack') as writer:\n"
        "    writer.append(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    store = open_store(str(root), writable=True)
    assert list(store.list("")) == []
    store.put("pack", b"whole")
    assert store.get("pack").data == b"whole"


def test_a_reader_may_open_before_the_writer_has_made_the_directory(root: Path) -> None:
    reader = open_store(str(root))
    assert list(reader.list("")) == []
    with pytest.raises(NotFoundError, match="store/x"):
        reader.get("x")
    assert not root.exists()
    open_store(str(root), writable=True).put("x", b"1")
    assert reader.get("x").data == b"1"


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for writable in (False, True):
        with pytest.raises(StoreAccessError, match="file"):
            open_store(str(tmp_path / "file"), writable=writable)


def test_a_read_only_directory_can_be_read_but_not_opened_for_writing(public_directory: Path) -> None:
    store = open_store(str(public_directory), writable=True)
    store.put("a/b", b"1")
    for path in (public_directory / ".~temporary", public_directory / "a", public_directory):
        path.chmod(0o555)
    with without_privileges():
        reader = open_store(str(public_directory))
        assert reader.get("a/b").data == b"1"
        assert [info.key for info in reader.list("")] == ["a/b"]
        with pytest.raises(StoreAccessError, match=r"(?i)permission denied"):
            open_store(str(public_directory), writable=True)
        with pytest.raises(StoreAccessError, match=r"a/c.*(?i:permission denied)"):
            reader.put("a/c", b"2")
    for path in (public_directory, public_directory / "a", public_directory / ".~temporary"):
        path.chmod(0o755)


def test_an_object_that_may_not_be_read_is_named(public_directory: Path) -> None:
    store = open_store(str(public_directory), writable=True)
    store.put("secret", b"1")
    (public_directory / "secret").chmod(0)
    with without_privileges(), pytest.raises(StoreAccessError, match=r"secret.*(?i:permission denied)"):
        store.get("secret")


def test_a_full_disk_is_named_and_replaces_nothing(store: Store, root: Path) -> None:
    store.put("pack", b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StoreUnavailableError, match=r"pack.*free space"):
            store.put("pack", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.get("pack").data == b"old"
    assert files_of(root) == ["pack"]


def test_a_name_cannot_be_an_object_and_a_folder(store: Store) -> None:
    store.put("a/b", b"1")
    with pytest.raises(StoreAccessError, match="both an object and a folder"):
        store.put("a/b/c", b"2")
    for put in (store.put, store.put_if_absent):
        with pytest.raises(StoreAccessError, match="both an object and a folder"):
            put("a", b"2")
    assert [info.key for info in store.list("")] == ["a/b"]


def test_deleting_removes_empty_folders_while_others_write_there(store: Store, root: Path) -> None:
    stop = threading.Event()

    def come_and_go(number: int) -> int:
        rounds = 0
        while not stop.is_set() and rounds < 25:
            store.put(f"versions/{rounds % 3}/{number}", b"x")
            store.delete(f"versions/{rounds % 3}/{number}")
            rounds += 1
        return rounds

    def watch() -> int:
        listings = 0
        while not stop.is_set():
            listings += sum(1 for _ in store.list("versions/")) >= 0
        return listings

    with ThreadPoolExecutor(5) as pool:
        watching = pool.submit(watch)
        done = list(pool.map(come_and_go, range(4), timeout=60))
        stop.set()
        assert watching.result(timeout=10) > 0
    assert done == [25] * 4
    assert files_of(root) == []
    assert not (root / "versions").exists()


def test_compare_and_set_is_exact_between_processes(store: Store, root: Path) -> None:
    script = (
        "import sys\n"
        "from sparsewire.sync.errors import PreconditionFailedError\n"
        "from sparsewire.sync.store import open_store\n"
        "store, done = open_store(sys.argv[1]), 0\n"
        "while done < 25:\n"
        "    seen = store.get('counter')\n"
        "    try:\n"
        "        store.put_if_match('counter', str(int(seen.data) + 1).encode(), seen.etag)\n"
        "        done += 1\n"
        "    except PreconditionFailedError:\n"
        "        pass\n"
    )
    store.put("counter", b"0")
    processes = [subprocess.Popen([sys.executable, "-c", script, str(root)]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert store.get("counter").data == b"75"
