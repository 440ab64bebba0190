"""The engine scores what the learner scored: rounding passes, weights that are not the ones proved do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import save_file

from sparsewire.rollout.engine import GenerationRequest
from sparsewire.rollout.probe import MAX_SHARE, ProbeWatch, Scores
from sparsewire.rollout.transformers_engine import TransformersEngine
from sparsewire.rollout.updater import Updater
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import EngineError
from sparsewire.sync.probe import Probe, ProbeSequence
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.telemetry import EventLog
from sparsewire.sync.trajectories.types import SamplingParams
from sparsewire.trainer.config import PROBE_TEXTS
from sparsewire.trainer.model import load_model
from sparsewire.trainer.probe import open_prober
from sparsewire.trainer.ranks import open_process_group

Weights = dict[str, npt.NDArray[Any]]
OpenEngine = Callable[..., TransformersEngine]

SOON = timedelta(seconds=5)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.norm.weight"
THRESHOLD = 1.0


def learners_probe(directory: Path, weights: Weights, folder: Path) -> Probe:
    """Return the probe that a learner with these bf16 weights publishes."""
    folder.mkdir()
    for file in directory.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {
        name: torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16) for name, array in weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with open_process_group() as group:
        model = load_model(folder, mesh=group.mesh, device=group.device)
        prober = open_prober(PROBE_TEXTS, directory=folder, model=model, group=group)
        assert prober is not None
        probe = prober.score()
    assert probe is not None
    return probe


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory, tiny_model_writer: Callable[..., None]) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    tiny_model_writer(directory, tie_word_embeddings=False)
    return directory


def with_changed(weights: Weights, name: str) -> Weights:
    """Return weights in which one tensor is another one altogether."""
    random = np.random.default_rng(7)
    old = weights[name].astype(np.float32)
    new = random.permutation(old) if old.ndim == 2 else old * random.uniform(0.2, 2.0, old.shape)
    return {**weights, name: new.astype(ml_dtypes.bfloat16)}


@dataclass
class World:
    """A run, and a worker's updater driven by hand."""

    publisher: Publisher
    engine: TransformersEngine
    updater: Updater
    events_path: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [record for record in records if record["event"] == name]


@pytest.fixture
def open_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Opens a run of a model's weights and an updater with an engine of it."""
    with ExitStack() as stack:

        def make(directory: Path, weights: Weights, probe: Probe | None, *, interval: float = 0.0) -> World:
            url = f"file://{tmp_path}/store"
            publisher = stack.enter_context(Publisher.open(url, run="r1"))
            publisher.publish(weights, probe=probe)
            subscriber = stack.enter_context(Subscriber.open(url, run="r1", mirror=tmp_path / "mirror", stage=True))
            events = stack.enter_context(EventLog(tmp_path / "events.jsonl"))
            engine = TransformersEngine.open(directory)
            stack.callback(engine.close)
            engine.bind(subscriber.schema)
            watch = ProbeWatch(
                engine=engine,
                events=events,
                region="eu",
                threshold=THRESHOLD,
                interval=timedelta(seconds=interval),
                clock=Ticks(step=0.0),
            )
            updater = Updater(
                engine=engine,
                subscriber=subscriber,
                events=events,
                region="eu",
                pause_timeout=SOON,
                poll=timedelta(0),
                probes=watch,
            )
            return World(publisher, engine, updater, tmp_path / "events.jsonl")

        yield make


