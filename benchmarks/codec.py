"""How small and how fast the delta format is, against what others ship, on the same input in one run.

    python benchmarks/codec.py [--smoke] [--trace DIR] [--json FILE]

Sizes are exact and count all that travels but the manifest. Speeds are medians of several rounds, in GB/s of one bf16
array, and as a ratio to a plain NumPy compare of the two arrays.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zstandard
from inputs import SYNTHETIC_SCALES, Delta, Words, synthetic, trace

from sparsewire.sync.codec import decode_chunk, encode_chunk, plan_segments
from sparsewire.sync.codec.plan import Segment
from sparsewire.sync.types import Bits, Dtype

ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One input, measured."""

    input: str
    num_elements: int
    density: float
    bytes_per_change: float
    bound_bytes_per_change: float
    share_of_full: float
    raw_bytes_per_change: float
    gaps_zstd_bytes_per_change: float
    xor_zstd_bytes_per_change: float
    encode_gb_per_second: float
    decode_gb_per_second: float
    compare_gb_per_second: float


def entropy(counts: np.ndarray) -> float:
    """Return the total code length, in bits, of symbols with these counts under their own distribution."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def bound_bits(old: Words, new: Words) -> float:
    """Return the conditional entropy of positions and steps given the exponent of the old value."""
    exponent = (old >> 7) & 0xFF
    changed = old != new
    all_of, changed_of = np.bincount(exponent, minlength=256), np.bincount(exponent[changed], minlength=256)
    positions = sum(entropy(np.array([k, n - k])) for n, k in zip(all_of, changed_of, strict=True))
    pairs = exponent[changed].astype(np.int64) << 16 | (new - old)[changed]
    joint = entropy(np.unique(pairs, return_counts=True)[1])
    return float(positions + joint - entropy(changed_of))


def gaps_zstd(old: Words, new: Words) -> int:
    """Size of 16-bit gaps and new values, zstd level 1: what PULSE-like codecs ship."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=0)
    longs = gaps // 0xFFFF
    stream = np.repeat(np.uint16(0xFFFF), longs.sum()).tobytes() + (gaps % 0xFFFF).astype(np.uint16).tobytes()
    return len(zstandard.ZstdCompressor(level=1).compress(stream + new[positions].tobytes()))


def xor_zstd(old: Words, new: Words) -> int:
    """Size of the dense XOR, zstd level 1."""
    return len(zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes()))


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(delta: Delta, rounds: int) -> Row:
    """Encode and decode a delta as the publisher and the mirror do, chunk by chunk, and compare with the peers."""
    names = sorted(delta.old)
    extents = [(number, 0, delta.old[name].size, Dtype.BF16) for number, name in enumerate(names)]
    plans = list(plan_segments(extents))

    def part(arrays: dict[str, Words], segment: Segment) -> Bits:
        flat: Bits = arrays[names[segment.tensor]].reshape(-1)
        return flat[segment.start : segment.stop]

    def encode() -> list[bytes]:
        return [
            encode_chunk(
                plan.dtype,
                plan.segments,
                [part(delta.old, segment) for segment in plan.segments],
                [part(delta.new, segment) for segment in plan.segments],
            ).payload
            for plan in plans
        ]

    payloads = encode()

    def decode() -> None:
        for payload in payloads:
            decode_chunk(payload, schema=None, base=lambda segment: part(delta.old, segment))

    for payload in payloads:
        for patch in decode_chunk(payload, schema=None, base=lambda segment: part(delta.old, segment)).patches:
            after = delta.new[names[patch.tensor]].reshape(-1)
            where = slice(patch.start, patch.start + patch.count) if patch.indices is None else patch.indices
            if not np.array_equal(after[where], patch.values):
                raise SystemExit(f"{delta.name}: decoded bits differ")
    old = np.concatenate([delta.old[name].reshape(-1) for name in names])
    new = np.concatenate([delta.new[name].reshape(-1) for name in names])
    changed, gigabytes = delta.num_changed, old.nbytes / 1e9
    return Row(
        input=delta.name,
        num_elements=old.size,
        density=changed / old.size,
        bytes_per_change=sum(map(len, payloads)) / changed,
        bound_bytes_per_change=bound_bits(old, new) / 8 / changed,
        share_of_full=sum(map(len, payloads)) / old.nbytes,
        raw_bytes_per_change=6.0,
        gaps_zstd_bytes_per_change=gaps_zstd(old, new) / changed,
        xor_zstd_bytes_per_change=xor_zstd(old, new) / changed,
        encode_gb_per_second=gigabytes / median_seconds(encode, rounds),
        decode_gb_per_second=gigabytes / median_seconds(decode, rounds),
        compare_gb_per_second=gigabytes / median_seconds(lambda: np.flatnonzero(old != new), rounds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small inputs, one round")
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="folder of a recorded trace; may repeat"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    num_elements, rounds = (1 << 20, 1) if arguments.smoke else (1 << 26, ROUNDS)
    deltas = [delta for directory in arguments.trace for delta in trace(directory)]
    deltas += [synthetic(label, num_elements) for label in SYNTHETIC_SCALES]
    rows = [measure(delta, rounds) for delta in deltas]
    print(
        f"{'input':<18} {'changed':>8} {'B/chg':>6} {'bound':>6} {'x bound':>7} {'% full':>7} {'gaps+zstd':>9} {'xor+zstd':>8} {'enc GB/s':>8} {'dec GB/s':>8} {'cmp GB/s':>8}"
    )
    for row in rows:
        print(
            f"{row.input:<18} {row.density:8.3%} {row.bytes_per_change:6.3f} {row.bound_bytes_per_change:6.3f} "
            f"{row.bytes_per_change / row.bound_bytes_per_change:7.2f} {row.share_of_full:7.3%} {row.gaps_zstd_bytes_per_change:9.2f} "
            f"{row.xor_zstd_bytes_per_change:8.2f} {row.encode_gb_per_second:8.2f} {row.decode_gb_per_second:8.2f} {row.compare_gb_per_second:8.2f}"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": platform.platform(), "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
