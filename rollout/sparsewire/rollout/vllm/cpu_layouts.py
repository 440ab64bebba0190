"""Keeps weights where they can be written in place on vLLM's CPU backend, which otherwise hides or reorders them.

There, linear weights are packed into opaque oneDNN handles (the output head's beside a visible copy that logits never
read), and expert weights are reordered in place at equal shape. `install` makes linear layers compute from
`layer.weight`, in models configured for the `sparsewire` backend only; `moe_permutations` measures the order that the
expert kernel wants. Nothing here touches other platforms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsewire.rollout.vllm.layout import Memory, Permutation
from sparsewire.sync.types import Indices

logger = logging.getLogger(__name__)

_INSTRUCTION_SETS = ("vec", "amx", "neon")
"""Names of vLLM's expert kernels, each with an order of its own."""


def install(*, wanted: Callable[[], bool]) -> None:
    """Keep linear weights unpacked in models loaded while `wanted()`; calling it again changes nothing."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "keeps_weights", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if not wanted() or layer.weight.is_meta or layer.weight.ndim != 2:
            original(layer, remove_weight)
            return
        layer.cpu_linear = torch.nn.functional.linear

    dispatch.keeps_weights = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def moe_permutations(tensor: torch.Tensor) -> Sequence[Permutation]:
    """Return the orders of elements that the CPU's expert kernels may have given a (experts, rows, columns) weight."""
    if tensor.ndim != 3 or tensor.dtype != torch.bfloat16:
        return ()
    found = []
    for isa in _INSTRUCTION_SETS:
        forward = _measure(tensor.shape[1], tensor.shape[2], isa)
        if forward is not None:
            found.append(Permutation(forward=forward))
    return found


@cache
def _measure(num_rows: int, num_columns: int, isa: str) -> Indices | None:
    """Return where each element of one expert's block goes, by sending block positions through the kernel."""
    size = num_rows * num_columns
    origin = np.zeros(size, np.int64)
    for shift in range(0, max(1, (size - 1).bit_length()), 8):
        # Eight bits at a time stay far from NaN patterns, which a kernel might normalise.
        marks = ((np.arange(size) >> shift) & 0xFF).astype(np.int16)
        block = torch.from_numpy(marks).view(torch.bfloat16).reshape(1, num_rows, num_columns)
        packed = torch.zeros_like(block)
        try:
            torch.ops._C.prepack_moe_weight(block, packed, isa)
        except (RuntimeError, AttributeError) as error:
            logger.debug("no expert kernel %s for %d x %d: %s", isa, num_rows, num_columns, error)
            return None
        seen: npt.NDArray[Any] = packed.reshape(-1).view(torch.int16).numpy()
        origin |= seen.astype(np.int64) << shift
    forward = np.full(size, -1, np.int64)
    forward[origin % size] = np.arange(size)
    return forward if np.array_equal(np.sort(origin), np.arange(size)) else None


def memory_permutations(model: torch.nn.Module) -> Callable[[Memory], Sequence[Permutation]]:
    """Return, for `verify`, a function that proposes orders for the memory behind a parameter of `model`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def propose(memory: Memory) -> Sequence[Permutation]:
        tensor = parameters.get(memory.name)
        return () if tensor is None or tensor.device.type != "cpu" else moe_permutations(tensor)

    return propose