class Ticks:
    """A clock that goes on by a fixed step with every look at it."""

    def __init__(self, *, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_an_engine_with_the_learners_weights_differs_by_rounding_only(
    open_world: Callable[..., World], tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    probe = learners_probe(tiny_model, tiny_weights, tmp_path / "learner")
    before = counted("sparsewire_worker_probes_total", outcome="within")
    world = open_world(tiny_model, tiny_weights, probe)
    assert world.updater.update_once(timeout=SOON)
    (scored,) = world.events("probe_scored")
    assert (scored["version"], scored["region"], scored["num_tokens"]) == (0, "eu", probe.num_scored)
    assert scored["mean"] <= scored["max"] < 0.1 * THRESHOLD
    assert not world.events("probe_alarm")
    assert counted("sparsewire_worker_probes_total", outcome="within") == before + 1
    assert counted("sparsewire_worker_probe_last_difference") == pytest.approx(scored["max"], abs=1e-5)


@pytest.mark.parametrize("name", [HEAD, NORM, EMBEDDING])
def test_a_stale_copy_that_no_digest_can_see_is_an_alarm(
    open_world: Callable[..., World],
    untied_model: Path,
    weights_reader: Callable[[Path], Weights],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    old = weights_reader(untied_model)
    new = with_changed(old, name)
    world = open_world(untied_model, old, learners_probe(untied_model, old, tmp_path / "old"))
    assert world.updater.update_once(timeout=SOON)
    # What the engine computes with is from now on a copy of what the updates are written to.
    module = world.engine._model.get_submodule(name.removesuffix(".weight"))
    module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    world.publisher.publish(new, probe=learners_probe(untied_model, new, tmp_path / "new"))
    with caplog.at_level(logging.ERROR):
        assert world.updater.update_once(timeout=SOON)
    assert world.updater.served_version == 1
    assert world.engine.digest(new) == {each: tensor_digest(array) for each, array in new.items()}
    (alarm,) = world.events("probe_alarm")
    assert alarm["version"] == 1
    assert alarm["max"] > alarm["threshold"] == THRESHOLD
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("rollout.probe")]
    assert "version 1" in line
    assert "probe_threshold 1" in line
    assert "restart the worker" in line


def test_a_head_rolled_by_one_row_is_an_alarm(
    open_world: Callable[..., World],
    untied_model: Path,
    weights_reader: Callable[[Path], Weights],
    tmp_path: Path,
) -> None:
    weights = weights_reader(untied_model)
    world = open_world(untied_model, weights, learners_probe(untied_model, weights, tmp_path / "learner"))
    head = world.engine._model.lm_head

    def roll(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.roll(1, dims=-1)

    head.register_forward_hook(roll)
    assert world.updater.update_once(timeout=SOON)
    (alarm,) = world.events("probe_alarm")
    assert alarm["max"] > 5 * THRESHOLD


def test_numbers_that_are_not_finite_are_an_alarm_without_a_number(
    open_world: Callable[..., World], tiny_model: Path, tiny_weights: Weights
) -> None:
    broken = {name: array.copy() for name, array in tiny_weights.items()}
    broken[NORM][:] = np.nan
    world = open_world(tiny_model, broken, Probe.of([[5, 6, 7]], [[-1.0, -2.0]]))
    assert world.updater.update_once(timeout=SOON)
    (alarm,) = world.events("probe_alarm")
    assert alarm["mean"] is alarm["max"] is None


def test_without_a_probe_nothing_happens(
    open_world: Callable[..., World], tiny_model: Path, tiny_weights: Weights
) -> None:
    world = open_world(tiny_model, tiny_weights, None)
    assert world.updater.update_once(timeout=SOON)
    assert not world.updater.update_once(timeout=timedelta(0))
    assert not world.updater.score_probe(now=True)
    assert not world.events("probe_scored")


def test_only_the_newest_version_is_scored_and_only_when_the_interval_is_over(
    open_world: Callable[..., World], tiny_model: Path, tiny_weights: Weights, nudged: Callable[[Weights, int], Weights]
) -> None:
    probe = Probe.of([[5, 6, 7]], [[-1.0, -2.0]])
    world = open_world(tiny_model, tiny_weights, probe, interval=3600)
    assert world.updater.update_once(timeout=SOON)
    for seed in (1, 2, 3):
        world.publisher.publish(nudged(tiny_weights, seed), probe=probe)
        assert world.updater.update_once(timeout=SOON)
    assert not world.updater.update_once(timeout=timedelta(0))
    assert [event["version"] for event in world.events("probe_scored")] == [0]
    assert world.updater.score_probe(now=True)
    assert not world.updater.score_probe(now=True)
    assert [event["version"] for event in world.events("probe_scored")] == [0, 3]


class Counting:
    """The part of an engine that probes need; each scoring takes some seconds of a clock."""

    def __init__(self, clock: Ticks, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.version: int | None = 0
        self.num_scorings = 0

    def score(self, sequences: Sequence[ProbeSequence]) -> list[npt.NDArray[np.float32]]:
        self.num_scorings += 1
        self._clock.now += self._seconds
        return [np.asarray(sequence.logprobs, np.float32) for sequence in sequences]


def test_slow_scoring_takes_a_bounded_share_of_the_time(tmp_path: Path) -> None:
    clock = Ticks(step=0.0)
    counting = Counting(clock, 2.0)
    assert isinstance(counting, Scores)
    engine: Any = counting
    with EventLog(tmp_path / "events.jsonl") as events:
        watch = ProbeWatch(
            engine=engine, events=events, region="eu", threshold=1.0, interval=timedelta(seconds=1), clock=clock
        )
        for _ in range(1000):
            watch.offer(0, Probe.of([[1, 2]], [[-1.0]]))
            watch.score_when_due()
            clock.now += 1.0
    assert counting.num_scorings * 2.0 <= MAX_SHARE * clock.now + 2.0
    assert counting.num_scorings > 20


def test_a_version_that_is_no_longer_served_is_not_scored(tmp_path: Path) -> None:
    engine: Any = Counting(Ticks(step=0.0), 0.0)
    with EventLog(tmp_path / "events.jsonl") as events:
        watch = ProbeWatch(engine=engine, events=events, region="eu", threshold=1.0, interval=timedelta(0))
        watch.offer(0, Probe.of([[1, 2]], [[-1.0]]))
        engine.version = None
        assert not watch.score_when_due()
        assert engine.num_scorings == 0


def test_a_probe_that_does_not_fit_the_model_is_counted_and_generation_goes_on(
    open_world: Callable[..., World], tiny_model: Path, tiny_weights: Weights
) -> None:
    failed = counted("sparsewire_worker_probes_total", outcome="failed")
    world = open_world(tiny_model, tiny_weights, Probe.of([[5, 1_000_000]], [[-1.0]]))
    assert world.updater.update_once(timeout=SOON)
    assert world.updater.served_version == 0
    assert counted("sparsewire_worker_probes_total", outcome="failed") == failed + 1
    with pytest.raises(EngineError, match="ids up to 1000000 does not fit"):
        world.engine.score(Probe.of([[5, 1_000_000]], [[-1.0]]).sequences)


def test_scores_are_those_of_generation(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    engine = open_engine(tiny_weights)
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=engine.encode_chat(prompt),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=12),
            seed=number,
        )
        for number, prompt in enumerate(("What is 12 + 34?", "Hi", "What is the answer to 5 + 5?"))
    ]
    sequences = [
        ProbeSequence(
            token_ids=(*request.prompt_token_ids.tolist(), *made.completion_token_ids.tolist()),
            num_given=len(request.prompt_token_ids),
            logprobs=tuple(made.logprobs.tolist()),
        )
        for request, made in zip(requests, engine.generate(requests), strict=True)
    ]
    for scores, sequence in zip(engine.score(sequences), sequences, strict=True):
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, sequence.logprobs, atol=0.15)
    one = [sequences[1], *sequences]
    assert len(engine.score(one)) == 4


def test_nothing_is_scored_before_weights_are_proved(open_engine: OpenEngine) -> None:
    with pytest.raises(EngineError, match="no proved weights"):
        open_engine().score(Probe.of([[1, 2]], [[-1.0]]).sequences)
