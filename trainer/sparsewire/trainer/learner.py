"""One optimizer step: forward and backward over micro-batches, a norm all ranks agree on, AdamW in float32.

Collective: every rank calls `step` with the same batch and gets the same statistics. When gradient or loss is not
finite on any rank, no rank touches weights or optimizer state; the step still counts, and the version after it has no
change. Gradients are of the whole batch's mean over tokens, so the number of ranks and the micro-batch size do not
change the objective.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, fields

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsewire.trainer.batch import MicroBatch, TrainingBatch, micro_batches
from sparsewire.trainer.loss import ClipRange, LossStats, policy_loss, token_logprobs
from sparsewire.trainer.model import CausalLM, canonical_parameters
from sparsewire.trainer.ranks import ProcessGroup

logger = logging.getLogger(__name__)

_PLAIN_ATTENTION_TOKENS = 512
"""Up to this length, attention on the CPU is computed plainly; see `Learner._backward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """How a step optimises; see `LearnerConfig` for the meaning of each."""

    learning_rate: float
    clip: ClipRange
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    micro_batch_size: int = 16

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 1: a linear rise, then constant."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did; equal on all ranks."""

    step: int
    skipped: bool
    """Gradient norm or loss was not finite: weights did not change."""
    learning_rate: float
    loss: float
    grad_norm: float
    """Before clipping; may be infinite or NaN when skipped."""
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    kl: float
    entropy: float
    logprob_difference_mean: float
    num_tokens: int
    """Completion tokens of the batch: what the loss is a mean over."""
    num_scored_tokens: int
    """Those with an advantage, which alone passed through the model and are what the means above are over."""


class Learner:
    """Model, optimizer and step counter of one rank."""

    def __init__(self, *, model: CausalLM, group: ProcessGroup, settings: LearnerSettings) -> None:
        self.model = model
        self.step_number = 0
        """Steps taken so far, skipped ones included."""
        self._group = group
        self._settings = settings
        self._trained = {name: p for name, p in canonical_parameters(model).items() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        # Made here rather than in the first step: memory that does not suffice shows at once, and a checkpoint has
        # somewhere to load into.
        for parameter in self._trained.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=group.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return every tensor that a checkpoint must hold, by name; they share storage with the learner's."""
        tensors: dict[str, torch.Tensor] = {
            f"model.{name}": parameter.detach() for name, parameter in canonical_parameters(self.model).items()
        }
        for name, parameter in self._trained.items():
            tensors |= {f"optimizer.{key}.{name}": value for key, value in self._optimizer.state[parameter].items()}
        return tensors

    def step(self, batch: TrainingBatch) -> StepStats:
        """Take one optimizer step on `batch`; collective."""
        self.step_number += 1
        learning_rate = self._settings.learning_rate_at(self.step_number)
        own = micro_batches(
            batch,
            micro_batch_size=self._settings.micro_batch_size,
            rank=self._group.rank,
            size=self._group.size,
            device=self._group.device,
        )
        totals = self._join([self._backward(part, num_batch_tokens=batch.num_tokens) for part in own])
        norm = self._grad_norm()
        # A loss can be NaN while its gradient is masked to zero, so both are looked at; both are equal on all ranks.
        skipped = not (math.isfinite(norm) and math.isfinite(totals.loss))
        if skipped:
            logger.warning(
                "step %d skipped: gradient norm is %s, loss is %s; weights stay as they are",
                self.step_number,
                norm,
                totals.loss,
            )
        else:
            if norm > self._settings.max_grad_norm:
                for gradient in self._gradients():
                    gradient.mul_(self._settings.max_grad_norm / norm)
            for entry in self._optimizer.param_groups:
                entry["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tokens = max(totals.num_tokens, 1.0)
        return StepStats(
            step=self.step_number,
            skipped=skipped,
            learning_rate=learning_rate,
            loss=totals.loss,
            grad_norm=norm,
            ratio_mean=totals.ratio / tokens,
            ratio_max=totals.ratio_max,
            clip_fraction=totals.num_clipped / tokens,
            kl=totals.kl / tokens,
            entropy=totals.entropy / tokens,
            logprob_difference_mean=totals.logprob_difference / tokens,
            num_tokens=batch.num_tokens,
            num_scored_tokens=int(totals.num_tokens),
        )

    def _backward(self, part: MicroBatch, *, num_batch_tokens: int) -> LossStats:
        """Add this micro-batch's gradient; return its statistics."""
        # On the CPU the fused kernel's backward takes 22 ms a layer where the plain one takes 3 (16 x 40 tokens, one
        # core); the plain one keeps all T x T scores, which only short sequences can afford. Backward is inside,
        # because activation checkpointing runs forward again there.
        plain = self._group.device.type == "cpu" and part.token_ids_BT.shape[1] <= _PLAIN_ATTENTION_TOKENS
        with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
            logprobs_BK, entropy_BK = token_logprobs(
                self._logits(part), part.targets_BK, temperature=self._settings.temperature
            )
            loss, stats = policy_loss(
                logprobs_BK,
                part.behaviour_logprobs_BK,
                part.advantages_B,
                part.mask_BK,
                clip=self._settings.clip,
                num_batch_tokens=num_batch_tokens,
                entropy_BK=entropy_BK,
            )
            # FSDP averages gradients over ranks; the objective is their sum.
            torch.autograd.backward(loss * self._group.size)
        return stats

    def _logits(self, part: MicroBatch) -> torch.Tensor:
        """Return logits at the wanted positions only: over the vocabulary they outweigh everything else."""
        output = self.model(input_ids=part.token_ids_BT, logits_to_keep=part.positions_K, use_cache=False)
        logits_BKV: torch.Tensor = output.logits
        return logits_BKV

    def _join(self, parts: Sequence[LossStats]) -> LossStats:
        """Return the statistics of all micro-batches of all ranks."""
        layout = struct.Struct(f"<{len(fields(LossStats))}d")
        own = b"".join(layout.pack(*astuple(part)) for part in parts)
        gathered = [
            LossStats(**dict(zip((field.name for field in fields(LossStats)), values, strict=True)))
            for payload in self._group.control.all_gather(own)
            for values in layout.iter_unpack(payload)
        ]
        return LossStats(
            **{
                field.name: (max if field.name == "ratio_max" else sum)(getattr(part, field.name) for part in gathered)
                for field in fields(LossStats)
            }
        )

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's part of every gradient."""
        return [_local(p.grad) for p in self._trained.values() if p.grad is not None]

    def _grad_norm(self) -> float:
        """Return the Euclidean norm of the whole gradient: the very same number on every rank, NaN if any is not finite."""
        squares = [torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2 for part in self._gradients()]
        own = math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan
        gathered = self._group.control.all_gather(struct.pack("<d", own))
        return math.sqrt(sum(struct.unpack("<d", payload)[0] for payload in gathered))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
