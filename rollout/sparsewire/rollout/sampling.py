"""One token for each row, and its log-probability: reproducible per request, whatever else is in the batch.

Pure. The uniform that picks a token is a function of (request seed, position of the token in prompt plus completion),
not of the draws before it, so a completion continued from any prefix continues the same stream.

Shapes: B rows (requests), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_SEED_MASK = (1 << 64) - 1


def uniform_at(seed: int, position: int) -> float:
    """Return the uniform in [0, 1) that belongs to `position` in the stream of `seed` (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=seed & _SEED_MASK, counter=position)).random())


def choose_tokens(
    logits_BV: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution of softmax(logits / temperature).

    Returns:
        Token ids (int64, B) and their natural log-probabilities under that distribution (float32, B).
    """
    device = logits_BV.device
    scale_B1 = torch.tensor(temperatures, dtype=torch.float32, device=device).unsqueeze(-1)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    target_B1 = torch.tensor(uniforms, dtype=torch.float64, device=device).unsqueeze(-1) * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1.squeeze(-1), logprobs_BV.gather(-1, tokens_B1).squeeze(-1)
