"""What others ship for the same change: sizes and speeds of published codecs, and of the plain ways written out here.

ARCv3 and ARCv2 come from the package `fireworks-delta-compression` (MIT), as installed. Their payload is pickled, so
the package is for benchmarks only and never a dependency. Everything counts bytes on the wire.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from inputs import Delta, Words

RAW_BYTES_PER_CHANGE = 6.0
"""int32 index and bf16 value: TRL, verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArcRun:
    """One encoding of a whole delta, tensor by tensor, and back."""

    num_bytes: int
    encode_seconds: float
    decode_seconds: float


def arc_is_installed() -> bool:
    """Return whether the package of ARCv2 and ARCv3 can be imported."""
    return importlib.util.find_spec("fireworks_delta_compression") is not None


def run_arc(delta: Delta, compression_format: str) -> ArcRun:
    """Encode and decode `delta` with `arc_v3` or `arc_v2`, and check that the bits come back.

    ARCv3 races candidates against a clock, so its size differs from run to run.
    """
    import fireworks_delta_compression as arc
    import torch

    encode_seconds = decode_seconds = 0.0
    num_bytes = 0
    for name, old in delta.old.items():
        src, dst = (_tensor(torch, bits) for bits in (old, delta.new[name]))
        started = time.perf_counter()
        compressed, checksum = arc.delta_compress(src=src, dst=dst, compression_format=compression_format)
        encoded = time.perf_counter()
        back = arc.delta_decompress(
            src=src, compressed_diff=compressed, checksum=checksum, compression_format=compression_format
        )
        decode_seconds += time.perf_counter() - encoded
        encode_seconds += encoded - started
        num_bytes += compressed.numel() * compressed.element_size()
        if not torch.equal(back.reshape(-1).view(torch.int16), dst.reshape(-1).view(torch.int16)):
            raise SystemExit(f"{compression_format}: {delta.name}, tensor {name}: decoded bits differ")
    return ArcRun(num_bytes=num_bytes, encode_seconds=encode_seconds, decode_seconds=decode_seconds)


def _tensor(torch: Any, bits: Words) -> Any:
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16)


def gaps_zstd(old: Words, new: Words) -> int:
    """Return the size of 16-bit gaps and new values, zstd level 1: what PULSE-like codecs ship."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=0)
    longs = gaps // 0xFFFF
    stream = np.repeat(np.uint16(0xFFFF), longs.sum()).tobytes() + (gaps % 0xFFFF).astype(np.uint16).tobytes()
    return _zstd_size(stream + new[positions].tobytes())


def xor_zstd(old: Words, new: Words) -> int:
    """Return the size of the dense XOR, zstd level 1: slime, SkyRL, ModelExpress, Stitch."""
    return _zstd_size((old ^ new).tobytes())


def overwrite_stream(old: Words, new: Words) -> int:
    """Return the size of the new words of changed elements, zstd level 1: NeMo-DCR, overwrite."""
    return _zstd_size(new.tobytes())


def xor_stream(old: Words, new: Words) -> int:
    """Return the size of the XOR of changed elements, zstd level 1: NeMo-DCR, XOR."""
    return _zstd_size((old ^ new).tobytes())


def _zstd_size(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))
