"""FIELD_CASES P4: damaged, missing, swapped and mislabelled objects are found before a bit of the mirror changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparsewire.sync import Publisher, PublisherSettings, Subscriber
from sparsewire.sync.chain import LinkKind
from sparsewire.sync.errors import DamagedError, NotFoundError, SparsewireError
from sparsewire.sync.history import History
from sparsewire.sync.store.base import Store
from sparsewire.sync.store.open import open_store

MakeView = Callable[[int], dict[str, Any]]
Change = Callable[..., dict[str, Any]]
SameBits = Callable[[Any, dict[str, Any]], None]


@pytest.fixture
def published(memory_url: str, make_view: MakeView, change: Change) -> tuple[str, list[dict[str, Any]]]:
    """A run with versions 0..2, and the views published."""
    views = [make_view(0)]
    with Publisher.open(memory_url, run="r1", settings=PublisherSettings(anchor_fraction=1e9)) as publisher:
        publisher.publish(views[0])
        for seed in (1, 2):
            views.append(change(views[-1], seed, 0.05))
            publisher.publish(views[-1])
    return memory_url, views


def _drop_last(data: bytes) -> bytes:
    return data[:-1]


def _append(data: bytes) -> bytes:
    return data + b"\0"


def _flip_middle(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def _flip_first(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def _swap_halves(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[middle:] + data[:middle]


def _header_only(data: bytes) -> bytes:
    return data[:60]


def _empty(data: bytes) -> bytes:
    return b""


DAMAGES = [_drop_last, _append, _flip_middle, _flip_first, _swap_halves, _header_only, _empty]


def _key(store: Store, kind: str, version: int) -> str:
    history = History(store=store, run="r1")
    if kind == "manifest":
        return f"r1/versions/{version:012d}.manifest"
    return f"r1/{history.commit(version).packs[0].key}"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("kind", ["manifest", "pack"])
@pytest.mark.parametrize("version", [0, 2])
def test_damage_is_named_and_leaves_the_mirror_alone(
    published: tuple[str, list[dict[str, Any]]],
    assert_same_bits: SameBits,
    damage: Callable[[bytes], bytes],
    kind: str,
    version: int,
) -> None:
    url, views = published
    store = open_store(url)
    key = _key(store, kind, version)
    intact = store.get(key).data
    with Subscriber.open(url, run="r1") as subscriber:
        if version:
            subscriber.sync(version=1)
        held = subscriber.version
        store.put(key, damage(intact))
        if kind == "pack" and damage is _append:
            assert subscriber.sync() == 2, "bytes behind the last chunk of a pack are never read"
            return
        with pytest.raises(DamagedError, match=f"version {version}"):
            subscriber.sync(version=version)
        assert subscriber.version == held
        if held is not None:
            assert_same_bits(subscriber.tensors(), views[held])
        store.put(key, intact)
        assert subscriber.sync() == 2, "an intact copy heals it"
        assert_same_bits(subscriber.tensors(), views[2])


def test_an_absent_pack_is_named(published: tuple[str, list[dict[str, Any]]]) -> None:
    url, _ = published
    store = open_store(url)
    store.delete(_key(store, "pack", 2))
    with Subscriber.open(url, run="r1") as subscriber:
        with pytest.raises(NotFoundError, match=r"version 2: its pack packs/000000000002/.* is absent"):
            subscriber.sync()
        assert subscriber.version == 1


def test_swapped_manifests_are_refused(published: tuple[str, list[dict[str, Any]]]) -> None:
    url, _ = published
    store = open_store(url)
    one, two = (store.get(f"r1/versions/{version:012d}.manifest").data for version in (1, 2))
    store.put("r1/versions/000000000001.manifest", two)
    store.put("r1/versions/000000000002.manifest", one)
    with Subscriber.open(url, run="r1") as subscriber:
        with pytest.raises(DamagedError, match="describes version 2"):
            subscriber.sync()
        assert subscriber.version == 0


def test_a_manifest_of_another_run_is_refused(published: tuple[str, list[dict[str, Any]]], make_view: MakeView) -> None:
    url, _ = published
    store = open_store(url)
    with Publisher.open(url, run="r2") as publisher:
        publisher.publish(make_view(7))
    store.put("r1/versions/000000000000.manifest", store.get("r2/versions/000000000000.manifest").data)
    with Subscriber.open(url, run="r1") as subscriber, pytest.raises(DamagedError, match="belongs to run 'r2'"):
        subscriber.sync()


def test_swapped_packs_are_refused(published: tuple[str, list[dict[str, Any]]]) -> None:
    url, _ = published
    store = open_store(url)
    keys = [_key(store, "pack", version) for version in (1, 2)]
    one, two = (store.get(key).data for key in keys)
    store.put(keys[0], two)
    store.put(keys[1], one)
    with Subscriber.open(url, run="r1") as subscriber, pytest.raises(DamagedError, match="version 1"):
        subscriber.sync()


def test_a_damaged_delta_is_gone_around_by_an_anchor(
    memory_url: str, make_view: MakeView, change: Change, assert_same_bits: SameBits
) -> None:
    view = make_view(0)
    with Publisher.open(memory_url, run="r1", settings=PublisherSettings(anchor_fraction=1e-9)) as publisher:
        publisher.publish(view)
        with Subscriber.open(memory_url, run="r1") as subscriber:
            subscriber.sync()
            view = change(view, 1)
            publisher.publish(view)
            store = publisher.store
            key = _key(store, "pack", 1)
            store.put(key, _flip_middle(store.get(key).data))
            assert any(
                link.kind is LinkKind.ANCHOR and link.version == 1 for link in History(store=store, run="r1").links()
            )
            assert subscriber.sync() == 1
            assert_same_bits(subscriber.tensors(), view)


def test_every_single_bit_flip_of_a_manifest_is_refused(published: tuple[str, list[dict[str, Any]]]) -> None:
    from sparsewire.sync.manifest import open_manifest

    url, _ = published
    sealed = open_store(url).get("r1/versions/000000000001.manifest").data
    assert open_manifest(sealed, where="test").version == 1
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SparsewireError, match="test"):
            open_manifest(bytes(flipped), where="test")
    for size in range(len(sealed)):
        with pytest.raises(DamagedError, match="test"):
            open_manifest(sealed[:size], where="test")
