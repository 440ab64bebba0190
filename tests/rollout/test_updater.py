"""Versions land proved or not at all: real publisher, subscriber and engine over an in-memory store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.rollout.engine import GenerationRequest
from sparsewire.rollout.transformers_engine import TransformersEngine
from sparsewire.rollout.updater import Updater
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import TensorDigest, tensor_digest
from sparsewire.sync.errors import EngineError
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.telemetry import EventLog
from sparsewire.sync.trajectories.types import SamplingParams
from sparsewire.sync.types import bits_of

Weights = dict[str, npt.NDArray[Any]]
Nudged = Callable[[Weights, int], Weights]

NOW = timedelta(0)
SOON = timedelta(seconds=5)
PLACE = "model.layers.1.self_attn.o_proj.weight"


class FaultyEngine(TransformersEngine):
    """A real engine in which faults can be planted."""

    lie_at_version: int | None = None
    """`digest` misreports while this version is loaded."""
    num_lies = 0
    fail_after_patches: int | None = None
    """`apply` raises after so many patches, once."""
    skip_patch: int | None = None
    """`apply` silently leaves out this patch, once."""
    fail_loads = 0
    """So many `load`s raise after writing half of the tensors."""
    num_pauses = 0
    slow_digest = timedelta(0)

    def pause(self, *, timeout: timedelta) -> None:
        self.num_pauses += 1
        super().pause(timeout=timeout)

    def digest(self, names: Iterable[str]) -> Mapping[str, TensorDigest]:
        return self._maybe_false(super().digest(names))

    def digest_at(self, patches: Iterable[TensorPatch]) -> Mapping[str, TensorDigest]:
        return self._maybe_false(super().digest_at(self._slowly(patches)))

    def _slowly(self, patches: Iterable[TensorPatch]) -> Iterator[TensorPatch]:
        for patch in patches:
            threading.Event().wait(self.slow_digest.total_seconds())
            yield patch

    def _maybe_false(self, digests: Mapping[str, TensorDigest]) -> Mapping[str, TensorDigest]:
        if self.lie_at_version is not None and self.version == self.lie_at_version:
            self.num_lies += 1
            return {name: digest + TensorDigest(1, 0) for name, digest in digests.items()}
        return digests

    def apply(self, patches: Iterable[TensorPatch], *, version: int) -> None:
        super().apply(self._failing(patches), version=version)

    def _failing(self, patches: Iterable[TensorPatch]) -> Iterator[TensorPatch]:
        for number, patch in enumerate(patches):
            if number == self.fail_after_patches:
                self.fail_after_patches = None
                raise EngineError(f"planted fault at patch {number}")
            if number == self.skip_patch:
                self.skip_patch = None
                continue
            yield patch

    def load(self, tensors: Mapping[str, npt.NDArray[Any]], *, version: int) -> None:
        if self.fail_loads:
            self.fail_loads -= 1
            self.apply(self._half(tensors), version=version)
        super().load(tensors, version=version)

    def _half(self, tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[TensorPatch]:
        for number, name in enumerate(sorted(tensors)):
            if number == len(tensors) // 2:
                raise EngineError("planted fault in the middle of a load")
            bits = bits_of(tensors[name]) ^ np.uint16(1)
            yield TensorPatch(tensor=number, start=0, count=len(bits), indices=None, values=bits, undo=None)


@dataclass
class World:
    """A run with a publisher, and a worker's updater that is driven by hand."""

    publisher: Publisher
    subscriber: Subscriber
    engine: FaultyEngine
    updater: Updater
    events_path: Path
    weights: Weights

    def publish(self, weights: Weights) -> int:
        self.weights = weights
        return self.publisher.publish(weights).version

    def events(self, name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [record for record in records if record["event"] == name]

    def assert_serves(self, version: int, weights: Weights) -> None:
        assert self.updater.served_version == self.engine.version == version
        assert self.engine.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}

    def generate(self) -> list[int]:
        request = GenerationRequest(
            request_id="0",
            prompt_token_ids=self.engine.encode_chat("What is 1 + 2?"),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=3),
            seed=1,
        )
        return [span.version for span in self.engine.generate([request])[0].spans]


@contextmanager
def open_world(
    tiny_model: Path, weights: Weights, tmp_path: Path, *, pause_timeout: timedelta = SOON
) -> Iterator[World]:
    url = f"file://{tmp_path}/store"
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher.open(url, run="r1"))
        publisher.publish(weights)
        subscriber = stack.enter_context(
            Subscriber.open(url, run="r1", mirror=tmp_path / "mirror", seed=tiny_model, stage=True)
        )
        events = stack.enter_context(EventLog(tmp_path / "events.jsonl"))
        engine = FaultyEngine.open(tiny_model)
        stack.callback(engine.close)
        engine.bind(subscriber.schema)
        updater = Updater(
            engine=engine,
            subscriber=subscriber,
            events=events,
            region="eu",
            pause_timeout=pause_timeout,
            poll=timedelta(milliseconds=100),
        )
        yield World(publisher, subscriber, engine, updater, tmp_path / "events.jsonl", weights)
        assert updater.stop(timeout=SOON)


