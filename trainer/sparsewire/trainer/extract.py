"""Cuts the view out of the learner: each rank's own float32 shard, cast to bfloat16, with its place in the tensor.

Called on every rank after the optimizer step, from the thread that runs the steps. Nothing is gathered. The cast
rounds to nearest even and copies, so the result stays as it is while later steps change the weights.
"""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np
import torch

from sparsewire.sync.view import Shard
from sparsewire.trainer.model import CausalLM, canonical_parameters, local_shard


def local_view(model: CausalLM) -> dict[str, Shard]:
    """Return this rank's part of every tensor as bfloat16, by canonical name; parts of all ranks tile each tensor.

    FSDP2 cuts along the first dimension, so a part is one contiguous flat range in C order; it is empty on ranks
    beyond the number of rows.
    """
    view = {}
    for name, parameter in canonical_parameters(model).items():
        local, row = local_shard(parameter)
        shape = tuple(parameter.shape)
        start = min(row, shape[0]) * prod(shape[1:]) if shape else 0
        view[name] = Shard(array=to_bfloat16(local), start=start, shape=shape)
    return view


def to_bfloat16(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[ml_dtypes.bfloat16]]:
    """Return a copy of `tensor` in host memory, rounded to bfloat16 to nearest even."""
    cast = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cpu")
    cast.copy_(tensor)
    return cast.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
