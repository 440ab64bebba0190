"""A probe travels with its version, whole or not at all, and what is no probe is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparsewire.sync import Publisher, PublisherSettings, Subscriber
from sparsewire.sync.chain import LinkKind
from sparsewire.sync.errors import ConfigError, DamagedError
from sparsewire.sync.history import History
from sparsewire.sync.manifest import Manifest, open_envelope, open_manifest, seal_envelope
from sparsewire.sync.probe import MAX_SEQUENCES, MAX_TOKENS, Probe, ProbeSequence, probe_from_wire, probe_to_wire
from sparsewire.sync.store.open import open_store
from sparsewire.v1 import manifest_pb2

MakeView = Callable[[int], dict[str, Any]]
Change = Callable[..., dict[str, Any]]

PROBE = Probe.of([[5, 49151, 7, 300], [1, 2]], [[-1.25, -0.1], [-11.5]])


def message(*sequences: tuple[list[int], int, list[float]]) -> manifest_pb2.Probe:
    return manifest_pb2.Probe(
        sequences=[
            manifest_pb2.ProbeSequence(token_ids=ids, num_given=num_given, logprobs=logprobs)
            for ids, num_given, logprobs in sequences
        ]
    )


def manifest_of(url: str, version: int) -> Manifest:
    return History(store=open_store(url), run="r1").commit(version)


def test_a_probe_comes_back_as_it_was_sent_to_the_bit() -> None:
    there = manifest_pb2.Probe.FromString(probe_to_wire(PROBE).SerializeToString())
    assert probe_from_wire(there, where="test") == PROBE
    assert PROBE.num_scored == 3
    assert [sequence.num_given for sequence in PROBE.sequences] == [2, 1]
    assert PROBE.sequences[0].logprobs == (-1.25, float(np.float32(-0.1)))


def test_a_probe_costs_a_few_hundred_bytes() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, (4, 24)).tolist()
    probe = Probe.of(ids, [[-1.5] * 15] * 4)
    assert len(probe_to_wire(probe).SerializeToString()) < 600


def test_it_travels_with_version_anchor_and_staged_update(memory_url: str, make_view: MakeView, change: Change) -> None:
    view = make_view(0)
    later = Probe.of([[3, 4]], [[-2.0]])
    with (
        Publisher.open(memory_url, run="r1", settings=PublisherSettings(anchor_fraction=1e-9)) as publisher,
        Subscriber.open(memory_url, run="r1", stage=True) as subscriber,
    ):
        assert publisher.publish(view, probe=PROBE).probe == PROBE
        subscriber.sync()
        staged = subscriber.staged()
        assert staged is not None
        assert staged.probe == PROBE
        subscriber.release(0)
        assert publisher.publish(change(view, 1), probe=later).probe == later
        publisher.publish(change(view, 2))
        subscriber.sync(1)
        staged = subscriber.staged()
        assert staged is not None
        assert staged.probe == later
        subscriber.sync(2)
        staged = subscriber.staged()
        assert staged is not None
        assert staged.probe is None
    history = History(store=open_store(memory_url), run="r1")
    anchors = [link for link in history.links() if link.kind is LinkKind.ANCHOR and link.version == 1]
    assert [history.manifest(link).probe for link in anchors] == [later]


def test_a_resumed_publisher_reads_the_probe_of_its_head_back(memory_url: str, make_view: MakeView) -> None:
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(make_view(0), probe=PROBE)
    with Publisher.open(memory_url, run="r1") as publisher:
        assert publisher.head is not None
        assert publisher.head.probe == PROBE
        assert publisher.publish_in_background(make_view(0)).result(30).probe is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "what"),
    [
        ([[1]], [[]], "gives 1 of its 1"),
        ([[1, 2]], [[-1.0, -2.0]], "gives 0 of its 2"),
        ([[1, 2]], [[math.nan]], "not finite"),
        ([[1, 2]], [[-math.inf]], "not finite"),
        ([[1, -2]], [[-1.0]], "token id"),
        ([[1, 1 << 31]], [[-1.0]], "token id"),
        ([], [], "0 sequences"),
        ([[1, 2]] * (MAX_SEQUENCES + 1), [[-1.0]] * (MAX_SEQUENCES + 1), "17 sequences"),
        ([[1] * (MAX_TOKENS + 1)], [[-1.0]], "1025 tokens"),
    ],
)
def test_what_is_no_probe_cannot_be_made(ids: list[list[int]], logprobs: list[list[float]], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Probe.of(ids, logprobs)


def test_a_sequence_states_as_many_log_probabilities_as_it_scores() -> None:
    with pytest.raises(ConfigError, match="has 2 log-probabilities for 1"):
        ProbeSequence(token_ids=(1, 2), num_given=1, logprobs=(-1.0, -2.0))


@pytest.mark.parametrize(
    "hostile",
    [
        message(),
        message(([1, 2], 0, [-1.0, -2.0])),
        message(([1, 2], 2, [])),
        message(([1, 2], 1, [])),
        message(([1, 2], 1, [math.nan])),
        message(([1, 4_000_000_000], 1, [-1.0])),
        message(([], 0, [])),
        message(([1, 2], 4_000_000_000, [-1.0])),
        message(*[([1, 2], 1, [-1.0])] * (MAX_SEQUENCES + 1)),
        message(([1] * 500_000, 1, [-1.0] * 499_999)),
        message(([1, 2], 1, [-1.0]), ([1] * MAX_TOKENS, 1, [-1.0] * (MAX_TOKENS - 1))),
    ],
)
def test_a_manifest_with_a_hostile_probe_is_refused_by_name(
    memory_url: str, make_view: MakeView, hostile: manifest_pb2.Probe
) -> None:
    with Publisher.open(memory_url, run="r1") as publisher:
        sealed = publisher.publish(make_view(0), probe=PROBE).seal()
    forged = manifest_pb2.Manifest.FromString(open_envelope(sealed, where="test"))
    forged.probe.CopyFrom(hostile)
    with pytest.raises(DamagedError, match="somewhere"):
        open_manifest(seal_envelope(forged.SerializeToString()), where="somewhere")


def test_manifests_without_a_probe_keep_their_bytes(memory_url: str, make_view: MakeView) -> None:
    with Publisher.open(memory_url, run="r1") as publisher:
        publisher.publish(make_view(0))
    manifest = manifest_of(memory_url, 0)
    assert manifest.probe is None
    assert not manifest_pb2.Manifest.FromString(open_envelope(manifest.seal(), where="test")).HasField("probe")