@pytest.fixture
def world(tiny_model: Path, tiny_weights: Weights, tmp_path: Path) -> Iterator[World]:
    with open_world(tiny_model, tiny_weights, tmp_path) as opened:
        yield opened


def with_element(weights: Weights, position: int, step: int = 1) -> Weights:
    """Return weights in which one element of one tensor has moved by `step` units in the last place."""
    changed = {name: array.copy() for name, array in weights.items()}
    bits_of(changed[PLACE])[position] += np.uint16(step)
    return changed


def test_first_version_is_seeded_proved_and_served_without_wire_bytes(world: World) -> None:
    assert world.updater.served_version is None
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(0, world.weights)
    (event,) = world.events("version_applied")
    assert event["full"]
    assert event["from_version"] is None
    assert event["wire_bytes"] == world.updater.num_wire_bytes
    assert event["wire_bytes"] < 50_000
    assert event["digest"] == world.publisher.publish(world.weights).version_digest.hex()


def test_each_version_lands_as_a_patch_with_its_seconds_and_digest(world: World, nudged: Nudged) -> None:
    world.updater.update_once(timeout=SOON)
    for seed in (1, 2):
        world.publish(nudged(world.weights, seed))
        assert world.updater.update_once(timeout=SOON)
        world.assert_serves(seed, world.weights)
    event = world.events("version_applied")[-1]
    assert not event["full"]
    assert (event["from_version"], event["version"], event["region"]) == (1, 2, "eu")
    assert set(event["seconds"]) >= {"fetch", "decode", "stage", "pause", "apply", "audit"}
    assert event["stepped_unix_seconds"] <= event["committed_unix_seconds"] <= event["serving_unix_seconds"]
    assert event["seen_unix_seconds"] <= event["serving_unix_seconds"]
    assert event["num_changed"] > 0


def test_nothing_new_changes_nothing(world: World) -> None:
    world.updater.update_once(timeout=SOON)
    assert not world.updater.update_once(timeout=NOW)
    assert world.engine.num_pauses == 1


def test_several_missed_versions_land_as_one_patch(world: World, nudged: Nudged) -> None:
    world.updater.update_once(timeout=SOON)
    for seed in (1, 2, 3):
        world.publish(nudged(world.weights, seed))
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(3, world.weights)
    assert [event["version"] for event in world.events("version_applied")] == [0, 3]
    assert world.engine.num_pauses == 2


def test_version_without_change_advances_without_a_pause(world: World) -> None:
    world.updater.update_once(timeout=SOON)
    world.publish(world.weights)
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(1, world.weights)
    assert world.engine.num_pauses == 1


def test_weight_that_went_up_and_came_back_needs_no_pause(world: World) -> None:
    world.updater.update_once(timeout=SOON)
    start = world.weights
    world.publish(with_element(start, 5))
    world.publish(start)
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(2, start)
    assert world.engine.num_pauses == 1


def test_refused_version_is_taken_back_and_the_next_one_makes_it_good(world: World) -> None:
    world.updater.update_once(timeout=SOON)
    world.publish(with_element(world.weights, 1))
    assert world.updater.update_once(timeout=SOON)
    one = world.weights
    world.engine.lie_at_version = 2
    world.publish(with_element(one, 77, step=3))
    assert not world.updater.update_once(timeout=SOON)
    assert world.engine.num_lies == 1
    world.assert_serves(1, one)
    assert world.generate() == [1]
    (failure,) = world.events("apply_failed")
    assert (failure["version"], failure["phase"]) == (2, "audit")
    assert PLACE in failure["reason"]
    world.publish(with_element(world.weights, 2))
    world.publish(with_element(world.weights, 3))
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(4, world.weights)
    assert [event["version"] for event in world.events("version_applied")] == [0, 1, 4]


def test_fault_in_the_middle_of_the_scatter_is_taken_back_and_retried(world: World, nudged: Nudged) -> None:
    world.updater.update_once(timeout=SOON)
    old = world.weights
    world.publish(nudged(old, 8))
    world.engine.fail_after_patches = 15
    assert not world.updater.update_once(timeout=SOON)
    world.assert_serves(0, old)
    assert world.generate() == [0]
    assert world.events("apply_failed")[-1]["phase"] == "apply"
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(1, world.weights)


def test_fault_that_cannot_be_taken_back_is_cured_by_a_reload(world: World, nudged: Nudged) -> None:
    world.updater.update_once(timeout=SOON)
    world.publish(nudged(world.weights, 9))
    world.engine.fail_after_patches = 15
    real_failing = world.engine._failing

    def failing_undo(patches: Iterable[TensorPatch]) -> Iterator[TensorPatch]:
        yield from real_failing(patches)
        if world.engine.fail_after_patches is None:
            raise EngineError("planted fault in the undo")

    world.engine._failing = failing_undo  # type: ignore[method-assign]
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(1, world.weights)
    assert [event["phase"] for event in world.events("apply_failed")] == ["apply", "undo"]
    assert world.events("version_applied")[-1]["full"]


