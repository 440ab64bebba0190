"""From finished groups of trajectories to padded tensors, the same work whatever the number of ranks.

`assemble` runs on rank 0 and is pure; its result travels to the other ranks as bytes. `micro_batches` then cuts it
identically on every rank: sequences are sorted by length and cut into micro-batches before they are dealt to ranks, so
one rank and two compute the very same micro-batches and sum the same gradients, normalised by the token count of the
whole batch. Sequences are padded on the right only: under causal attention no real token sees padding, and no mask
is needed.

Shape legend: N sequences of the batch, B of a micro-batch, T tokens, K scored positions.
"""

# ruff: noqa: N815 -- fields carry shape suffixes, see the legend

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from io import BytesIO

import numpy as np
import numpy.typing as npt
import torch

from sparsewire.sync.trajectories.types import Trajectory

logger = logging.getLogger(__name__)

_PAD_MULTIPLE = 8
"""Sequence lengths are rounded up to this, so that compiled layers see few shapes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """One optimizer step's data, ragged; row n of every `_N` array is one trajectory."""

    token_ids: npt.NDArray[np.int32]
    """Prompt and completion of each row, one row after the other."""
    prompt_lengths_N: npt.NDArray[np.int32]
    completion_lengths_N: npt.NDArray[np.int32]
    behaviour_logprobs: npt.NDArray[np.float32]
    """Log-probability of each completion token when it was sampled, one row after the other."""
    advantages_N: npt.NDArray[np.float32]
    rewards_N: npt.NDArray[np.float64]
    staleness_N: npt.NDArray[np.int32]
    """Versions between the learner's weights and the oldest token of the row."""

    def __len__(self) -> int:
        return len(self.prompt_lengths_N)

    @property
    def num_tokens(self) -> int:
        """Completion tokens that are scored; the first token of a row without a prompt cannot be."""
        return int(np.maximum(self.completion_lengths_N - (self.prompt_lengths_N == 0), 0).sum())

    def to_bytes(self) -> bytes:
        """Serialise for the other ranks."""
        buffer = BytesIO()
        np.savez(buffer, allow_pickle=False, **{field.name: getattr(self, field.name) for field in fields(self)})
        return buffer.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> TrainingBatch:
        """Parse what `to_bytes` wrote."""
        with np.load(BytesIO(data), allow_pickle=False) as arrays:
            return TrainingBatch(**{field.name: arrays[field.name] for field in fields(TrainingBatch)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Sequences that pass through the model together; entries outside `mask_BK` mean nothing."""

    token_ids_BT: torch.Tensor
    positions_K: torch.Tensor
    """Positions whose logits are wanted; the one at p scores token p + 1."""
    targets_BK: torch.Tensor
    behaviour_logprobs_BK: torch.Tensor
    advantages_B: torch.Tensor
    mask_BK: torch.Tensor
    """True where a completion token of the row is scored."""


def group_advantages(rewards: Sequence[float]) -> npt.NDArray[np.float32]:
    """Return (reward - mean) / standard deviation within one group; zeros when all rewards are equal.

    Source: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    values = np.asarray(rewards, np.float64)
    if values.max() == values.min():
        return np.zeros(len(values), np.float32)
    # Scaled first, so that neither huge nor tiny rewards leave float64's range when squared.
    centred = values / np.abs(values).max()
    centred = centred - centred.mean()
    advantages: npt.NDArray[np.float32] = (centred / centred.std()).astype(np.float32)
    return advantages


def assemble(groups: Sequence[Sequence[Trajectory]], *, version: int, vocabulary_size: int) -> TrainingBatch:
    """Return the batch of `groups` for weights of `version`.

    A trajectory with token ids outside the vocabulary keeps its row but no token: one confused worker must not stop
    the run.

    Raises:
        ValueError: there is no group or an empty one.
    """
    if not groups or not all(groups):
        raise ValueError(f"a batch needs groups that are not empty; sizes are {[len(group) for group in groups]}")
    tokens, logprobs, prompt_lengths, completion_lengths = [], [], [], []
    advantages = np.concatenate([group_advantages([trajectory.reward for trajectory in group]) for group in groups])
    rows = [trajectory for group in groups for trajectory in group]
    for row in rows:
        ids = np.concatenate([row.prompt_token_ids, row.completion_token_ids]).astype(np.int32)
        known = len(ids) == 0 or (ids.min() >= 0 and ids.max() < vocabulary_size)
        if not known:
            logger.warning(
                "trajectory %s of worker %s has token ids outside the vocabulary of %d: it trains nothing; "
                "does the worker run another model?",
                row.key,
                row.worker_id,
                vocabulary_size,
            )
        tokens.append(ids if known else ids[:0])
        logprobs.append(row.logprobs if known else row.logprobs[:0])
        prompt_lengths.append(len(row.prompt_token_ids) if known else 0)
        completion_lengths.append(len(row.completion_token_ids) if known else 0)
    return TrainingBatch(
        token_ids=np.concatenate(tokens).astype(np.int32),
        prompt_lengths_N=np.asarray(prompt_lengths, np.int32),
        completion_lengths_N=np.asarray(completion_lengths, np.int32),
        behaviour_logprobs=np.concatenate(logprobs).astype(np.float32),
        advantages_N=advantages,
        rewards_N=np.asarray([row.reward for row in rows], np.float64),
        staleness_N=np.asarray([staleness(row, version) for row in rows], np.int32),
    )


def staleness(trajectory: Trajectory, version: int) -> int:
    """Return how many versions the oldest token of `trajectory` trails `version`."""
    return version - min((span.version for span in trajectory.spans), default=version)


def micro_batches(
    batch: TrainingBatch, *, micro_batch_size: int, rank: int, size: int, device: torch.device
) -> list[MicroBatch]:
    """Return this rank's micro-batches; every rank gets equally many and at least one, some perhaps fully masked.

    Rows without advantage add exactly nothing to the gradient and are left out; when all are, a few stay, so that
    every parameter has a gradient of zeros and the optimizer's momentum acts as in any other step.
    """
    order = np.argsort(-(batch.prompt_lengths_N + batch.completion_lengths_N), kind="stable")
    with_gradient = order[batch.advantages_N[order] != 0.0]
    order = with_gradient if len(with_gradient) else order[-micro_batch_size:]
    cuts = [order[at : at + micro_batch_size] for at in range(0, len(order), micro_batch_size)]
    real = len(cuts)
    # Collectives of the model need the same number of passes on every rank.
    cuts += [order[-1:]] * (-real % size)
    return [_pad(batch, cuts[number], masked=number >= real, device=device) for number in range(rank, len(cuts), size)]


def _pad(batch: TrainingBatch, rows: npt.NDArray[np.intp], *, masked: bool, device: torch.device) -> MicroBatch:
    token_ends = np.cumsum(batch.prompt_lengths_N + batch.completion_lengths_N)
    logprob_ends = np.cumsum(batch.completion_lengths_N)
    prompts = batch.prompt_lengths_N[rows]
    totals = prompts + batch.completion_lengths_N[rows]
    num_positions = max(-(-int(totals.max()) // _PAD_MULTIPLE) * _PAD_MULTIPLE, _PAD_MULTIPLE)
    token_ids = np.zeros((len(rows), num_positions), np.int64)
    behaviour = np.zeros((len(rows), num_positions), np.float32)
    mask = np.zeros((len(rows), num_positions), np.bool_)
    for at, row in enumerate(rows):
        token_ids[at, : totals[at]] = batch.token_ids[token_ends[row] - totals[at] : token_ends[row]]
        made = batch.behaviour_logprobs[logprob_ends[row] - batch.completion_lengths_N[row] : logprob_ends[row]]
        behaviour[at, prompts[at] : totals[at]] = made
        mask[at, max(int(prompts[at]), 1) : totals[at]] = not masked
    first = max(int(prompts.min()), 1)
    stop = max(int(totals.max()), first + 1)
    return MicroBatch(
        token_ids_BT=torch.from_numpy(token_ids).to(device),
        positions_K=torch.arange(first - 1, stop - 1, device=device),
        targets_BK=torch.from_numpy(token_ids[:, first:stop]).to(device),
        behaviour_logprobs_BK=torch.from_numpy(behaviour[:, first:stop]).to(device),
        advantages_B=torch.from_numpy(batch.advantages_N[rows]).to(device),
        mask_BK=torch.from_numpy(mask[:, first:stop]).to(device),
    )
