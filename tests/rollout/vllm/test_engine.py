"""A vLLM in processes of its own follows a run: versions land proved, in flight, or not at all."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.rollout.change import Change
from sparsewire.rollout.engine import Generation, GenerationRequest
from sparsewire.rollout.updater import Updater
from sparsewire.rollout.vllm.engine import VllmEngine
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import DamagedError, DeadlineExceededError, EngineError, WrongBaseError
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.telemetry import EventLog
from sparsewire.sync.trajectories.types import FinishReason, SamplingParams, VersionSpan

Weights = dict[str, npt.NDArray[Any]]
Nudge = Callable[..., Weights]

SOON = timedelta(seconds=20)


@pytest.fixture(scope="module")
def engine(model_of: Callable[[str], Path], open_vllm: Callable[..., VllmEngine]) -> Iterator[VllmEngine]:
    """One vLLM for all tests of this file; each test loads the versions of a run of its own."""
    opened = open_vllm(model_of("qwen3"))
    yield opened
    opened.close()
    # What vLLM leaves unclosed should be found here, where its warnings are let pass.
    gc.collect()


@dataclass
class World:
    """A run with a publisher, and an updater that is driven by hand."""

    publisher: Publisher
    subscriber: Subscriber
    engine: VllmEngine
    updater: Updater
    events_path: Path
    weights: Weights

    def publish(self, weights: Weights) -> None:
        self.weights = weights
        self.publisher.publish(weights)

    def land(self) -> None:
        assert self.updater.update_once(timeout=SOON)

    def events(self, name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [record for record in records if record["event"] == name]

    def assert_serves(self, version: int) -> None:
        assert self.updater.served_version == self.engine.version == version
        assert self.engine.digest(self.weights) == {name: tensor_digest(array) for name, array in self.weights.items()}

    def next_change(self) -> Change:
        self.subscriber.sync()
        update = self.subscriber.staged()
        assert update is not None
        assert update.base_version is not None
        return Change(
            patches=list(update.patches()),
            base_version=update.base_version,
            version=update.version,
            path=update.paths[0],
        )


@pytest.fixture
def world(
    engine: VllmEngine, model_of: Callable[[str], Path], weights_of: Callable[[Path], Weights], tmp_path: Path
) -> Iterator[World]:
    """A run at version 0, served."""
    url, weights = f"file://{tmp_path}/store", weights_of(model_of("qwen3"))
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher.open(url, run="r1"))
        publisher.publish(weights)
        subscriber = stack.enter_context(Subscriber.open(url, run="r1", mirror=tmp_path / "mirror", stage=True))
        events = stack.enter_context(EventLog(tmp_path / "events.jsonl"))
        engine.bind(subscriber.schema)
        updater = Updater(
            engine=engine,
            subscriber=subscriber,
            events=events,
            region="eu",
            pause_timeout=SOON,
            poll=timedelta(milliseconds=100),
        )
        opened = World(publisher, subscriber, engine, updater, tmp_path / "events.jsonl", weights)
        opened.land()
        yield opened
        assert updater.stop(timeout=SOON)


def request(engine: VllmEngine, number: int, *, num_tokens: int = 200, temperature: float = 1e-3) -> GenerationRequest:
    """Return a request; at temperatures as low as this the likeliest token is chosen every time."""
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=engine.encode_chat(f"What is {number} + 2?"),
        sampling=SamplingParams(temperature=temperature, max_new_tokens=num_tokens),
        seed=number,
    )


def begin(pool: ThreadPoolExecutor, engine: VllmEngine, requests: list[GenerationRequest]) -> Future[Any]:
    """Start a batch in another thread and return once vLLM has it."""
    future = pool.submit(engine.generate, requests)
    waiting = threading.Event()
    while len(engine._in_flight) < len(requests) and not future.done():
        waiting.wait(0.002)
    return future


@pytest.fixture
def pool(engine: VllmEngine) -> Iterator[ThreadPoolExecutor]:
    """One thread that generates; what a failed test leaves in flight is aborted."""
    with ThreadPoolExecutor(1) as executor:
        yield executor
        if engine._in_flight:
            engine.withdraw()


def test_chain_of_versions_ends_as_a_fresh_engine(
    world: World,
    nudge_weights: Nudge,
    write_checkpoint: Callable[[Path, Path, Weights], None],
    model_of: Callable[[str], Path],
    open_llm: Callable[..., Any],
    tmp_path: Path,
) -> None:
    for version in range(1, 21):
        world.publish(nudge_weights(world.weights, version))
        world.land()
    world.assert_serves(20)
    assert len(world.events("version_applied")) == 21
    assert not any(event["full"] for event in world.events("version_applied")[1:])
    made = world.engine.generate([request(world.engine, number, num_tokens=30) for number in range(3)])

    write_checkpoint(tmp_path / "last", model_of("qwen3"), world.weights)
    fresh = open_llm(tmp_path / "last", logprobs_mode="processed_logprobs")
    for number, generation in enumerate(made):
        assert completion(fresh, request(world.engine, number, num_tokens=30)) == as_lists(generation)
        assert generation.spans == (VersionSpan(version=20, start=0, stop=30),)


def as_lists(generation: Generation, start: int = 0) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities from a token on."""
    return generation.completion_token_ids[start:].tolist(), generation.logprobs[start:].tolist()


