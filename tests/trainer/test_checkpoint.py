from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsewire.sync.errors import DamagedError
from sparsewire.sync.trajectories import Trajectory
from sparsewire.trainer.batch import TrainingBatch, assemble
from sparsewire.trainer.checkpoint import CheckpointStore
from sparsewire.trainer.config import ComputeDtype
from sparsewire.trainer.learner import Learner, LearnerSettings
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import load_model
from sparsewire.trainer.ranks import ProcessGroup

Groups = Callable[..., list[list[Trajectory]]]


@pytest.fixture
def make_learner(group: ProcessGroup, tiny_model: Path) -> Callable[[], Learner]:
    def make() -> Learner:
        model = load_model(tiny_model, mesh=group.mesh, device=group.device, compute_dtype=ComputeDtype.FLOAT32)
        return Learner(
            model=model,
            group=group,
            settings=LearnerSettings(learning_rate=1e-3, clip=ClipRange(low=0.2, high=0.28), micro_batch_size=8),
        )

    return make


@pytest.fixture
def store(group: ProcessGroup, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(directory=tmp_path / "checkpoints", ranks=group.control, keep=2)


@pytest.fixture
def batches(groups: Groups) -> list[TrainingBatch]:
    return [assemble(groups(seed=seed), version=0, vocabulary_size=256) for seed in range(4)]


def _equal(one: Learner, other: Learner) -> bool:
    ours, theirs = one.state(), other.state()
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_resumed_learner_goes_on_exactly_like_one_that_was_never_stopped(
    make_learner: Callable[[], Learner], store: CheckpointStore, batches: list[TrainingBatch]
) -> None:
    straight = make_learner()
    for batch in batches[:2]:
        straight.step(batch)
    store.save(straight, version=7)
    resumed = make_learner()
    seal = store.load_newest(resumed)
    assert seal is not None
    assert (seal.step, seal.version, resumed.step_number) == (2, 7, 2)
    assert _equal(straight, resumed)
    for batch in batches[2:]:
        straight.step(batch)
        resumed.step(batch)
    assert _equal(straight, resumed)


def test_without_a_checkpoint_the_learner_stays_as_it_is(
    make_learner: Callable[[], Learner], store: CheckpointStore
) -> None:
    assert store.load_newest(make_learner()) is None


def test_only_the_newest_checkpoints_are_kept(
    make_learner: Callable[[], Learner], store: CheckpointStore, batches: list[TrainingBatch]
) -> None:
    learner = make_learner()
    for batch in batches:
        learner.step(batch)
        store.save(learner, version=learner.step_number)
    assert store.kept_steps() == [4, 3]


def _damage(path: Path, how: str) -> None:
    data = next(path.glob("*.distcp"))
    match how:
        case "flip":
            bits = bytearray(data.read_bytes())
            bits[len(bits) // 2] ^= 1
            data.write_bytes(bits)
        case "truncate":
            data.write_bytes(data.read_bytes()[:-1])
        case "lose":
            data.unlink()
        case "metadata":
            (path / ".metadata").write_bytes(b"")
        case "seal":
            (path / "checkpoint.json").write_text('{"step": ')
        case "format":
            fields = json.loads((path / "checkpoint.json").read_text())
            (path / "checkpoint.json").write_text(json.dumps({**fields, "format": 99}))


@pytest.mark.parametrize("how", ["flip", "truncate", "lose", "metadata", "seal", "format"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_it(
    make_learner: Callable[[], Learner],
    store: CheckpointStore,
    batches: list[TrainingBatch],
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    learner = make_learner()
    learner.step(batches[0])
    store.save(learner, version=1)
    learner.step(batches[1])
    _damage(store.save(learner, version=2), how)
    resumed = make_learner()
    with caplog.at_level(logging.WARNING):
        seal = store.load_newest(resumed)
    assert seal is not None
    assert seal.step == 1
    assert "step-00000002" in caplog.text
    # The step is taken again, and its checkpoint replaces the damaged one.
    resumed.step(batches[1])
    store.save(resumed, version=3)
    assert _equal(learner, resumed)
    again = store.load_newest(make_learner())
    assert again is not None
    assert again.step == 2


def test_when_all_checkpoints_are_damaged_loading_fails_rather_than_starting_over(
    make_learner: Callable[[], Learner], store: CheckpointStore, batches: list[TrainingBatch]
) -> None:
    learner = make_learner()
    learner.step(batches[0])
    _damage(store.save(learner, version=1), "flip")
    with pytest.raises(DamagedError, match="step-00000001"):
        store.load_newest(make_learner())


def test_a_checkpoint_cut_off_in_the_middle_is_invisible(
    make_learner: Callable[[], Learner], store: CheckpointStore, batches: list[TrainingBatch]
) -> None:
    learner = make_learner()
    learner.step(batches[0])
    cut_off = store.save(learner, version=1)
    cut_off.rename(cut_off.with_name(".incoming-step-00000001"))
    assert store.load_newest(make_learner()) is None
    store.save(learner, version=1)
    assert [path.name for path in store.directory.iterdir()] == ["step-00000001"]
