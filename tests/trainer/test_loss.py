from __future__ import annotations

import math

import pytest
import torch

from sparsewire.trainer.loss import MAX_LOG_RATIO, ClipRange, policy_loss, token_logprobs

CLIP = ClipRange(low=0.2, high=0.28)


def _loss_by_hand(
    logprobs: list[list[float]], behaviour: list[list[float]], advantages: list[float], mask: list[list[bool]]
) -> float:
    total, count = 0.0, 0
    for row, advantage in enumerate(advantages):
        for column, counts in enumerate(mask[row]):
            if not counts:
                continue
            ratio = math.exp(logprobs[row][column] - behaviour[row][column])
            clipped = min(max(ratio, 1.0 - CLIP.low), 1.0 + CLIP.high)
            total -= min(ratio * advantage, clipped * advantage)
            count += 1
    return total / count


def test_loss_equals_the_formula_written_by_hand() -> None:
    logprobs = [[-1.0, -2.0, -0.5], [-3.0, -0.1, -9.0]]
    behaviour = [[-1.5, -1.0, -0.5], [-3.1, -1.1, 0.0]]
    advantages = [1.5, -0.7]
    mask = [[True, True, True], [True, True, False]]
    loss, stats = policy_loss(
        torch.tensor(logprobs),
        torch.tensor(behaviour),
        torch.tensor(advantages),
        torch.tensor(mask),
        clip=CLIP,
        num_batch_tokens=5,
        entropy_BK=torch.ones(2, 3),
    )
    assert loss.item() == pytest.approx(_loss_by_hand(logprobs, behaviour, advantages, mask), rel=1e-5)
    assert stats.num_tokens == 5
    assert stats.entropy == 5.0
    assert stats.ratio_max == pytest.approx(math.e, rel=1e-5)
    # Only the gain of the first token is cut; a ratio beyond the range that costs more stays as it is.
    assert stats.num_clipped == 1
    assert stats.kl >= 0.0


def test_on_policy_gradient_is_minus_the_advantage_over_the_token_count() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.3]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = policy_loss(
        logprobs,
        logprobs.detach().clone(),
        torch.tensor([2.0, -1.0]),
        mask,
        clip=CLIP,
        num_batch_tokens=3,
        entropy_BK=torch.zeros(2, 2),
    )
    torch.autograd.backward(loss)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-2.0, -2.0], [1.0, 0.0]]) / 3)


def test_a_gain_beyond_the_clip_range_gives_no_gradient() -> None:
    logprobs = torch.tensor([[0.5], [-0.5]], requires_grad=True)
    loss, stats = policy_loss(
        logprobs,
        torch.zeros(2, 1),
        torch.tensor([1.0, -1.0]),
        torch.ones(2, 1, dtype=torch.bool),
        clip=CLIP,
        num_batch_tokens=2,
        entropy_BK=torch.zeros(2, 1),
    )
    torch.autograd.backward(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0], [0.0]]
    assert stats.num_clipped == 2


def test_a_broken_behaviour_policy_cannot_make_the_loss_infinite() -> None:
    loss, stats = policy_loss(
        torch.tensor([[-1.0]]),
        torch.tensor([[-1e6]]),
        torch.tensor([-1.0]),
        torch.tensor([[True]]),
        clip=CLIP,
        num_batch_tokens=1,
        entropy_BK=torch.zeros(1, 1),
    )
    assert math.isfinite(loss.item())
    assert stats.ratio_max == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probabilities_and_entropy_are_those_of_the_sampling_distribution(temperature: float) -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 5, 10], [3, 3, 1]])
    logprobs, entropy = token_logprobs(logits, targets, temperature=temperature)
    reference = torch.log_softmax(logits / temperature, dim=-1)
    torch.testing.assert_close(logprobs, reference.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))
