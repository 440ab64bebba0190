"""The native kernel: the classed codec and the digests at memory speed, where a compiled library is at hand.

Contract. `kernel()` returns the loaded kernel, or None when there is none, which is said once in the log: everything
works without it, some twenty times slower, and every byte is the same. SPARSEWIRE_NATIVE is `auto` (the default), `0` (do not
load it) or `require` (its absence is an error); SPARSEWIRE_ISA lowers the instruction set to `base`, `avx2` or `avx512`.
A kernel is immutable and may be used from any number of threads; each call releases the GIL while it runs. Work space
is kept per thread and bounded. The library is built by hatch_build.py; native/abi.h describes the interface.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    LastChangeMissingError,
    SparsewireError,
    UnsupportedFormatError,
    WrongBaseError,
)
from sparsewire.sync.types import Bits, Indices

_log = logging.getLogger(__name__)

ABI = 2
"""Must equal SPARSEWIRE_ABI of native/abi.h: a library built from other sources is refused."""

MISSING_LAST_CHANGE = "chunk: it is coded against the change before, which is not at hand: take another path"

LIBRARY = Path(__file__).with_name("native") / "kernel.so"

_TOO_SMALL = -7
"""SW_TOO_SMALL of native/abi.h."""
_WRONG_LAST_CHANGE = -8
"""SW_WRONG_LAST_CHANGE of native/abi.h."""
_KEPT_SCRATCH_BYTES = 40 << 20
"""Work space beyond this is given back after a call; chunks of usual density need less."""

Counts = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

LastBits = tuple[Indices, Bits]
"""What the change before replaced: ascending places in the space of all segments end to end, and the bits before it."""


class Isa(IntEnum):
    """Instruction sets that the library is compiled for, ascending."""

    BASE = 0
    AVX2 = 1
    AVX512 = 2


class Wish(IntEnum):
    """What the encoder is to do with a segment."""

    SKIP = 2
    """Leave it out."""
    CLASSED = 3
    """Take it however dense it is."""
    AUTO = 254
    """Take it if it changed and is not crowded."""


class Found(IntEnum):
    """What the encoder found about a segment."""

    UNCHANGED = 0
    SKIPPED = 2
    CLASSED = 3
    """Its changes are in the body."""
    CROWDED = 255
    """More than one element in `crowded` changed; it was counted and left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeEncoding:
    """A classed body and the changes that it holds, segment after segment."""

    found: Counts
    """A `Found` for each segment."""
    num_changed: Counts
    """Changed elements of each segment, whether it is in the body or not; 0 for skipped ones."""
    body: bytes
    """Empty when no segment is classed."""
    indices: Indices
    """Of all classed segments one after the other: flat positions in their tensors."""
    old: Bits
    new: Bits
    digests: Counts
    """[segment, 2]: what each classed segment adds to the digest of its tensor; 0 for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDecoding:
    """The changes that a body holds against its base, segment after segment."""

    num_changed: Counts
    """Changed elements of each segment."""
    indices: Indices
    """Flat positions in the tensors."""
    old: Bits
    new: Bits
    digests: Counts
    """[segment, 2]: what each segment adds to the digest of its tensor."""


def _fields(*names_and_types: tuple[str, Any]) -> list[tuple[str, Any]]:
    return list(names_and_types)


_U32, _U64, _POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class _Encode(ctypes.Structure):
    _fields_ = _fields(
        ("width", _U32),
        ("num_cuts", _U32),
        ("cuts", ctypes.c_char_p),
        ("num_segments", _U64),
        ("table", _POINTER),
        ("crowded", _U64),
        ("scratch", _POINTER),
        ("scratch_bytes", _U64),
        ("num_changed", _U64),
        ("indices_at", _U64),
        ("old_at", _U64),
        ("new_at", _U64),
        ("body_at", _U64),
        ("body_bytes", _U64),
        ("num_last", _U64),
        ("last_places", _POINTER),
        ("last_bits", _POINTER),
    )


class _Decode(ctypes.Structure):
    _fields_ = _fields(
        ("width", _U32),
        ("reserved", _U32),
        ("body", _POINTER),
        ("body_bytes", _U64),
        ("num_changed", _U64),
        ("num_segments", _U64),
        ("table", _POINTER),
        ("scratch", _POINTER),
        ("scratch_bytes", _U64),
        ("indices_at", _U64),
        ("old_at", _U64),
        ("new_at", _U64),
        ("num_last", _U64),
        ("last_places", _POINTER),
        ("last_bits", _POINTER),
    )


class _Row(IntEnum):
    """Rows of the table of segments: enum sparsewire_row of native/abi.h."""

    OLD = 0
    NEW = 1
    COUNT = 2
    START = 3
    MODE = 4
    NUM_CHANGED = 5
    DIGEST_A = 6
    DIGEST_B = 7


class _Scratch(threading.local):
    """Work space of one thread; what a call leaves in it is copied out before the next one."""

    def __init__(self) -> None:
        self.space = np.empty(0, np.uint8)
        self.address = 0

    def grow(self, num_bytes: int) -> None:
        """Have room for `num_bytes`; pages that nothing is written to cost no memory."""
        self.space = np.empty(num_bytes, np.uint8)
        self.address = _address(self.space)

    def copy(self, at: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of `count` elements that begin at byte `at`."""
        return np.frombuffer(self.space, dtype, count, at).copy()

    def give_back(self) -> None:
        """Free it if it is too large to keep."""
        if len(self.space) > _KEPT_SCRATCH_BYTES:
            self.grow(0)


