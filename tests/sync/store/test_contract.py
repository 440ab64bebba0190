"""What every store must do, whatever is behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparsewire.sync.errors import (
    AlreadyExistsError,
    ConfigError,
    DamagedError,
    NotFoundError,
    PreconditionFailedError,
)
from sparsewire.sync.store import Store, open_store, probe_conditional_writes, read_in_parallel

MIB = 1 << 20
NUM_RACERS = 16


def pattern(num_bytes: int) -> bytes:
    """Bytes whose every offset is recognisable."""
    return b"".join(number.to_bytes(8, "little") for number in range(num_bytes // 8 + 1))[:num_bytes]


def race(stores: list[Store], act: Callable[[Store, int], bool]) -> list[bool]:
    """Run `act` at the same moment in NUM_RACERS threads, spread over the stores."""
    barrier = threading.Barrier(NUM_RACERS, timeout=30)

    def run(number: int) -> bool:
        barrier.wait()
        return act(stores[number % len(stores)], number)

    with ThreadPoolExecutor(NUM_RACERS) as pool:
        return list(pool.map(run, range(NUM_RACERS), timeout=60))


def test_an_object_is_read_as_it_was_written(store: Store) -> None:
    etag = store.put("runs/r1/head.json", b"hello")
    stored = store.get("runs/r1/head.json")
    assert stored.data == b"hello"
    assert stored.etag == etag
    assert store.put("empty", b"") == store.get("empty").etag
    assert store.get("empty").data == b""


def test_the_etag_changes_with_the_bytes(store: Store) -> None:
    first = store.put("a", b"1")
    second = store.put("a", b"2")
    assert first != second
    assert store.get("a").etag == second


def test_a_missing_object_is_not_found_and_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match=r"r1/absent\.pack"):
        store.get("r1/absent.pack")
    with pytest.raises(NotFoundError, match=r"r1/absent\.pack"):
        store.get_range("r1/absent.pack", 0, 4)


def test_a_folder_of_objects_is_not_an_object(store: Store) -> None:
    store.put("a/b/c", b"1")
    with pytest.raises(NotFoundError):
        store.get("a/b")
    with pytest.raises(NotFoundError):
        store.get("a/b/c/d")
    store.delete("a/b")
    assert store.get("a/b/c").data == b"1"


def test_a_range_has_exactly_the_bytes_asked_for(store: Store) -> None:
    data = pattern(3 * MIB + 5)
    store.put("pack", data)
    for offset, length in ((0, 1), (0, len(data)), (7, 9), (MIB - 1, 2), (len(data) - 3, 3), (10, 2 * MIB)):
        assert store.get_range("pack", offset, length) == data[offset : offset + length]
    assert store.get_range("pack", 5, 0) == b""


def test_a_range_beyond_the_end_is_damage(store: Store) -> None:
    store.put("pack", b"0123456789")
    for offset, length in ((0, 11), (9, 2), (10, 1), (5000, 4), (3, 1 << 50)):
        with pytest.raises(DamagedError, match="pack"):
            store.get_range("pack", offset, length)


def test_a_negative_range_is_refused(store: Store) -> None:
    store.put("pack", b"0123456789")
    for offset, length in ((-1, 2), (0, -1)):
        with pytest.raises(ConfigError, match="range"):
            store.get_range("pack", offset, length)


def test_put_if_absent_keeps_the_first_object(store: Store) -> None:
    etag = store.put_if_absent("v/7.manifest", b"mine")
    for later in (b"theirs", b"mine"):
        with pytest.raises(AlreadyExistsError, match=r"7\.manifest"):
            store.put_if_absent("v/7.manifest", later)
    stored = store.get("v/7.manifest")
    assert (stored.data, stored.etag) == (b"mine", etag)


def test_of_sixteen_racing_creators_exactly_one_wins(store: Store, open_another: Callable[[], Store]) -> None:
    def content(number: int) -> bytes:
        """Two racers each bring the same bytes, which must not make both of them winners."""
        return b"racer %d" % (number // 2)

    def create(racer: Store, number: int) -> bool:
        try:
            racer.put_if_absent("v/8.manifest", content(number))
        except AlreadyExistsError:
            return False
        return True

    won = race([store, *(open_another() for _ in range(3))], create)
    assert sum(won) == 1
    assert store.get("v/8.manifest").data == content(won.index(True))


def test_compare_and_set_needs_the_current_etag(store: Store) -> None:
    first = store.put("epoch", b"1")
    second = store.put_if_match("epoch", b"2", first)
    assert store.get("epoch").etag == second
    with pytest.raises(PreconditionFailedError, match="epoch"):
        store.put_if_match("epoch", b"3", first)
    assert store.get("epoch").data == b"2"
    store.delete("epoch")
    with pytest.raises(PreconditionFailedError, match="gone"):
        store.put_if_match("epoch", b"3", second)
    with pytest.raises(NotFoundError):
        store.get("epoch")


def test_of_sixteen_racing_compare_and_sets_exactly_one_wins(store: Store, open_another: Callable[[], Store]) -> None:
    stores = [store, *(open_another() for _ in range(3))]
    etag = store.put("epoch", b"start")

    def claim(racer: Store, number: int) -> bool:
        try:
            racer.put_if_match("epoch", b"claimed by %d" % number, etag)
        except PreconditionFailedError:
            return False
        return True

    won = race(stores, claim)
    assert sum(won) == 1
    assert store.get("epoch").data == b"claimed by %d" % won.index(True)


def test_a_large_object_written_in_pieces_appears_whole_at_the_end(store: Store) -> None:
    data = pattern(17 * MIB + 11)
    with store.write("packs/1.pack") as writer:
        view = memoryview(data)
        position = 0
        for size in (0, 1, 5, 9 * MIB, 4096, 8 * MIB):
            writer.append(view[position : position + size])
            position += size
        assert [info.key for info in store.list("packs/")] == []
        with pytest.raises(NotFoundError):
            store.get("packs/1.pack")
    assert position >= len(data)
    (info,) = store.list("packs/")
    assert info.num_bytes == len(data)
    assert b"".join(read_in_parallel(store, "packs/1.pack", offset=0, length=len(data), part_bytes=3 * MIB)) == data
    assert b"".join(read_in_parallel(store, "packs/1.pack", offset=7, length=99)) == data[7:106]
    assert store.get_range("packs/1.pack", 8 * MIB - 2, 4) == data[8 * MIB - 2 : 8 * MIB + 2]


def test_a_written_object_may_have_any_size(store: Store) -> None:
    for num_bytes in (0, 1, 8 * MIB, 8 * MIB + 1):
        with store.write("pack") as writer:
            writer.append(pattern(num_bytes))
        assert store.get("pack").data == pattern(num_bytes)


def test_a_writer_that_raises_leaves_nothing(store: Store) -> None:
    def fail(key: str, num_bytes: int) -> None:
        with store.write(key) as writer:
            writer.append(pattern(num_bytes))
            raise RuntimeError("encoder failed")

    store.put("old", b"old")
    for key, num_bytes in (("new", 3), ("old", 3), ("new", 9 * MIB), ("old", 9 * MIB)):
        with pytest.raises(RuntimeError, match="encoder failed"):
            fail(key, num_bytes)
    assert [(info.key, info.num_bytes) for info in store.list("")] == [("old", 3)]
    assert store.get("old").data == b"old"


KEYS = (
    *("r/a/x", "r/a/y", "r/a/z/1", "r/a-b", "r/a.c", "r/a0", "r/b", "r/A", "r/_u", "r/a-/q", "r/a.d/e", "r/a-b.c"),
    *("r-1/x", "r.1/x", "r0/x", "q", "s"),
    *(f"r/v/{number:04d}.manifest" for number in range(12)),
    *(f"r/v/{number:04d}/rank-0.pack" for number in range(3)),
)


def test_listing_is_in_key_order_below_the_prefix_and_above_the_start(store: Store) -> None:
    for key in KEYS:
        store.put(key, key.encode())
    for prefix in ("", "r", "r/", "r/a", "r/a/", "r/v/", "r/v/000", "r/v/0001", "r/nothing/", "zz"):
        for start_after in (
            "",
            "q",
            "r",
            "r/a",
            "r/a-b",
            "r/a/x",
            "r/a/z",
            "r/v/",
            "r/v/0001.manifest",
            "r/v/0002",
            "z",
        ):
            wanted = sorted(key for key in KEYS if key.startswith(prefix) and key > start_after)
            assert [info.key for info in store.list(prefix, start_after=start_after)] == wanted, (prefix, start_after)


def test_a_listing_shows_size_and_time(store: Store) -> None:
    store.put("a/b", b"12345")
    (info,) = store.list("a")
    assert (info.key, info.num_bytes) == ("a/b", 5)
    assert abs(info.modified_unix_seconds - time.time()) < 60


def test_deleting_is_idempotent_and_deletes_one_object_only(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.put("a/b/cc", b"2")
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("never/was")
    assert [info.key for info in store.list("")] == ["a/b/cc"]
    store.delete("a/b/cc")
    store.put("a/b", b"a name may become an object once nothing is below it")
    assert [info.key for info in store.list("")] == ["a/b"]


BAD_KEYS = ("", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", "a\0b", "a b", "a\\b", "ä", "a\n", "~x", "a" * 769)
BAD_PREFIXES = ("/", "/etc", "../", "a/../", "a//", "a\0", "*")


def test_a_key_outside_the_alphabet_is_refused_by_every_call(store: Store) -> None:
    def write(key: str) -> None:
        with store.write(key) as writer:
            writer.append(b"x")

    calls: list[Callable[[str], object]] = [
        store.get,
        lambda key: store.get_range(key, 0, 1),
        lambda key: store.put(key, b"x"),
        lambda key: store.put_if_absent(key, b"x"),
        lambda key: store.put_if_match(key, b"x", "e"),
        store.delete,
        write,
    ]
    for key in BAD_KEYS:
        for call in calls:
            with pytest.raises(ConfigError, match="object key"):
                call(key)
    assert list(store.list("")) == []


def test_a_prefix_outside_the_alphabet_is_refused(store: Store) -> None:
    for prefix in BAD_PREFIXES:
        with pytest.raises(ConfigError, match="prefix"):
            store.list(prefix)


def test_what_one_store_wrote_another_reads(store: Store, open_another: Callable[[], Store]) -> None:
    other = open_another()
    store.put("a/b", b"1")
    stored = other.get("a/b")
    assert stored.data == b"1"
    assert other.put_if_match("a/b", b"2", stored.etag) == store.get("a/b").etag
    assert store.url == other.url


def test_the_probe_accepts_a_safe_store_and_leaves_nothing(store: Store) -> None:
    probe_conditional_writes(store)
    assert list(store.list("")) == []


def test_a_store_at_a_prefix_sees_only_what_is_below_it(store_url: str) -> None:
    base, _, query = store_url.partition("?")
    option = f"?{query}" if query else ""
    stores = [open_store(base + suffix + option, writable=True) for suffix in ("/p", "/p2", "/p/q", "")]
    p, p2, pq, whole = stores
    try:
        p.put("x", b"p")
        p2.put("x", b"p2")
        pq.put("x", b"pq")
        assert [info.key for info in p.list("")] == ["q/x", "x"]
        assert [info.key for info in p2.list("")] == ["x"]
        assert [info.key for info in pq.list("")] == ["x"]
        assert [info.key for info in whole.list("p")] == ["p/q/x", "p/x", "p2/x"]
        assert p.get("q/x").data == b"pq"
    finally:
        for store in stores:
            store.close()
