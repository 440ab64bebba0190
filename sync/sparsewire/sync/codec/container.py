"""The frame of a chunk: header, checksum, segment table, and the two joint bodies.

Pure. `seal` writes it, `parse_chunk` checks every count and length against its limits before anything is allocated
for it, and hands out views. What the bodies mean is the business of `chunk.py`. Bytes are laid out in docs/format.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import zstandard

from sparsewire.sync.build import FORMAT_NUMBER
from sparsewire.sync.codec.plan import MAX_CHUNK_BYTES, MAX_SEGMENTS, Segment
from sparsewire.sync.codec.streams import MAX_VARINT_BYTES, Reader, write_varint
from sparsewire.sync.digest import TensorDigest
from sparsewire.sync.errors import DamagedError, UnsupportedFormatError
from sparsewire.sync.native import Isa, kernel
from sparsewire.sync.types import MAX_ELEMENTS, MAX_TENSORS, Dtype

MAGIC = b"SWCH"
HEADER = struct.Struct("<4sHBBIIIII16sI")
"""magic, format, dtype, flags, total bytes, segments, table bytes, changes, bytes of their body, check, crc."""
_CRC = struct.Struct("<I")
_CHECKED_HEADER_BYTES = HEADER.size - _CRC.size

ANCHOR_FLAG = 1
PACKED_TABLE_FLAG = 2

MIN_PACKED_TABLE_BYTES = 64
"""Shorter tables stay as they are: setting zstd up would take longer than coding a chunk's changes may."""
TABLE_ZSTD_LEVEL = 3
MIN_NATIVE_CRC_BYTES = 1 << 14
"""The kernel's checksum is ten times as fast as zlib's, but a call of it takes longer than zlib does for a few kilobytes."""
_MAX_ROW_BYTES = 1 + 3 * MAX_VARINT_BYTES

MAX_PAYLOAD_BYTES = 2 * MAX_CHUNK_BYTES
"""Bytes of one encoded chunk beyond which a decoder refuses it."""