class Kernel:
    """The functions of one loaded library at one instruction set."""

    def __init__(self, *, library: ctypes.CDLL, isa: Isa) -> None:
        self._library = library
        self.isa = isa
        """What it runs on."""
        self._scratch = _Scratch()

    def encode(
        self,
        old: Sequence[Bits],
        new: Sequence[Bits],
        *,
        starts: Sequence[int],
        cuts: bytes,
        crowded: int,
        wishes: Sequence[Wish] | None = None,
        last: LastBits | None = None,
    ) -> NativeEncoding:
        """Find and encode what changed in segments of equal dtype, in one pass over their flat bits; at least one.

        `starts` are the segments' first positions in their tensors. A segment in which more than one element in
        `crowded` changed is left out unless `wishes` asks for it; without `wishes` all are AUTO. With `last`, what the
        change before replaced in all segments, two-byte elements are taken to be bfloat16 and predicted where it pays.

        Raises:
            ValueError: cuts do not ascend, bits are not contiguous, or there are more than 2^24 elements.
        """
        dtype = new[0].dtype
        table = _table(old, new, starts, wishes)
        job = _Encode(
            width=dtype.itemsize,
            num_cuts=len(cuts),
            cuts=cuts,
            num_segments=len(new),
            table=_address(table),
            crowded=crowded,
        )
        kept = _give_last(job, last)
        scratch = self._scratch
        code = self._run(self._library.sparsewire_encode, job)
        del kept
        if code:
            raise ValueError(
                f"kernel: cuts {list(cuts)} do not ascend, or more than 2^24 elements in {len(new)} segments"
            )
        num, begin, end = job.num_changed, job.body_at, job.body_at + job.body_bytes
        result = NativeEncoding(
            found=table[_Row.MODE],
            num_changed=table[_Row.NUM_CHANGED],
            digests=table[_Row.DIGEST_A :].T,
            body=scratch.space[begin:end].tobytes(),
            indices=scratch.copy(job.indices_at, num, np.int64),
            old=scratch.copy(job.old_at, num, dtype),
            new=scratch.copy(job.new_at, num, dtype),
        )
        scratch.give_back()
        return result

    def decode(
        self,
        body: memoryview | bytes,
        *,
        num_changed: int,
        old: Sequence[Bits],
        starts: Sequence[int],
        last: LastBits | None = None,
    ) -> NativeDecoding:
        """Decode a classed body against the flat bits of its segments, at least one.

        Raises:
            DamagedError: the bytes are unsound.
            UnsupportedFormatError: the body has flags that this build does not know.
            WrongBaseError: the base has other classes than the one that the body was made from, or `last` is another.
            LastChangeMissingError: the body is coded against the change before and `last` is None.
            ValueError: bits are not contiguous.
        """
        dtype = old[0].dtype
        table = _table(old, None, starts, None)
        data = np.frombuffer(body, np.uint8)
        job = _Decode(
            width=dtype.itemsize,
            body=_address(data),
            body_bytes=len(data),
            num_changed=num_changed,
            num_segments=len(old),
            table=_address(table),
        )
        kept = _give_last(job, last)
        scratch = self._scratch
        code = self._run(self._library.sparsewire_decode, job)
        del kept
        if code == _WRONG_LAST_CHANGE and last is None:
            raise LastChangeMissingError(MISSING_LAST_CHANGE)
        if code:
            raise _refusal(code)
        result = NativeDecoding(
            num_changed=table[_Row.NUM_CHANGED],
            digests=table[_Row.DIGEST_A :].T,
            indices=scratch.copy(job.indices_at, num_changed, np.int64),
            old=scratch.copy(job.old_at, num_changed, dtype),
            new=scratch.copy(job.new_at, num_changed, dtype),
        )
        scratch.give_back()
        return result

    def _run(self, function: Any, job: _Encode | _Decode) -> int:
        """Call with the scratch of this thread, and once more when it was too small."""
        scratch = self._scratch
        job.scratch, job.scratch_bytes = scratch.address, len(scratch.space)
        code = int(function(self.isa, ctypes.byref(job)))
        if code == _TOO_SMALL:
            scratch.grow(job.scratch_bytes)
            job.scratch = scratch.address
            code = int(function(self.isa, ctypes.byref(job)))
        return code

    def sample(self, old: Sequence[Bits], new: Sequence[Bits]) -> tuple[Counts, Counts]:
        """Return what cuts are fitted to: elements by key, [256], and changes by key and token, [256, tokens].

        Of up to 2^18 elements all are counted; of more the first 4,096 of every 32,768, segments laid end to end.
        """
        width = new[0].dtype.itemsize
        table = _table(old, new, [0] * len(old), None)
        elements, counts = np.zeros(256, np.uint64), np.zeros((256, 64 * width - 16), np.uint64)
        code = self._library.sparsewire_sample(
            self.isa, width, len(new), _address(table), _address(elements), _address(counts)
        )
        if code:
            raise ValueError(f"kernel: more than 2^24 elements in {len(new)} segments")
        return elements, counts

    def digest_range(self, bits: Bits, start: int) -> tuple[int, int]:
        """Return both sums of the digest of a contiguous flat range whose first element has position `start`."""
        digest = np.empty(2, np.uint64)
        self._library.sparsewire_digest_range(
            self.isa, bits.dtype.itemsize, _address(bits), len(bits), start, _address(digest)
        )
        return int(digest[0]), int(digest[1])

    def digest_at(self, indices: Indices, bits: Bits) -> tuple[int, int]:
        """Return both sums of the digest of the elements at flat positions `indices`; one entry of `bits` for each."""
        digest = np.empty(2, np.uint64)
        self._library.sparsewire_digest_positions(
            self.isa, bits.dtype.itemsize, _address(indices), _address(bits), len(bits), _address(digest)
        )
        return int(digest[0]), int(digest[1])

    def scatter(self, target: Bits, indices: Indices, values: Bits) -> None:
        """Write `values` at `indices` of the flat, contiguous `target`.

        Raises:
            DamagedError: an index is beyond the target; nothing is written.
        """
        if not target.flags.writeable or len(indices) != len(values) or target.dtype != values.dtype:
            raise ValueError(
                f"scatter: {len(values)} {values.dtype} values at {len(indices)} positions of {target.dtype}, "
                f"writeable: {target.flags.writeable}"
            )
        code = self._library.sparsewire_scatter(
            self.isa,
            target.dtype.itemsize,
            _address(target),
            len(target),
            _address(indices),
            _address(values),
            len(values),
        )
        if code:
            raise DamagedError(f"patch: a position is beyond the {len(target)} elements of its tensor: fetch it again")

    def split(self, new: Sequence[Bits], *, starts: Sequence[int]) -> tuple[list[Bytes], Counts]:
        """Return the byte planes of segments laid end to end, and the digest of each, [segment, 2], in one pass.

        Segments are of one dtype of 2, 4 or 8 bytes, at least one; `starts` are their first positions in their tensors.

        Raises:
            ValueError: bits are not contiguous.
        """
        table = _table(new, new, starts, None)
        width, num_elements = new[0].dtype.itemsize, sum(map(len, new))
        planes = [np.empty(num_elements, np.uint8) for _ in range(width)]
        self._turn(self._library.sparsewire_split, width, table, planes)
        return planes, table[_Row.DIGEST_A :].T

    def join(self, planes: Sequence[Bytes], *, counts: Sequence[int], starts: Sequence[int]) -> tuple[Bits, Counts]:
        """Return the elements of 2, 4 or 8 byte planes, and the digest of each segment, [segment, 2], in one pass.

        Segments have `counts` elements, and begin at `starts` in their tensors; at least one.

        Raises:
            ValueError: planes are not contiguous or not of the size that `counts` add up to.
        """
        num_elements = sum(counts)
        if any(plane.shape != (num_elements,) or not plane.flags.c_contiguous for plane in planes):
            raise ValueError(f"kernel: planes of {[plane.shape for plane in planes]} for {num_elements} elements")
        bits: Bits = np.empty(num_elements, f"<u{len(planes)}")
        parts = [bits[a:b] for a, b in pairwise(accumulate(counts, initial=0))]
        table = _table(parts, parts, starts, None)
        self._turn(self._library.sparsewire_join, len(planes), table, planes)
        return bits, table[_Row.DIGEST_A :].T

    def _turn(self, function: Any, width: int, table: Counts, planes: Sequence[Bytes]) -> None:
        addresses = np.array([_address(plane) for plane in planes], np.uint64)
        code = function(self.isa, width, table.shape[1], _address(table), _address(addresses))
        if code:
            raise ValueError(f"kernel: elements of {width} bytes have no planes: 2, 4 or 8 are needed")

    def crc32(self, data: bytes | memoryview, value: int) -> int:
        """Return what zlib.crc32 does, ten times as fast; on `Isa.BASE` it is far slower and zlib should be asked."""
        view = np.frombuffer(data, np.uint8)
        return int(self._library.sparsewire_crc32(self.isa, value, _address(view), len(view)))

    def count_changed(self, old: Bits, new: Bits) -> int:
        """Return how many elements of two contiguous arrays of equal length and dtype differ, by a bare loop."""
        return int(
            self._library.sparsewire_compare(self.isa, new.dtype.itemsize, _address(old), _address(new), len(new))
        )