def test_weights_that_cannot_be_proved_serve_nothing_and_recover_by_themselves(world: World, nudged: Nudged) -> None:
    world.updater.update_once(timeout=SOON)
    world.publish(nudged(world.weights, 10))
    world.engine.lie_at_version = 1
    world.engine.fail_loads = 0
    for _ in range(3):
        assert not world.updater.update_once(timeout=SOON)
        assert world.updater.served_version == 0
    # The fourth attempt loads everything, which has nothing to take back; the digests still do not agree.
    world.updater.update_once(timeout=SOON)
    assert world.updater.served_version is None
    assert world.engine.version is None
    assert not world.engine._gate.paused
    with pytest.raises(EngineError, match="no proved weights"):
        world.generate()
    world.engine.lie_at_version = None
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(1, world.weights)
    assert world.generate() == [1]


def test_bit_that_flips_in_live_weights_is_found_between_versions_and_healed(world: World) -> None:
    world.updater.update_once(timeout=SOON)
    assert world.updater.scrub(budget=SOON)
    live = world.engine._live[PLACE]
    live.write(TensorPatch(tensor=0, start=9, count=1, indices=None, values=np.array([0x7F80], np.uint16), undo=None))
    assert not world.updater.scrub(budget=SOON)
    assert world.updater.served_version is None
    with pytest.raises(EngineError, match="no proved weights"):
        world.generate()
    assert world.events("apply_failed")[-1]["phase"] == "scrub"
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(0, world.weights)


def test_write_that_goes_missing_in_the_engine_is_found_in_the_pause(world: World, nudged: Nudged) -> None:
    world.updater.update_once(timeout=SOON)
    old = world.weights
    world.publish(nudged(old, 30))
    world.engine.skip_patch = 7
    assert not world.updater.update_once(timeout=SOON)
    assert world.events("apply_failed")[-1]["phase"] == "audit"
    world.assert_serves(0, old)
    assert world.updater.update_once(timeout=SOON)
    world.assert_serves(1, world.weights)


def test_damaged_load_is_never_served(world: World) -> None:
    world.engine.fail_loads = 1
    world.updater.update_once(timeout=SOON)
    if world.updater.served_version is None:
        assert world.engine.version is None
        world.updater.update_once(timeout=SOON)
    world.assert_serves(0, world.weights)


def test_engine_is_never_paused_beyond_the_bound(
    tiny_model: Path, tiny_weights: Weights, tmp_path: Path, nudged: Nudged
) -> None:
    bound = timedelta(milliseconds=400)
    with open_world(tiny_model, tiny_weights, tmp_path, pause_timeout=bound) as world:
        world.updater.update_once(timeout=SOON)
        world.publish(nudged(tiny_weights, 11))
        world.engine.slow_digest = timedelta(milliseconds=60)
        started = time.monotonic()
        assert not world.updater.update_once(timeout=SOON)
        # Reading back 29 patches would take 1.7 s; one of them may be in progress when the time is over.
        assert time.monotonic() - started < 1.5
        assert not world.engine._gate.paused
        assert world.updater.served_version is None
        world.engine.slow_digest = timedelta(0)
        assert world.updater.update_once(timeout=SOON)
        world.assert_serves(1, world.weights)


def test_mirror_that_came_through_a_restart_is_served_while_the_source_is_away(
    tiny_model: Path, tiny_weights: Weights, tmp_path: Path, nudged: Nudged
) -> None:
    with open_world(tiny_model, tiny_weights, tmp_path) as world:
        world.updater.update_once(timeout=SOON)
        world.publish(nudged(tiny_weights, 12))
        world.updater.update_once(timeout=SOON)
        weights = world.weights
    (tmp_path / "store").rename(tmp_path / "away")
    with (
        Subscriber.open(f"file://{tmp_path}/store", run="r1", mirror=tmp_path / "mirror", stage=True) as subscriber,
        EventLog(tmp_path / "events2.jsonl") as events,
    ):
        engine = FaultyEngine.open(tiny_model)
        engine.bind(subscriber.schema)
        updater = Updater(
            engine=engine, subscriber=subscriber, events=events, region="eu", pause_timeout=SOON, poll=NOW
        )
        assert updater.update_once(timeout=NOW)
        assert updater.served_version == 1
        assert engine.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}
        engine.close()


def test_thread_lands_versions_while_the_engine_generates(world: World, nudged: Nudged) -> None:
    world.updater.start()
    assert world.updater.wait_until_served(timeout=SOON)
    stop = threading.Event()
    seen: set[int] = set()

    def generate() -> None:
        while not stop.is_set():
            seen.update(world.generate())

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        for seed in (20, 21, 22):
            version = world.publish(nudged(world.weights, seed))
            deadline = time.monotonic() + 20
            while version not in seen and time.monotonic() < deadline:
                stop.wait(0.01)
            assert version in seen
    finally:
        stop.set()
        thread.join(20)
    assert world.updater.stop(timeout=SOON)
    world.assert_serves(3, world.weights)
    assert not world.events("apply_failed")
