from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync.trajectories import Trajectory
from sparsewire.trainer.batch import MicroBatch, TrainingBatch, assemble, group_advantages, micro_batches

CPU = torch.device("cpu")


def test_advantages_are_rewards_normalised_within_the_group() -> None:
    rewards = [0.0, 1.0, 0.0, 3.0]
    expected = (np.asarray(rewards) - 1.0) / np.std(rewards)
    np.testing.assert_allclose(group_advantages(rewards), expected, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3, 1e300, 5e-324])
def test_a_group_of_equal_rewards_has_no_advantage(reward: float) -> None:
    assert group_advantages([reward] * 7).tolist() == [0.0] * 7


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200])
def test_advantages_do_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    np.testing.assert_allclose(group_advantages([1.0 * scale, 2.0 * scale]), [-1.0, 1.0], rtol=1e-6)


def test_staleness_counts_from_the_oldest_token(trajectory: Callable[..., Trajectory]) -> None:
    group = [trajectory(sample=0, versions=(3, 5), reward=1.0), trajectory(sample=1, versions=(5,))]
    batch = assemble([group], version=6, vocabulary_size=256)
    assert batch.staleness_N.tolist() == [3, 1]
    assert batch.num_tokens == 4


def test_a_trajectory_outside_the_vocabulary_trains_nothing(trajectory: Callable[..., Trajectory]) -> None:
    group = [trajectory(sample=0, completion=(4, 999), reward=1.0), trajectory(sample=1, completion=(4, 5, 6))]
    batch = assemble([group], version=0, vocabulary_size=256)
    assert len(batch) == 2
    assert batch.num_tokens == 3
    assert batch.token_ids.max() < 256


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="groups that are not empty"):
        assemble([], version=0, vocabulary_size=256)


def test_a_batch_survives_the_way_to_other_ranks(groups: Callable[..., list[list[Trajectory]]]) -> None:
    batch = assemble(groups(seed=1), version=2, vocabulary_size=256)
    again = TrainingBatch.from_bytes(batch.to_bytes())
    for name in ("token_ids", "prompt_lengths_N", "completion_lengths_N", "behaviour_logprobs", "advantages_N"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))


def _scored(part: MicroBatch) -> list[tuple[int, float, float]]:
    """Return (token, behaviour log-probability, advantage) of every scored position."""
    rows, columns = torch.nonzero(part.mask_BK, as_tuple=True)
    found = []
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        position = int(part.positions_K[column])
        assert part.token_ids_BT[row, position + 1] == part.targets_BK[row, column]
        behaviour = part.behaviour_logprobs_BK[row, column].item()
        found.append((int(part.targets_BK[row, column]), behaviour, part.advantages_B[row].item()))
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12),
    size=st.integers(1, 4),
    micro_batch_size=st.integers(1, 5),
)
def test_every_completion_token_with_an_advantage_is_scored_once_whatever_the_ranks(
    lengths: list[tuple[int, int]], size: int, micro_batch_size: int
) -> None:
    random = np.random.default_rng(0)
    prompts, completions = (np.asarray(column, np.int32) for column in zip(*lengths, strict=True))
    batch = TrainingBatch(
        token_ids=random.integers(1, 100, int((prompts + completions).sum())).astype(np.int32),
        prompt_lengths_N=prompts,
        completion_lengths_N=completions,
        behaviour_logprobs=random.normal(size=int(completions.sum())).astype(np.float32),
        advantages_N=np.where(random.random(len(lengths)) < 0.3, 0.0, 1.0 + np.arange(len(lengths))).astype(np.float32),
        rewards_N=np.zeros(len(lengths)),
        staleness_N=np.zeros(len(lengths), np.int32),
    )
    dealt = [
        micro_batches(batch, micro_batch_size=micro_batch_size, rank=rank, size=size, device=CPU)
        for rank in range(size)
    ]
    assert len({len(parts) for parts in dealt}) == 1
    expected = []
    tokens = np.split(batch.token_ids, np.cumsum(prompts + completions)[:-1])
    logprobs = np.split(batch.behaviour_logprobs, np.cumsum(completions)[:-1])
    num_tokens = 0
    some = bool((batch.advantages_N != 0).any())
    for row, (ids, made) in enumerate(zip(tokens, logprobs, strict=True)):
        first = 1 if prompts[row] == 0 else 0
        completion = ids[prompts[row] :][first:]
        num_tokens += len(completion)
        if not some or batch.advantages_N[row] == 0:
            continue
        for token, logprob in zip(completion, made[first:], strict=True):
            expected.append((int(token), float(logprob), float(batch.advantages_N[row])))
    scored = [entry for parts in dealt for part in parts for entry in _scored(part)]
    if some:
        assert sorted(scored) == sorted(expected)
    else:
        assert all(advantage == 0.0 for _, _, advantage in scored)
    assert batch.num_tokens == num_tokens


def test_micro_batches_are_the_same_for_one_rank_and_two(groups: Callable[..., list[list[Trajectory]]]) -> None:
    batch = assemble(groups(seed=3), version=0, vocabulary_size=256)
    alone = micro_batches(batch, micro_batch_size=4, rank=0, size=1, device=CPU)
    shared = [micro_batches(batch, micro_batch_size=4, rank=rank, size=2, device=CPU) for rank in range(2)]
    for number, part in enumerate(alone):
        other = shared[number % 2][number // 2]
        assert torch.equal(part.token_ids_BT, other.token_ids_BT)
        assert torch.equal(part.mask_BK, other.mask_BK)
