"""Cuts the view out of the learner: each rank's own float32 shard, cast to the view's dtype, with its place in the tensor.

Called on every rank after the optimizer step, from the thread that runs the steps. Nothing is gathered; block-fp8
alone exchanges the largest magnitudes of blocks that two ranks share. Casts round to nearest even and copy, so the
result stays as it is while later steps change the weights. What is published is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from sparsewire.sync.block_fp8 import MODULES_TO_NOT_CONVERT, block_fp8_view
from sparsewire.sync.ranks import SOLO, Ranks
from sparsewire.sync.view import Shard
from sparsewire.trainer.config import ViewKind
from sparsewire.trainer.model import CausalLM, canonical_parameters, local_shard


def local_view(
    model: CausalLM,
    *,
    kind: ViewKind = ViewKind.BF16,
    ranks: Ranks = SOLO,
    modules_to_not_convert: Sequence[str] = MODULES_TO_NOT_CONVERT,
) -> dict[str, Shard]:
    """Return this rank's part of every tensor in the view's dtype, by canonical name; all ranks' parts tile each tensor.

    FSDP2 cuts along the first dimension, so a part is one contiguous flat range in C order; it is empty on ranks
    beyond the number of rows. Collective over `ranks` for block-fp8; for that, the learner's own ranks are needed.

    Raises:
        ConfigError: block-fp8 of weights that are not finite; raised on every rank, names the tensor.
    """
    view = {}
    for name, parameter in canonical_parameters(model).items():
        local, row = local_shard(parameter)
        shape = tuple(parameter.shape)
        start = min(row, shape[0]) * prod(shape[1:]) if shape else 0
        view[name] = Shard(array=_cast(local, kind), start=start, shape=shape)
    if kind is ViewKind.FP8_BLOCK:
        return block_fp8_view(view, ranks=ranks, modules_to_not_convert=modules_to_not_convert)
    return view


def to_bfloat16(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[ml_dtypes.bfloat16]]:
    """Return a copy of `tensor` in host memory, rounded to bfloat16 to nearest even."""
    return _host_copy(tensor, torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _cast(tensor: torch.Tensor, kind: ViewKind) -> npt.NDArray[Any]:
    match kind:
        case ViewKind.BF16 | ViewKind.FP8_BLOCK:
            return to_bfloat16(tensor)
        case ViewKind.FP16:
            return _host_copy(tensor, torch.float16).numpy()
        case ViewKind.FP32:
            return _host_copy(tensor, torch.float32).numpy()


def _host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    return cast.copy_(tensor)