def completion(fresh: Any, wanted: GenerationRequest, prefix: list[int] | None = None) -> tuple[list[int], list[float]]:
    """Let an engine in this process complete a request, from a prefix of the completion on."""
    from vllm import SamplingParams as VllmSamplingParams

    prefix = prefix or []
    sampling = VllmSamplingParams(
        temperature=0.0,
        max_tokens=wanted.sampling.max_new_tokens - len(prefix),
        seed=wanted.seed,
        logprobs=0,
    )
    prompt = {"prompt_token_ids": [*wanted.prompt_token_ids.tolist(), *prefix]}
    (result,) = fresh.llm.generate([prompt], sampling, use_tqdm=False)
    output = result.outputs[0]
    chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    return list(output.token_ids), np.array(chosen, np.float32).tolist()


def test_interrupted_request_goes_on_as_a_fresh_engine_would_from_the_same_prefix(
    world: World,
    pool: ThreadPoolExecutor,
    nudge_weights: Nudge,
    write_checkpoint: Callable[[Path, Path, Weights], None],
    model_of: Callable[[str], Path],
    open_llm: Callable[..., Any],
    tmp_path: Path,
) -> None:
    world.publish(nudge_weights(world.weights, 1))
    wanted = request(world.engine, 7)
    future = begin(pool, world.engine, [wanted])
    world.land()
    (generation,) = future.result(timeout=60)
    assert generation.finish_reason is FinishReason.LENGTH
    assert len(generation.completion_token_ids) == 200
    before, after = generation.spans
    assert (before.version, after.version) == (0, 1)
    assert (before.start, after.start, after.stop) == (0, before.stop, 200)
    assert 0 < before.stop < 200

    write_checkpoint(tmp_path / "last", model_of("qwen3"), world.weights)
    old = open_llm(model_of("qwen3"), logprobs_mode="processed_logprobs")
    tokens, logprobs = completion(old, wanted)
    at = before.stop
    assert (tokens[:at], logprobs[:at]) == (
        generation.completion_token_ids[:at].tolist(),
        generation.logprobs[:at].tolist(),
    )
    fresh = open_llm(tmp_path / "last", logprobs_mode="processed_logprobs")
    assert completion(fresh, wanted, tokens[:at]) == as_lists(generation, at)


def test_sixteen_requests_in_flight_survive_three_updates(
    world: World, pool: ThreadPoolExecutor, nudge_weights: Nudge
) -> None:
    requests = [request(world.engine, number, temperature=1.0, num_tokens=300) for number in range(16)]
    future = begin(pool, world.engine, requests)
    for version in (1, 2, 3):
        world.publish(nudge_weights(world.weights, version))
        world.land()
    generations = future.result(timeout=120)
    assert [generation.request_id for generation in generations] == [str(number) for number in range(16)]
    for generation in generations:
        assert len(generation.completion_token_ids) == 300
        assert generation.spans[0].start == 0
        assert generation.spans[-1].stop == 300
        assert all(one.stop == two.start for one, two in zip(generation.spans, generation.spans[1:], strict=False))
        versions = [span.version for span in generation.spans]
        assert versions == sorted(set(versions))
        assert versions[-1] == 3
    world.assert_serves(3)


