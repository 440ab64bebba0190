"""The policy-gradient objective: clipped importance ratios per token, against the recorded behaviour policy.

Pure functions of tensors. Tokens were sampled by workers from weights some versions old, in another engine; the ratio
of the learner's probability to the recorded one corrects for both. Sources: GRPO, Shao et al. 2024,
https://arxiv.org/abs/2402.03300; token-level mean over the whole batch and the asymmetric clip range of DAPO, Yu et
al. 2025, https://arxiv.org/abs/2503.14476, equations 8 and 10; KL estimate k3 of http://joschu.net/blog/kl-approx.html.

Shape legend: B sequences, K scored positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, far outside any clip range, so that a broken worker cannot make the loss infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """Ratios beyond [1 - low, 1 + high] bring no further gain."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over the tokens of one micro-batch; adding them and dividing by the token count gives means."""

    loss: float
    """Of the normalised loss: adds up to the batch's."""
    ratio: float
    ratio_max: float
    """Largest ratio; joins by maximum."""
    num_clipped: float
    kl: float
    """Of the k3 estimate of KL(behaviour || learner)."""
    entropy: float
    """Of the learner's distribution, in nats."""
    logprob_difference: float
    """Of |learner - behaviour| log-probability: how far the engine and the learner disagree."""
    num_tokens: float


def token_logprobs(
    logits_BKV: torch.Tensor, targets_BK: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 log-probabilities of the targets under softmax(logits / temperature), and entropies without gradient."""
    scaled_BKV = logits_BKV.float() / temperature
    normaliser_BK = torch.logsumexp(scaled_BKV, dim=-1)
    chosen_BK = scaled_BKV.gather(-1, targets_BK.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        probabilities_BKV = torch.exp(scaled_BKV - normaliser_BK.unsqueeze(-1))
        entropy_BK = normaliser_BK - torch.linalg.vecdot(probabilities_BKV, scaled_BKV)
    return chosen_BK - normaliser_BK, entropy_BK


def policy_loss(
    logprobs_BK: torch.Tensor,
    behaviour_logprobs_BK: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BK: torch.Tensor,
    *,
    clip: ClipRange,
    num_batch_tokens: int,
    entropy_BK: torch.Tensor,
) -> tuple[torch.Tensor, LossStats]:
    """Return the loss of one micro-batch, divided by the token count of the whole batch, and its statistics.

    Losses of all micro-batches on all ranks add up to the batch's mean over tokens of
    -min(ratio * A, clamp(ratio) * A).
    """
    log_ratio_BK = (logprobs_BK - behaviour_logprobs_BK).masked_fill(~mask_BK, 0.0)
    ratio_BK = torch.exp(log_ratio_BK.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantages_BK = advantages_B.unsqueeze(-1)
    free_BK = ratio_BK * advantages_BK
    clipped_BK = ratio_BK.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages_BK
    objective_BK = torch.minimum(free_BK, clipped_BK).masked_fill(~mask_BK, 0.0)
    loss = -objective_BK.sum() / max(num_batch_tokens, 1)
    with torch.no_grad():
        kept = mask_BK.float()
        stats = LossStats(
            loss=loss.item(),
            ratio=(ratio_BK * kept).sum().item(),
            ratio_max=(ratio_BK * kept).max().item(),
            num_clipped=((clipped_BK < free_BK) & mask_BK).sum().item(),
            kl=((ratio_BK - 1.0 - log_ratio_BK) * kept).sum().item(),
            entropy=entropy_BK.masked_fill(~mask_BK, 0.0).sum().item(),
            logprob_difference=log_ratio_BK.abs().sum().item(),
            num_tokens=kept.sum().item(),
        )
    return loss, stats