_REFUSALS: dict[int, SparsewireError] = {
    -1: DamagedError("chunk: the head of its classed body is unsound or cut off: fetch it again"),
    -2: DamagedError("chunk: the gaps of its classed body are not what its head states: fetch it again"),
    -3: DamagedError("chunk: a token table or the token stream of its classed body is unsound: fetch it again"),
    -4: DamagedError("chunk: the steps of its classed body are not what its head states: fetch it again"),
    -5: WrongBaseError(
        "chunk: the classes of the base have other sizes than it states: it was made from other weights than those "
        "held here; catch up from an anchor"
    ),
    -6: UnsupportedFormatError("chunk: flags of its classed body are unknown to this build: upgrade the older side"),
    _WRONG_LAST_CHANGE: WrongBaseError(
        "chunk: the change before has other changes in common with it than it states: it was made from another one than "
        "that held here; catch up by another path"
    ),
}
"""By the error codes of native/abi.h."""


def _refusal(code: int) -> SparsewireError:
    refusal = _REFUSALS.get(code)
    assert refusal is not None, f"kernel: code {code} for a call that it should have taken"
    return type(refusal)(*refusal.args)


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _addresses(arrays: Sequence[Bits]) -> list[int]:
    for bits in arrays:
        if not bits.flags.c_contiguous:
            raise ValueError(f"kernel: bits of shape {bits.shape} are not contiguous: copy them")
    return [bits.ctypes.data for bits in arrays]