def test_prompt_seen_before_is_not_answered_from_a_stale_cache(world: World, nudge_weights: Nudge) -> None:
    wanted = [request(world.engine, 5, num_tokens=40)]
    (first,) = world.engine.generate(wanted)
    world.publish(nudge_weights(world.weights, 1, share=0.2))
    world.land()
    (second,) = world.engine.generate(wanted)
    assert as_lists(second) != as_lists(first)
    world.publish(world.weights)
    world.land()
    assert world.events("version_applied")[-1]["seconds"]["pause"] == 0.0
    (third,) = world.engine.generate(wanted)
    assert as_lists(third) == as_lists(second)
    assert [span.version for span in third.spans] == [2]
    world.assert_serves(2)


def test_damaged_missing_or_foreign_patch_file_is_refused_before_any_write(
    world: World, nudge_weights: Nudge, tmp_path: Path
) -> None:
    world.publish(nudge_weights(world.weights, 1))
    change = world.next_change()
    assert change.path is not None
    damaged = tmp_path / "damaged.patch"
    data = bytearray(change.path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    live = world.engine.digest(world.weights)
    with pytest.raises(DamagedError, match="hash"):
        world.engine.stage(Change(patches=change.patches, base_version=0, version=1, path=damaged))
    gone = Change(patches=change.patches, base_version=0, version=1, path=tmp_path / "gone.patch")
    with pytest.raises(DamagedError, match=r"gone\.patch"):
        world.engine.stage(gone)
    wrong = Change(patches=change.patches, base_version=5, version=6, path=change.path)
    world.engine.pause(timeout=SOON)
    with pytest.raises(WrongBaseError, match="from version 5 to 6, the engine holds 0"):
        world.engine.apply(wrong, version=6)
    assert world.engine.version is None
    assert world.engine.digest(world.weights) == live
    world.engine.apply(change.inverted(), version=0)
    world.engine.resume()
    assert world.engine.version == 0
    world.land()
    world.assert_serves(1)


def test_late_apply_is_taken_back_and_the_old_version_goes_on(
    world: World, pool: ThreadPoolExecutor, nudge_weights: Nudge
) -> None:
    old = world.weights
    world.publish(nudge_weights(world.weights, 1))
    change = world.next_change()
    future = begin(pool, world.engine, [request(world.engine, 3)])
    world.engine.stage(change)
    world.engine.pause(timeout=SOON)
    with pytest.raises(DeadlineExceededError, match="rank 0"):
        world.engine.apply(change.until(0.0), version=1)
    world.engine.apply(change.inverted(), version=0)
    assert world.engine.digest(old) == {name: tensor_digest(array) for name, array in old.items()}
    world.engine.resume()
    (generation,) = future.result(timeout=60)
    assert generation.spans == (VersionSpan(version=0, start=0, stop=200),)
    world.land()
    world.assert_serves(1)


def test_withdrawn_engine_serves_nothing_until_weights_are_proved_again(world: World, pool: ThreadPoolExecutor) -> None:
    future = begin(pool, world.engine, [request(world.engine, number) for number in range(4)])
    world.engine.withdraw()
    world.engine.resume()
    with pytest.raises(EngineError, match="given up"):
        future.result(timeout=60)
    with pytest.raises(EngineError, match="no proved weights"):
        world.engine.generate([request(world.engine, 1)])
    world.land()
    world.assert_serves(0)
    (generation,) = world.engine.generate([request(world.engine, 1, num_tokens=5)])
    assert [span.version for span in generation.spans] == [0]


@pytest.mark.slow
def test_killed_engine_core_is_started_again_at_the_newest_version(
    world: World, pool: ThreadPoolExecutor, nudge_weights: Nudge
) -> None:
    future = begin(pool, world.engine, [request(world.engine, number) for number in range(4)])
    (core,) = [process.pid for process in multiprocessing.active_children() if "EngineCore" in process.name]
    assert core is not None
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineError):
        future.result(timeout=60)
    assert world.engine.version is None
    world.publish(nudge_weights(world.weights, 1))
    world.land()
    world.assert_serves(1)
    (generation,) = world.engine.generate([request(world.engine, 1, num_tokens=5)])
    assert [span.version for span in generation.spans] == [1]


def test_closing_in_mid_generation_gives_back_what_there_is(world: World, pool: ThreadPoolExecutor) -> None:
    future = begin(pool, world.engine, [request(world.engine, number, num_tokens=400) for number in range(4)])
    world.engine.close()
    generations = future.result(timeout=60)
    assert [generation.finish_reason for generation in generations] == [FinishReason.ABORT] * 4