DTYPE_CODES: dict[Dtype, int] = {
    Dtype.BOOL: 1,
    Dtype.U8: 2,
    Dtype.I8: 3,
    Dtype.U16: 4,
    Dtype.I16: 5,
    Dtype.U32: 6,
    Dtype.I32: 7,
    Dtype.U64: 8,
    Dtype.I64: 9,
    Dtype.F8_E4M3: 10,
    Dtype.F8_E5M2: 11,
    Dtype.F8_E4M3FNUZ: 12,
    Dtype.F8_E5M2FNUZ: 13,
    Dtype.F8_E8M0: 14,
    Dtype.F16: 15,
    Dtype.BF16: 16,
    Dtype.F32: 17,
    Dtype.F64: 18,
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class Mode(IntEnum):
    """How a segment is coded; a new layout gets a new number, and builds that do not know it refuse the chunk."""

    UNCHANGED = 0
    """No element changed; nothing is stored."""
    DENSE = 2
    """All new bits, in the joint dense body."""
    CLASSED = 3
    """The changed elements, coded against the exponents of the base, in the joint classed body."""


class Profile(StrEnum):
    """How a run's publisher makes classed bodies; readers take every chunk."""

    CLASSED = "classed"
    """As many classes as pay; the reader scans the base."""
    BASE_FREE = "base-free"
    """One class, about two thirds larger: the reader looks at changed elements only. For links faster than the scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChunk:
    """A chunk whose frame is sound; its bodies are not decoded."""

    dtype: Dtype
    is_anchor: bool
    """Decodable without a base: all segments are dense."""
    segments: tuple[Segment, ...]
    modes: tuple[Mode, ...]
    """One for each segment."""
    num_changed: int
    """Changed elements in the classed body."""
    changes: memoryview
    """The classed body."""
    dense: memoryview
    check: TensorDigest
    """Sum over all changed elements of new minus old digest terms; of new terms alone for an anchor."""

    def count(self, mode: Mode) -> int:
        """Return the elements of all segments in `mode`."""
        return sum(s.count for s, m in zip(self.segments, self.modes, strict=True) if m is mode)


def seal(
    *,
    dtype: Dtype,
    is_anchor: bool,
    segments: Sequence[Segment],
    modes: Sequence[Mode],
    num_changed: int,
    changes: bytes,
    dense: Sequence[bytes | memoryview],
    check: TensorDigest,
) -> bytes:
    """Return the chunk that `parse_chunk` takes apart again; `dense` is its dense body in pieces."""
    table = _write_table(segments, modes)
    flags = ANCHOR_FLAG if is_anchor else 0
    if len(table) >= MIN_PACKED_TABLE_BYTES:
        packed = zstandard.ZstdCompressor(level=TABLE_ZSTD_LEVEL).compress(table)
        if len(packed) < len(table):
            table, flags = packed, flags | PACKED_TABLE_FLAG
    bodies = (table, changes, *dense)
    total = HEADER.size + sum(map(len, bodies))
    head = HEADER.pack(
        MAGIC,
        FORMAT_NUMBER,
        DTYPE_CODES[dtype],
        flags,
        total,
        len(segments),
        len(table),
        num_changed,
        len(changes),
        check.to_bytes(),
        0,
    )[:_CHECKED_HEADER_BYTES]
    return b"".join((head, _CRC.pack(_crc32(head, *bodies)), *bodies))


def _crc32(*parts: bytes | memoryview) -> int:
    """Return the CRC-32 of all parts, one after the other."""
    native = kernel()
    value = 0
    for part in parts:
        if native is not None and native.isa is not Isa.BASE and len(part) >= MIN_NATIVE_CRC_BYTES:
            value = native.crc32(part, value)
        else:
            value = zlib.crc32(part, value)
    return value


def chunk_length(data: bytes | memoryview) -> int:
    """Return the length in bytes of the chunk that `data` begins with; it may extend beyond `data`.

    Raises:
        DamagedError: `data` does not begin with a chunk header.
        UnsupportedFormatError: its format number is unknown.
    """
    if len(data) < HEADER.size:
        raise DamagedError(f"chunk: {len(data)} bytes are shorter than a header of {HEADER.size}: fetch it again")
    magic, number, _, _, total, *_ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedError(f"chunk: it begins with {magic.hex()}, not {MAGIC.hex()}: not a chunk, or damaged")
    if number != FORMAT_NUMBER:
        raise UnsupportedFormatError(
            f"chunk: format number {number}, this build reads {FORMAT_NUMBER}: upgrade the older side"
        )
    if not HEADER.size <= total <= MAX_PAYLOAD_BYTES:
        raise DamagedError(f"chunk: length {total} is outside {HEADER.size}..{MAX_PAYLOAD_BYTES}: fetch it again")
    return int(total)


def parse_chunk(payload: bytes | memoryview) -> ParsedChunk:
    """Check the frame of exactly one chunk and return its parts.

    Raises:
        DamagedError: cut off, too long, checksum wrong, or any count beyond its limit.
        UnsupportedFormatError: unknown format number, dtype, flag or mode.
    """
    view = memoryview(payload).cast("B")
    total = chunk_length(view)
    if total != len(view):
        raise DamagedError(f"chunk: {len(view)} bytes received, its header states {total}: fetch it again")
    (
        _,
        _,
        dtype_code,
        flags,
        _,
        num_segments,
        table_bytes,
        num_changed,
        changes_bytes,
        check,
        crc,
    ) = HEADER.unpack_from(view)
    found = _crc32(view[:_CHECKED_HEADER_BYTES], view[HEADER.size :])
    if found != crc:
        raise DamagedError(f"chunk: checksum {found:08x}, its header states {crc:08x}: fetch it again")
    dtype = _DTYPES.get(dtype_code)
    if dtype is None or flags & ~(ANCHOR_FLAG | PACKED_TABLE_FLAG):
        raise UnsupportedFormatError(
            f"chunk: dtype {dtype_code}, flags {flags:#x} unknown to this build: upgrade the older side"
        )
    body = Reader(view[HEADER.size :])
    table = body.take(table_bytes)
    if flags & PACKED_TABLE_FLAG:
        table = _unpack_table(table, num_segments)
    if num_segments > MAX_SEGMENTS or len(table) > num_segments * _MAX_ROW_BYTES:
        raise DamagedError(f"chunk: {num_segments} segments in {len(table)} bytes exceed the limits: fetch it again")
    segments, modes = _read_table(Reader(table), num_segments, dtype)
    parsed = ParsedChunk(
        dtype=dtype,
        is_anchor=bool(flags & ANCHOR_FLAG),
        segments=segments,
        modes=modes,
        num_changed=num_changed,
        changes=body.take(changes_bytes),
        dense=body.take(body.left),
        check=TensorDigest.from_bytes(check),
    )
    if parsed.is_anchor and any(mode is not Mode.DENSE for mode in modes):
        raise DamagedError("chunk: an anchor chunk holds segments that are not dense: fetch it again")
    coded = parsed.count(Mode.CLASSED)
    if num_changed > coded:
        raise DamagedError(f"chunk: {num_changed} changes in segments of {coded} elements: fetch it again")
    return parsed


def _write_table(segments: Sequence[Segment], modes: Sequence[Mode]) -> bytes:
    """Return the modes, then three columns of varints, whose rows are much alike: zstd finds that."""
    steps, skips, counts = bytearray(), bytearray(), bytearray()
    last = Segment(0, 0, 0)
    for segment in segments:
        write_varint(steps, segment.tensor - last.tensor)
        write_varint(skips, segment.start - (last.stop if segment.tensor == last.tensor else 0))
        write_varint(counts, segment.count)
        last = segment
    return b"".join((bytes(modes), steps, skips, counts))


def _unpack_table(packed: memoryview, num_segments: int) -> memoryview:
    try:
        # The frame states its own size and zstd would allocate that much, so it is compared first.
        stated = zstandard.frame_content_size(packed)
        if not 0 < stated <= min(num_segments, MAX_SEGMENTS) * _MAX_ROW_BYTES:
            raise DamagedError(f"chunk: a table of {num_segments} segments states {stated} bytes: fetch it again")
        return memoryview(zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise DamagedError(f"chunk: its segment table is not a zstd frame ({error}): fetch it again") from error


def _read_table(table: Reader, num_segments: int, dtype: Dtype) -> tuple[tuple[Segment, ...], tuple[Mode, ...]]:
    codes = table.take(num_segments)
    unknown = sorted(set(codes) - set(Mode))
    if unknown:
        raise UnsupportedFormatError(f"chunk: segment modes {unknown} unknown to this build: upgrade the older side")
    columns = [[table.varint() for _ in range(num_segments)] for _ in range(3)]
    table.finish()
    segments = []
    last = Segment(0, 0, 0)
    num_elements = 0
    for step, skip, count in zip(*columns, strict=True):
        tensor = last.tensor + step
        start = skip + (0 if step else last.stop)
        num_elements += count
        if tensor >= MAX_TENSORS or start + count > MAX_ELEMENTS or num_elements * dtype.width > MAX_CHUNK_BYTES:
            raise DamagedError(
                f"chunk: segment of tensor {tensor}, start {start}, count {count} exceeds the limits: fetch it again"
            )
        last = Segment(tensor, start, count)
        segments.append(last)
    return tuple(segments), tuple(map(Mode, codes))
