"""Block-scaled fp8 linear layers on a CPU without AMX, slowly: dequantise, then multiply.

vLLM has no fp8 kernel for such machines. With this one its real fp8 loaders and parameters can be run and tested
anywhere; it keeps weights and scales in the checkpoint's layout. Importing it needs vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.platforms import PlatformEnum, current_platform


class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """Multiplies by the dequantised weight in the activations' dtype."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Tell vLLM that any CPU will do."""
        return current_platform.is_cpu(), "it runs on the CPU only"

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        """Return A @ dequantised(B).T; As is unused."""
        rows, columns = self.weight_group_shape
        scale = Bs.repeat_interleave(rows, 0)[: B.shape[0]].repeat_interleave(columns, 1)[:, : B.shape[1]]
        return torch.nn.functional.linear(A, (B.float() * scale).to(A.dtype))


def install() -> None:
    """Prefer this kernel to any that repacks weights; calling it again changes nothing."""
    kernels: list[Any] = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if ReferenceFp8BlockKernel not in kernels:
        kernels.insert(0, ReferenceFp8BlockKernel)
