"""An engine's tensors as bits: written in place, read back, digested where generation reads them.

Used by torch engines. A `LiveTensor` wraps one parameter or buffer without copying it: on the CPU through a NumPy view
of its storage, elsewhere through an integer view of the tensor, moved in blocks of `_BLOCK` elements. Nothing is ever
reallocated, so ties, captured graphs and optimisers' references stay true.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsewire.sync.delta import TensorPatch, apply_patch
from sparsewire.sync.digest import ZERO, TensorDigest, digest_bits
from sparsewire.sync.errors import EngineError
from sparsewire.sync.types import Bits, Dtype, TensorSpec

_BLOCK = 1 << 22
"""Elements copied to or from a device at a time: 8 MiB of bf16."""

DTYPES: dict[torch.dtype, Dtype] = {
    torch.bool: Dtype.BOOL,
    torch.uint8: Dtype.U8,
    torch.int8: Dtype.I8,
    torch.int16: Dtype.I16,
    torch.int32: Dtype.I32,
    torch.int64: Dtype.I64,
    torch.float8_e4m3fn: Dtype.F8_E4M3,
    torch.float8_e5m2: Dtype.F8_E5M2,
    torch.float8_e4m3fnuz: Dtype.F8_E4M3FNUZ,
    torch.float8_e5m2fnuz: Dtype.F8_E5M2FNUZ,
    torch.float8_e8m0fnu: Dtype.F8_E8M0,
    torch.float16: Dtype.F16,
    torch.bfloat16: Dtype.BF16,
    torch.float32: Dtype.F32,
    torch.float64: Dtype.F64,
}
"""Element types that can be synchronised."""

SIGNED: dict[int, tuple[torch.dtype, np.dtype[Any]]] = {
    1: (torch.int8, np.dtype("<i1")),
    2: (torch.int16, np.dtype("<i2")),
    4: (torch.int32, np.dtype("<i4")),
    8: (torch.int64, np.dtype("<i8")),
}
"""By width in bytes: the integers through which torch moves bits."""


class LiveTensor:
    """One tensor of a loaded model, seen as a flat array of bits at checkpoint positions."""

    def __init__(self, *, name: str, tensor: torch.Tensor) -> None:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise EngineError(f"engine tensor {name} has dtype {tensor.dtype}, which cannot be synchronised")
        if not tensor.is_contiguous():
            raise EngineError(
                f"engine tensor {name} is not contiguous in memory, so positions in it are not the checkpoint's"
            )
        self.spec = TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))
        signed, self._signed = SIGNED[dtype.width]
        self._flat = tensor.detach().view(signed).reshape(-1)
        self._bits: Bits | None = None
        if tensor.device.type == "cpu":
            self._bits = self._flat.numpy().view(dtype.bits)

    @property
    def storage(self) -> tuple[int, int]:
        """Identity of the memory behind the tensor: equal for tied tensors."""
        return self._flat.data_ptr(), self._flat.numel()

    def write(self, patch: TensorPatch) -> None:
        """Scatter absolute bits; writing them again changes nothing."""
        if self._bits is not None:
            apply_patch(self._bits, patch)
        elif patch.indices is None:
            self._write_range(patch.start, patch.values)
        else:
            for at in range(0, len(patch.values), _BLOCK):
                where = torch.from_numpy(np.array(patch.indices[at : at + _BLOCK]))
                self._flat[where.to(self._flat.device)] = self._to_device(patch.values[at : at + _BLOCK])

    def write_all(self, bits: Bits) -> None:
        """Replace every element."""
        if self._bits is not None:
            np.copyto(self._bits, bits)
        else:
            self._write_range(0, bits)

    def digest(self) -> TensorDigest:
        """Digest the live storage."""
        if self._bits is not None:
            return digest_bits(self._bits)
        total = ZERO
        for at in range(0, self._flat.numel(), _BLOCK):
            block: npt.NDArray[Any] = self._flat[at : at + _BLOCK].cpu().numpy()
            total += digest_bits(block.view(self.spec.dtype.bits), start=at)
        return total

    def read(self, patch: TensorPatch) -> Bits:
        """Return the live bits at the positions of a patch, in its order."""
        where = slice(patch.start, patch.start + patch.count) if patch.indices is None else patch.indices
        if self._bits is not None:
            return self._bits[where]
        at = where if isinstance(where, slice) else torch.from_numpy(np.array(where)).to(self._flat.device)
        block: npt.NDArray[Any] = self._flat[at].cpu().numpy()
        return block.view(self.spec.dtype.bits)

    def _write_range(self, start: int, bits: Bits) -> None:
        for at in range(0, len(bits), _BLOCK):
            block = bits[at : at + _BLOCK]
            self._flat[start + at : start + at + len(block)] = self._to_device(block)

    def _to_device(self, bits: Bits) -> torch.Tensor:
        # A copy: torch refuses to wrap the mirror's read-only pages.
        return torch.from_numpy(np.array(bits).view(self._signed)).to(self._flat.device)
