"""Deltas coded against the one before: smaller, exact, and nobody is stranded by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.sync import Publisher, PublisherSettings, Subscriber
from sparsewire.sync.chain import LinkKind
from sparsewire.sync.delta import apply_patch
from sparsewire.sync.errors import NotFoundError, SchemaMismatchError, VersionUnavailableError
from sparsewire.sync.history import History
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.rpc import start_server
from sparsewire.sync.store.open import open_store
from sparsewire.sync.weight_service import WeightServicer

SameBits = Callable[[Any, dict[str, Any]], None]
View = dict[str, npt.NDArray[Any]]
NO_ANCHORS = PublisherSettings(anchor_fraction=1e9)


def momentum_views(num_versions: int) -> Iterator[View]:
    """Yield weights that an optimizer with momentum moves: steps of one weight resemble each other."""
    random = np.random.default_rng(0)
    shapes = {"layers.0.weight": (300, 100), "layers.1.weight": (70, 100), "norm": (64,)}
    weights = {name: random.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    step = {name: random.normal(0, 1.5e-6, shape).astype(np.float32) for name, shape in shapes.items()}
    for _ in range(num_versions):
        yield {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}
        for name, array in weights.items():
            step[name] = 0.95 * step[name] + random.normal(0, 4e-7, array.shape).astype(np.float32)
            array += step[name]


VIEWS = list(momentum_views(7))


def publish_all(url: str, settings: PublisherSettings = NO_ANCHORS) -> list[Manifest]:
    with Publisher.open(url, run="r1", settings=settings) as publisher:
        return [publisher.publish(view) for view in VIEWS]


def test_deltas_after_the_first_are_predicted_smaller_and_exact(directory_url: str, assert_same_bits: SameBits) -> None:
    manifests = publish_all(directory_url)
    assert [manifest.predicted for manifest in manifests] == [False, False, True, True, True, True, True]
    with Publisher.open(directory_url, run="plain", settings=PublisherSettings(predict=False)) as publisher:
        plain = [publisher.publish(view) for view in VIEWS]
    assert not any(manifest.predicted for manifest in plain)
    assert all(a.pack_bytes < b.pack_bytes for a, b in zip(manifests[2:], plain[2:], strict=True))
    assert [a.version_digest for a in manifests] == [b.version_digest for b in plain]
    with Subscriber.open(directory_url, run="r1") as subscriber:
        for version, view in enumerate(VIEWS):
            assert subscriber.sync(version) == version
            assert_same_bits(subscriber.tensors(), view)


def test_bytes_do_not_depend_on_the_number_of_threads(directory_url: str, assert_same_bits: SameBits) -> None:
    digests = []
    for threads in (1, 5):
        settings = PublisherSettings(anchor_fraction=1e9, num_threads=threads, chunk_bytes=4096)
        with Publisher.open(directory_url, run=f"r{threads}", settings=settings) as publisher:
            manifests = [publisher.publish(view) for view in VIEWS[:4]]
        assert len(manifests[3].chunks) > 10
        digests.append([[chunk.sha256 for chunk in manifest.chunks] for manifest in manifests])
        with Subscriber.open(directory_url, run=f"r{threads}", num_threads=threads) as subscriber:
            subscriber.sync()
            assert_same_bits(subscriber.tensors(), VIEWS[3])
    assert digests[0] == digests[1]


def test_a_mirror_goes_on_with_a_predicted_delta_after_a_restart(
    directory_url: str, tmp_path: Path, assert_same_bits: SameBits
) -> None:
    publish_all(directory_url)
    for version, view in enumerate(VIEWS):
        with Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m", stage=True) as subscriber:
            subscriber.sync(version)
            assert_same_bits(subscriber.tensors(), view)
            update = subscriber.staged()
            assert update is not None
            assert update.wire_bytes < 60_000 or version == 0, "no anchor was fetched again"
        assert len(list((tmp_path / "m").glob("*.patch"))) == (version > 0)


def test_the_delta_after_an_anchor_is_plain_so_that_late_joiners_get_on(
    directory_url: str, assert_same_bits: SameBits
) -> None:
    manifests = publish_all(directory_url, PublisherSettings(anchor_fraction=0.15, retain_versions=1))
    store = open_store(directory_url)
    links = History(store=store, run="r1").links()
    store.close()
    anchors = [link.version for link in links if link.kind is LinkKind.ANCHOR]
    assert anchors
    assert any(manifest.predicted for manifest in manifests)
    assert not any(manifest.predicted for manifest in manifests if manifest.version - 1 in anchors)
    with Subscriber.open(directory_url, run="r1") as subscriber:
        assert subscriber.sync() == 6
        assert_same_bits(subscriber.tensors(), VIEWS[-1])


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_mirror_whose_last_patch_is_lost_starts_over_from_an_anchor_and_never_stages_older_weights(
    directory_url: str, tmp_path: Path, assert_same_bits: SameBits, damage: str
) -> None:
    publish_all(directory_url)
    with Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m", stage=True) as subscriber:
        subscriber.sync(4)
        subscriber.release(4)
        patch = next((tmp_path / "m").glob("*.patch"))
        if damage == "gone":
            patch.unlink()
        else:
            data = bytearray(patch.read_bytes())
            data[len(data) // 2] ^= 4
            patch.write_bytes(data)
        # The way from the anchor is cut short at version 3 for a while.
        pack = next((tmp_path / "store" / "r1" / "packs" / f"{3:012d}").iterdir())
        hidden = patch.parent.parent / "hidden"
        pack.rename(hidden)
        with pytest.raises(NotFoundError, match=r"version 3"):
            subscriber.sync(6)
        assert subscriber.version == 2
        assert subscriber.staged() is None, "the engine is ahead"
        hidden.rename(pack)
        assert subscriber.sync() == 6
        assert_same_bits(subscriber.tensors(), VIEWS[6])
        update = subscriber.staged()
        assert update is not None
        assert update.full


def test_a_seed_in_the_middle_of_predicted_deltas_goes_on_from_an_anchor(
    directory_url: str, tmp_path: Path, assert_same_bits: SameBits
) -> None:
    from safetensors.numpy import save_file

    publish_all(directory_url)
    save_file(VIEWS[3], tmp_path / "model.safetensors")
    with Subscriber.open(directory_url, run="r1", seed=tmp_path / "model.safetensors") as subscriber:
        assert subscriber.sync() == 6
        assert subscriber.seeded_version == 3
        assert_same_bits(subscriber.tensors(), VIEWS[6])


def test_without_any_anchor_the_refusal_says_what_is_missing(directory_url: str, tmp_path: Path) -> None:
    publish_all(directory_url)
    with Subscriber.open(directory_url, run="r1", mirror=tmp_path / "m") as subscriber:
        subscriber.sync(4)
        next((tmp_path / "m").glob("*.patch")).unlink()
        (tmp_path / "store" / "r1" / "versions" / f"{0:012d}.manifest").unlink()
        with pytest.raises(VersionUnavailableError, match="not the change that made it"):
            subscriber.sync()
        assert subscriber.version == 4


def test_a_restarted_publisher_begins_with_a_plain_delta(directory_url: str, assert_same_bits: SameBits) -> None:
    predicted = []
    for start in (0, 4):
        with Publisher.open(directory_url, run="r1", settings=NO_ANCHORS) as publisher:
            predicted += [publisher.publish(view).predicted for view in VIEWS[start : start + 4]]
    assert predicted == [False, False, True, True, False, True, True]
    with Subscriber.open(directory_url, run="r1") as subscriber:
        assert subscriber.sync() == 6
        assert_same_bits(subscriber.tensors(), VIEWS[6])


def test_a_failed_publish_is_covered_by_the_next_and_predicts_from_what_was_committed(
    directory_url: str, tmp_path: Path, assert_same_bits: SameBits
) -> None:
    with Publisher.open(directory_url, run="r1", settings=NO_ANCHORS) as publisher:
        for view in VIEWS[:3]:
            publisher.publish(view)
        with pytest.raises(SchemaMismatchError, match="another model"):
            publisher.publish({**VIEWS[3], "extra": np.zeros(3, np.float32)})
        assert publisher.publish(VIEWS[4]).predicted
        publisher.publish(VIEWS[5])
    with Subscriber.open(directory_url, run="r1") as subscriber:
        for version, view in ((3, VIEWS[4]), (4, VIEWS[5])):
            subscriber.sync(version)
            assert_same_bits(subscriber.tensors(), view)


def test_staged_patches_of_predicted_deltas_fold_for_the_engine(directory_url: str, assert_same_bits: SameBits) -> None:
    publish_all(directory_url)
    with Subscriber.open(directory_url, run="r1", stage=True) as subscriber:
        subscriber.sync(2)
        subscriber.release(2)
        engine = {name: array.copy() for name, array in subscriber.tensors().items()}
        names = [spec.name for spec in subscriber.schema]
        for version in (3, 4):
            subscriber.sync(version)
        update = subscriber.staged()
        assert update is not None
        assert not update.full
        for patch in update.patches():
            apply_patch(engine[names[patch.tensor]].reshape(-1).view(np.uint16), patch)
        assert_same_bits(engine, VIEWS[4])
        subscriber.release(4)
        assert subscriber.sync() == 6


def test_predicted_deltas_cross_grpc_as_what_they_are(directory_url: str, assert_same_bits: SameBits) -> None:
    publish_all(directory_url)
    servicer = WeightServicer(store=open_store(directory_url), run="r1")
    with (
        start_server("127.0.0.1:0", services=[servicer]) as server,
        Subscriber.open(f"grpc://127.0.0.1:{server.port}", run="r1") as subscriber,
    ):
        assert subscriber.sync(3) == 3
        assert subscriber.sync() == 6
        assert_same_bits(subscriber.tensors(), VIEWS[6])
