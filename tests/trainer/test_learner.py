from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsewire.sync.trajectories import Trajectory
from sparsewire.trainer.batch import TrainingBatch, assemble
from sparsewire.trainer.config import ComputeDtype
from sparsewire.trainer.learner import Learner, LearnerSettings
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import load_model, vocabulary_size
from sparsewire.trainer.ranks import ProcessGroup

Groups = Callable[..., list[list[Trajectory]]]


def _learner(
    group: ProcessGroup,
    directory: Path,
    *,
    micro_batch_size: int = 4,
    warmup_steps: int = 0,
    learning_rate: float = 1e-3,
) -> Learner:
    model = load_model(directory, mesh=group.mesh, device=group.device, compute_dtype=ComputeDtype.FLOAT32)
    settings = LearnerSettings(
        learning_rate=learning_rate,
        clip=ClipRange(low=0.2, high=0.28),
        micro_batch_size=micro_batch_size,
        warmup_steps=warmup_steps,
    )
    return Learner(model=model, group=group, settings=settings)


def _batch(groups: Groups, learner: Learner, *, seed: int = 0) -> TrainingBatch:
    return assemble(groups(seed=seed), version=0, vocabulary_size=vocabulary_size(learner.model))


def _copy(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state().items()}


@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
def test_micro_batch_size_does_not_change_the_gradient(
    group: ProcessGroup, tiny_model: Path, groups: Groups, micro_batch_size: int
) -> None:
    whole = _learner(group, tiny_model, micro_batch_size=16)
    cut = _learner(group, tiny_model, micro_batch_size=micro_batch_size)
    one, other = whole.step(_batch(groups, whole)), cut.step(_batch(groups, cut))
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert other.loss == pytest.approx(one.loss, rel=1e-4)
    assert other.kl == pytest.approx(one.kl, rel=1e-4)
    assert other.num_tokens == one.num_tokens


def test_steps_on_one_batch_raise_the_probability_of_what_was_rewarded(
    group: ProcessGroup, tiny_model: Path, groups: Groups
) -> None:
    learner = _learner(group, tiny_model, learning_rate=3e-3)
    batch = _batch(groups, learner)
    losses = [learner.step(batch).loss for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("poisoned", "poison"), [("behaviour_logprobs", np.nan), ("advantages_N", np.nan), ("advantages_N", np.inf)]
)
def test_a_gradient_or_loss_that_is_not_finite_changes_nothing_and_counts_as_skipped(
    group: ProcessGroup, tiny_model: Path, groups: Groups, poisoned: str, poison: float
) -> None:
    learner = _learner(group, tiny_model)
    batch = _batch(groups, learner)
    learner.step(batch)
    before = _copy(learner)
    values = getattr(batch, poisoned).copy()
    values[-1] = poison
    stats = learner.step(replace(batch, **{poisoned: values}))
    assert stats.skipped
    assert learner.step_number == 2
    for name, tensor in learner.state().items():
        assert torch.equal(tensor, before[name]), name
    assert not learner.step(batch).skipped


def test_leaving_out_rows_without_advantage_does_not_change_the_gradient(
    group: ProcessGroup, tiny_model: Path, groups: Groups, trajectory: Callable[..., Trajectory]
) -> None:
    mixed = groups(seed=0)
    alike = [trajectory(group=9, sample=sample, completion=(7, 8, 9), reward=1.0) for sample in range(4)]
    with_rows, scaled = _learner(group, tiny_model), _learner(group, tiny_model)
    batch = assemble([*mixed, alike], version=0, vocabulary_size=256)
    alone = assemble(mixed, version=0, vocabulary_size=256)
    one, other = with_rows.step(batch), scaled.step(alone)
    # The mean is over all tokens, those of the group that was left out included.
    assert one.num_tokens == other.num_tokens + 12
    assert one.num_scored_tokens == other.num_scored_tokens <= other.num_tokens
    assert one.grad_norm * one.num_tokens == pytest.approx(other.grad_norm * other.num_tokens, rel=1e-5)


def test_a_batch_of_equal_rewards_has_no_gradient(
    group: ProcessGroup, tiny_model: Path, trajectory: Callable[..., Trajectory]
) -> None:
    learner = _learner(group, tiny_model)
    batch = assemble([[trajectory(sample=sample, reward=0.1) for sample in range(3)]], version=0, vocabulary_size=256)
    stats = learner.step(batch)
    assert stats.grad_norm == 0.0
    assert not stats.skipped


def test_a_batch_without_a_single_token_is_survived(
    group: ProcessGroup, tiny_model: Path, trajectory: Callable[..., Trajectory]
) -> None:
    learner = _learner(group, tiny_model)
    rows = [trajectory(sample=sample, completion=(999,), reward=float(sample)) for sample in range(2)]
    stats = learner.step(assemble([rows], version=0, vocabulary_size=256))
    assert stats.num_tokens == 0
    assert stats.grad_norm == 0.0


def test_the_learning_rate_rises_linearly_and_stays() -> None:
    settings = LearnerSettings(learning_rate=4.0, clip=ClipRange(low=0.2, high=0.2), warmup_steps=4)
    assert [settings.learning_rate_at(step) for step in (1, 2, 3, 4, 5, 100)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    constant = LearnerSettings(learning_rate=4.0, clip=ClipRange(low=0.2, high=0.2))
    assert constant.learning_rate_at(1) == 4.0


def test_the_gradient_is_clipped_to_its_bound(group: ProcessGroup, tiny_model: Path, groups: Groups) -> None:
    learner = _learner(group, tiny_model)
    before = learner.step(_batch(groups, learner)).grad_norm
    assert before > 1.0
    first_moment = [tensor for name, tensor in learner.state().items() if name.startswith("optimizer.exp_avg.")]
    # After one step the first moment is (1 - beta1) times the clipped gradient.
    norm = torch.sqrt(sum((tensor.to_local().square().sum() for tensor in first_moment), torch.zeros(())))  # type: ignore[attr-defined]
    assert norm.item() == pytest.approx(0.1, rel=1e-4)
