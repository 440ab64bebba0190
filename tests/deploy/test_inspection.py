"""What `inspect`, the audit and the trace recorder say of a store is what was published."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from sparsewire.deploy.audit import audit_run
from sparsewire.deploy.inspection import describe_run, describe_version
from sparsewire.deploy.progress import Progress
from sparsewire.deploy.trace import TraceRecorder
from sparsewire.sync import Publisher
from sparsewire.sync.errors import ConfigError, VersionUnavailableError

View = dict[str, npt.NDArray[Any]]


def views() -> list[View]:
    """Four versions of a small model: a sparse change, none, and a dense one."""
    chance = np.random.default_rng(7)
    first: View = {
        "b.weight": chance.normal(size=(64, 50)).astype(ml_dtypes.bfloat16),
        "a.bias": chance.normal(size=(33,)).astype(ml_dtypes.bfloat16),
        "c.scale": np.array(1.0, ml_dtypes.bfloat16),
    }
    second = {name: array.copy() for name, array in first.items()}
    second["b.weight"].reshape(-1)[[3, 700, 3199]] *= ml_dtypes.bfloat16(1.5)
    second["a.bias"][5] = -second["a.bias"][5]
    third = {name: array.copy() for name, array in second.items()}
    fourth = {name: array.copy() for name, array in third.items()}
    fourth["b.weight"][:] = chance.normal(size=(64, 50)).astype(ml_dtypes.bfloat16)
    return [first, second, third, fourth]


def publish(url: str) -> list[str]:
    """Publish all versions and return their digests."""
    with Publisher.open(url, run="r1") as publisher:
        return [publisher.publish(view, step=step).version_digest.hex() for step, view in enumerate(views())]


def test_every_version_of_a_run_is_listed_with_its_numbers(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    digests = publish(url)
    summaries = [summary for summary in describe_run(url, run="r1").summaries if summary.kind != "squashed"]
    commits = {summary.version: summary for summary in summaries if summary.version == 0 or summary.kind == "delta"}
    assert sorted(commits) == [0, 1, 2, 3]
    assert [commits[version].digest for version in range(4)] == digests
    assert commits[0].kind == "anchor"
    assert commits[0].full_bytes == 2 * (3200 + 33 + 1)
    assert [commits[version].num_changed for version in (1, 2)] == [4, 0]
    assert commits[3].num_changed > 3000
    assert commits[1].density == pytest.approx(4 / 3234)
    assert [commits[version].step for version in range(4)] == [0, 1, 2, 3]
    assert [commits[version].base_version for version in range(4)] == [None, 0, 1, 2]


def test_one_version_is_taken_apart_into_chunks_and_tensors(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    publish(url)
    sparse = describe_version(url, run="r1", version=1)
    assert {tensor.name: tensor.num_changed for tensor in sparse.tensors} == {"a.bias": 1, "b.weight": 3, "c.scale": 0}
    before = {tensor.name: tensor.digest for tensor in describe_version(url, run="r1", version=0).tensors}
    assert {tensor.name for tensor in sparse.tensors if tensor.digest != before[tensor.name]} == {"a.bias", "b.weight"}
    assert sum(chunk.num_coded for chunk in sparse.chunks) == 4
    quick = describe_version(url, run="r1", version=1, quick=True)
    assert {tensor.num_changed for tensor in quick.tensors} == {None}
    assert quick.chunks == sparse.chunks
    unchanged = describe_version(url, run="r1", version=2)
    assert unchanged.chunks == ()
    assert all(tensor.num_changed == 0 for tensor in unchanged.tensors)
    anchor = describe_version(url, run="r1", version=0)
    assert {tensor.name: tensor.density for tensor in anchor.tensors} == {
        "a.bias": 1.0,
        "b.weight": 1.0,
        "c.scale": 1.0,
    }


def test_a_damaged_manifest_does_not_hide_the_others(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    publish(url)
    whole = describe_run(url, run="r1")
    path = tmp_path / "r1" / "versions" / f"{2:012d}.manifest"
    path.write_bytes(path.read_bytes()[:-1])
    listing = describe_run(url, run="r1")
    assert [s for s in whole.summaries if s.version != 2] == list(listing.summaries)
    assert len(listing.damaged) == 1
    assert "delta 1->2" in listing.damaged[0]
    assert "2.manifest" in listing.damaged[0] or "version 2" in listing.damaged[0]


def test_a_run_or_version_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    with pytest.raises(VersionUnavailableError, match="no version of run 'r1'"):
        describe_run(url, run="r1")
    publish(url)
    with pytest.raises(VersionUnavailableError, match=r"no version 9 \(it holds 0 to 3\)"):
        describe_version(url, run="r1", version=9)
    with pytest.raises(VersionUnavailableError, match="other"):
        describe_run(url, run="other")


def served(region: str, version: int, digest: str) -> dict[str, Any]:
    return {"event": "version_applied", "region": region, "version": version, "digest": digest}


def test_the_audit_proves_what_was_served_against_the_store(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    digests = publish(url)
    progress = Progress()
    for region in ("us", "eu"):
        for version in (0, 3):
            progress.apply(served(region, version, digests[version]))
    audit = audit_run(url, run="r1", progress=progress)
    assert audit["verified"] is True
    assert audit["head"] == 3
    assert audit["digest"] == digests[3]
    json.dumps(audit, allow_nan=False)


@pytest.mark.parametrize("fault", ["other bits", "no digest", "never committed", "behind", "no store"])
def test_the_audit_finds_what_is_wrong(tmp_path: Path, fault: str) -> None:
    url = tmp_path.as_uri()
    digests = publish(url)
    progress = Progress()
    progress.apply(served("us", 3, digests[3]))
    match fault:
        case "other bits":
            progress.apply(served("eu", 3, digests[1]))
        case "no digest":
            progress.apply(served("eu", 3, ""))
        case "never committed":
            progress.apply(served("eu", 4, digests[3]))
        case "behind":
            progress.apply(served("eu", 2, digests[2]))
        case _:
            url = (tmp_path / "empty").as_uri()
    assert audit_run(url, run="r1", progress=progress)["verified"] is False


def load_trace(directory: Path) -> list[dict[str, npt.NDArray[np.uint16]]]:
    """Read a trace by the documented layout, independently of the code that wrote it."""
    raw = (directory / "base.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    data = raw[8 + header_bytes :]
    versions = [
        {
            name: np.frombuffer(data[slice(*header[name]["data_offsets"])], np.uint16).reshape(header[name]["shape"])
            for name in sorted(header)
        }
    ]
    for path in sorted(directory.glob("*.xor.zst")):
        flat = np.frombuffer(zstandard.decompress(path.read_bytes()), np.uint16)
        version, at = {}, 0
        for name, old in versions[-1].items():
            version[name] = old ^ flat[at : at + old.size].reshape(old.shape)
            at += old.size
        assert at == flat.size
        versions.append(version)
    return versions


def test_a_recorded_trace_holds_every_version_bit_for_bit(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    recorder = TraceRecorder(url=url, run="r1", directory=tmp_path / "trace")
    recorder.start()
    publish(url)
    recorder.finish(3)
    assert recorder.failure is None
    trace = load_trace(tmp_path / "trace")
    assert len(trace) == recorder.num_versions == 4
    for recorded, view in zip(trace, views(), strict=True):
        assert recorded.keys() == view.keys()
        for name, array in view.items():
            np.testing.assert_array_equal(recorded[name], array.view(np.uint16))


def test_a_trace_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "base.safetensors").touch()
    recorder = TraceRecorder(url=tmp_path.as_uri(), run="r1", directory=tmp_path)
    with pytest.raises(ConfigError, match="holds a trace already"):
        recorder.start()
    recorder.stop()


def test_a_trace_of_wider_elements_is_refused_by_name(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with Publisher.open(url, run="r1") as publisher:
        publisher.publish({"w": np.ones(4, np.float32)})
    recorder = TraceRecorder(url=url, run="r1", directory=tmp_path / "trace")
    recorder.start()
    recorder.finish(0)
    assert recorder.failure is not None
    assert "tensor w has 4-byte elements" in recorder.failure
