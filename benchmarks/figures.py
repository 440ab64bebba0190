"""What the benchmark of the codec measures, and how it shows that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers import RAW_BYTES_PER_CHANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes per changed element, everything but `bound` exact."""

    input: str
    num_elements: int
    num_changed: int
    density: float
    bound: float
    bound_position_bits: float
    bound_step_bits: float
    payload: float
    all: float
    share_of_full: float
    base_free: float
    gaps_zstd: float
    xor_zstd: float
    arc_v3_median: float | None
    arc_v3_best: float | None
    arc_v2: float | None
    predicted: float | None
    """Payload when the change before is at hand, where the input has one."""
    raw: float = RAW_BYTES_PER_CHANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """GB/s of one bf16 array."""

    input: str
    compare: float
    compare_two_threads: float
    encode: float
    encode_two_threads: float
    encode_of_compare: float
    encode_two_threads_of_compare: float
    """Of the compare loop with two threads."""
    decode: float
    decode_two_threads: float
    decode_of_compare: float
    base_free_encode: float
    base_free_decode: float
    predicted_encode: float | None
    predicted_decode: float | None
    predicted_encode_of_compare: float | None
    predicted_decode_of_compare: float | None
    arc_v3_encode: float | None
    arc_v3_decode: float | None
    scatter_changes_per_second: float
    encode_peak_extra_bytes: int
    decode_peak_extra_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """A version stored complete. Speeds in GB/s of its bf16 bits, on one thread unless said."""

    input: str
    share: float
    """Bytes of all chunks, of those of the bits."""
    encode: float
    encode_two_threads: float
    decode: float
    """From chunks to bits whose digests agree with what the chunks state."""
    decode_two_threads: float
    digest: float
    """Digests alone, as a mirror is checked."""
    copy: float
    """A copy of the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Value streams in MB: what was published, and ours for the same changes."""

    amplitude: float
    overwrite: float
    published_overwrite: float
    xor: float
    published_xor: float
    ours: float


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print(
            "  ".join(
                cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    print()


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def show(
    sizes: Sequence[Sizes], speeds: Sequence[Speeds], anchors: Sequence[Anchors], calibration: Sequence[Calibration]
) -> None:
    print("Bytes per changed element")
    table(
        ["input", "changed", "bound", "payload", "x bound", "all", "x bound", "predicted", "x bound", "% of full", "x ARCv3", "x best",
         "ARCv3", "ARCv2", "base-free", "raw", "gaps+zstd", "xor+zstd"],
        [
            [
                s.input, f"{s.density:.3%}", number(s.bound), number(s.payload), number(s.payload / s.bound), number(s.all),
                number(s.all / s.bound), number(s.predicted),
                number(s.predicted / s.bound if s.predicted else None), f"{s.share_of_full:.3%}",
                number(s.payload / s.arc_v3_median if s.arc_v3_median else None),
                number(s.payload / s.arc_v3_best if s.arc_v3_best else None),
                number(s.arc_v3_median), number(s.arc_v2), number(s.base_free), number(s.raw, 1), number(s.gaps_zstd, 2),
                number(s.xor_zstd, 2),
            ]
            for s in sizes
        ],
    )  # fmt: skip
    print("GB/s of one bf16 array (2: two threads); extra memory in MB")
    table(
        ["input", "compare", "encode", "of compare", "decode", "of compare", "compare 2", "encode 2", "of compare 2",
         "decode 2", "predicted enc", "of compare", "dec", "of compare", "base-free enc", "dec", "ARCv3 enc", "dec", "x ARCv3 enc", "scatter M/s", "enc MB", "dec MB"],
        [
            [
                s.input, number(s.compare, 2), number(s.encode, 2), number(s.encode_of_compare, 2), number(s.decode, 2),
                number(s.decode_of_compare, 2), number(s.compare_two_threads, 2), number(s.encode_two_threads, 2),
                number(s.encode_two_threads_of_compare, 2), number(s.decode_two_threads, 2), number(s.predicted_encode, 2),
                number(s.predicted_encode_of_compare, 2), number(s.predicted_decode, 2),
                number(s.predicted_decode_of_compare, 2), number(s.base_free_encode, 2),
                number(s.base_free_decode, 2), number(s.arc_v3_encode, 2), number(s.arc_v3_decode, 2),
                number(s.encode / s.arc_v3_encode if s.arc_v3_encode else None, 1),
                number(s.scatter_changes_per_second / 1e6, 0), number(s.encode_peak_extra_bytes / 1e6, 0),
                number(s.decode_peak_extra_bytes / 1e6, 0),
            ]
            for s in speeds
        ],
    )  # fmt: skip
    print("Anchors: bytes of raw, and GB/s of bf16 (2: two threads)")
    table(
        ["input", "of raw", "encode", "decode", "encode 2", "decode 2", "digest", "copy"],
        [
            [
                a.input, number(a.share), number(a.encode, 2), number(a.decode, 2), number(a.encode_two_threads, 2),
                number(a.decode_two_threads, 2), number(a.digest, 2), number(a.copy, 2),
            ]
            for a in anchors
        ],
    )  # fmt: skip
    print("Value streams in MB, 20 M standard normal elements with noise (NeMo-DCR, Table 2)")
    table(
        ["amplitude", "overwrite", "published", "xor", "published", "ours"],
        [
            [f"{c.amplitude:g}", number(c.overwrite, 2), number(c.published_overwrite, 2), number(c.xor, 2),
             number(c.published_xor, 2), number(c.ours, 2)]
            for c in calibration
        ],
    )  # fmt: skip