def _give_last(job: _Encode | _Decode, last: LastBits | None) -> LastBits | None:
    """Point `job` at the change before; what is returned must live until the call is over."""
    if last is None:
        return None
    places, before = np.ascontiguousarray(last[0], np.int64), np.ascontiguousarray(last[1])
    if len(places) != len(before) or before.dtype.itemsize != job.width:
        raise ValueError(f"kernel: {len(places)} places and {len(before)} {before.dtype} bits of the change before")
    job.num_last, job.last_places, job.last_bits = len(places), _address(places), _address(before)
    return places, before


def _table(
    old: Sequence[Bits], new: Sequence[Bits] | None, starts: Sequence[int], wishes: Sequence[Wish] | None
) -> Counts:
    """Return the rows that describe segments; without `new` there are zeros in its place, without `wishes` AUTO."""
    none = [0] * len(old)
    return np.array(
        [
            _addresses(old),
            none if new is None else _addresses(new),
            [len(bits) for bits in old],
            starts,
            [Wish.AUTO] * len(old) if wishes is None else wishes,
            none,
            none,
            none,
        ],
        np.uint64,
    )


def load_kernel(library: Path = LIBRARY, *, isa: Isa | None = None) -> Kernel | None:
    """Load a library and return its kernel at `isa`, or at the best that the processor has; None, logged, if it cannot be.

    Raises:
        ConfigError: the processor does not have `isa`.
    """
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        _log.warning("native kernel: %s; the NumPy form is used, which is slower (docs/codec.md)", error)
        return None
    if not hasattr(loaded, "sparsewire_abi") or loaded.sparsewire_abi() != ABI:
        _log.warning(
            "native kernel: %s was built from other sources (ABI %s, not %d): install again; the NumPy form is used",
            library,
            loaded.sparsewire_abi() if hasattr(loaded, "sparsewire_abi") else "unknown",
            ABI,
        )
        return None
    best = Isa(loaded.sparsewire_best_isa())
    if isa is not None and isa > best:
        raise ConfigError(f"SPARSEWIRE_ISA: this processor has {best.name.lower()}, not {isa.name.lower()}")
    pointer, count = _POINTER, _U64
    for name, arguments in {
        "encode": (ctypes.c_int32, pointer),
        "decode": (ctypes.c_int32, pointer),
        "sample": (ctypes.c_int32, _U32, count, pointer, pointer, pointer),
        "digest_range": (ctypes.c_int32, _U32, pointer, count, count, pointer),
        "digest_positions": (ctypes.c_int32, _U32, pointer, pointer, count, pointer),
        "scatter": (ctypes.c_int32, _U32, pointer, count, pointer, pointer, count),
        "compare": (ctypes.c_int32, _U32, pointer, pointer, count),
        "split": (ctypes.c_int32, _U32, count, pointer, pointer),
        "join": (ctypes.c_int32, _U32, count, pointer, pointer),
        "crc32": (ctypes.c_int32, _U32, pointer, count),
    }.items():
        function = getattr(loaded, f"sparsewire_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int64
    return Kernel(library=loaded, isa=best if isa is None else isa)


@functools.cache
def kernel() -> Kernel | None:
    """Return the kernel of this process, or None when there is none or SPARSEWIRE_NATIVE is 0.

    Raises:
        ConfigError: SPARSEWIRE_NATIVE is `require` and there is none, or a variable has another value than it may.
    """
    wish = os.environ.get("SPARSEWIRE_NATIVE", "auto")
    if wish not in ("0", "auto", "require"):
        raise ConfigError(f"SPARSEWIRE_NATIVE is {wish!r}: it must be 0, auto or require")
    if wish == "0":
        return None
    name = os.environ.get("SPARSEWIRE_ISA")
    if name is not None and name.upper() not in Isa.__members__:
        raise ConfigError(f"SPARSEWIRE_ISA is {name!r}: it must be base, avx2 or avx512")
    found = load_kernel(isa=None if name is None else Isa[name.upper()])
    if found is None and wish == "require":
        raise ConfigError(
            "SPARSEWIRE_NATIVE is require, but there is no kernel: install a C compiler and install again"
        )
    return found
