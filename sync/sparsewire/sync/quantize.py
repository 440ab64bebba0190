"""Block-scaled fp8: float8 e4m3 elements and one float32 scale for every block of 128 x 128, as a function of bf16 bits.

Pure, NumPy only. The layout is that of block-fp8 checkpoints as DeepSeek publishes and vLLM loads them: element times
scale is the weight. What fixes every bit, so that publisher, worker and a fresh checkpoint agree:

    amax     the largest magnitude of the block, in bf16; blocks at the lower and right edge are smaller
    scale    max(amax / 448, 2^-116), one float32 division rounded to nearest even
    element  float32(weight) / scale, one float32 division rounded to nearest even, its magnitude cut to 448,
             rounded to e4m3 to nearest even, subnormals included; the sign stays, also that of zero

Division, not multiplication by a reciprocal: one correctly rounded operation is the same wherever float32 follows
IEEE 754. The floor of 2^-116 keeps scales and all quotients that matter out of float32's subnormals, which some
hardware flushes to zero; it is the scale of a block of zeros. A block that holds infinity or NaN has no scale and is
refused by name.

Shapes: R rows, C columns; a grid of scales is [ceil(R / 128), ceil(C / 128)]. A band is up to 128 rows that share a
row of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from sparsewire.sync.errors import ConfigError, SchemaMismatchError
from sparsewire.sync.types import Indices

BLOCK = 128
"""Rows and columns that share a scale."""

Bfloat16Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[ml_dtypes.bfloat16]]
Float8Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[ml_dtypes.float8_e4m3fn]]
Maxima: TypeAlias = npt.NDArray[np.uint16]
"""Largest magnitudes as bf16 bits without sign: ordered like the values, with NaN above infinity above all numbers."""

_LARGEST = np.float32(448)
_SMALLEST_NORMAL = np.float32(2.0**-6)
_SMALLEST_SCALE = np.float32(2.0**-116)
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = np.uint16(0x7F80)
_TILE_ELEMENTS = 1 << 16
"""Elements coded at a time, so that the intermediate arrays stay in the cache: 3 ns an element, 4.6 with whole bands."""

_DENSE_SHARE = 8
"""If more than one element in so many changed, quantising the whole weight is faster than picking them out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requantized:
    """What a re-quantisation changed, in both tensors."""

    positions: Indices
    """Flat positions of fp8 elements whose bits changed."""
    bits: npt.NDArray[np.uint8]
    """Their new bits."""
    scale_positions: Indices
    """Flat positions in the grid of scales whose bits changed."""
    scale_bits: npt.NDArray[np.uint32]
    """Their new bits."""


def grid_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a [rows, columns] weight."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantize_blocks(weight: Bfloat16Array, *, name: str = "weight") -> tuple[Float8Array, npt.NDArray[np.float32]]:
    """Return a bf16 [R, C] weight as fp8 [R, C] and its scales, float32 [ceil(R / 128), ceil(C / 128)].

    Raises:
        SchemaMismatchError: not a two-dimensional bf16 array.
        ConfigError: a weight is infinite or NaN; names the tensor and the first such block.
    """
    return quantize_rows(weight, first_row=0, shared={}, name=name)


def quantize_rows(
    weight: Bfloat16Array, *, first_row: int, shared: Mapping[int, Maxima], name: str
) -> tuple[Float8Array, npt.NDArray[np.float32]]:
    """Quantise rows [first_row, first_row + R) of a larger weight; scales of every band that they touch.

    Args:
        shared: maxima of whole bands by number, for bands of which these rows are only a part.

    Raises:
        SchemaMismatchError: not a two-dimensional bf16 array.
        ConfigError: a weight is infinite or NaN; names the tensor and the first such block.
    """
    bits = bits_of_weight(weight, name)
    rows, columns = bits.shape
    coded = np.empty(bits.shape, np.uint8)
    bands = range(first_row // BLOCK, -(-(first_row + rows) // BLOCK)) if rows else range(0)
    scales = np.empty((len(bands), grid_shape(rows, columns)[1]), np.float32)
    coder = _Coder(min(max(_TILE_ELEMENTS, columns), bits.size))
    for number, band in enumerate(bands):
        start, stop = max(0, band * BLOCK - first_row), min(rows, (band + 1) * BLOCK - first_row)
        maxima = shared[band] if band in shared else band_maxima(bits[start:stop])
        _check_finite(maxima, band=band, name=name)
        scales[number] = _scales(maxima)
        wide = np.repeat(scales[number], BLOCK)[:columns]
        step = max(1, _TILE_ELEMENTS // max(columns, 1))
        for at in range(start, stop, step):
            until = min(at + step, stop)
            coder.code(bits[at:until], wide, coded[at:until])
    return coded.view(ml_dtypes.float8_e4m3fn), scales


def band_maxima(bits: npt.NDArray[np.uint16]) -> Maxima:
    """Return the largest magnitude in each block of a band's rows, given as bf16 bits; 0 without rows."""
    columns = bits.shape[1]
    if not bits.size:
        return np.zeros(grid_shape(0, columns)[1], np.uint16)
    return np.maximum.reduceat((bits & _MAGNITUDE).max(axis=0), np.arange(0, columns, BLOCK))


def dequantize_blocks(quantized: Float8Array, scale_inv: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the weights [R, C] that fp8 elements and scales stand for, each one float32 product.

    Raises:
        SchemaMismatchError: the grid does not have the shape that the elements need.
    """
    _check_grid(quantized.shape, scale_inv, "weight")
    columns = quantized.shape[1]
    weights: npt.NDArray[np.float32] = quantized.astype(np.float32)
    for band, scales in enumerate(scale_inv):
        weights[band * BLOCK : (band + 1) * BLOCK] *= np.repeat(scales, BLOCK)[:columns]
    return weights


def requantize_touched(
    weight: Bfloat16Array,
    positions: Indices,
    quantized: Float8Array,
    scale_inv: npt.NDArray[np.float32],
    *,
    name: str = "weight",
) -> Requantized:
    """Bring `quantized` and `scale_inv` up to a weight that changed at `positions`, in place, and say what changed.

    The result has the very bits of `quantize_blocks(weight)`, provided that both arrays had them before the change.
    Touched blocks are scanned for their scale; only where that changed is the whole block coded again.

    Args:
        weight: bf16 [R, C], after the change.
        positions: sorted, distinct flat positions; every changed element is among them.
        quantized: fp8 [R, C], contiguous and writable.
        scale_inv: its scales, contiguous and writable.

    Raises:
        SchemaMismatchError: shapes, dtypes or positions do not fit each other.
        ConfigError: a weight in a touched block is infinite or NaN; nothing was written.
    """
    bits = bits_of_weight(weight, name)
    if quantized.shape != bits.shape or not quantized.flags.c_contiguous or not scale_inv.flags.c_contiguous:
        raise SchemaMismatchError(
            f"tensor {name}: weight is {list(bits.shape)} and fp8 is {list(quantized.shape)}; both need one shape, and "
            "fp8 and scales must be contiguous"
        )
    _check_grid(bits.shape, scale_inv, name)
    if len(positions) and not (positions[0] >= 0 and positions[-1] < bits.size):
        raise SchemaMismatchError(
            f"tensor {name}: positions {positions[0]}..{positions[-1]} are outside its {bits.size} elements"
        )
    if len(positions) > bits.size // _DENSE_SHARE:
        return _replace(quantized, scale_inv, *quantize_blocks(weight, name=name))
    columns = bits.shape[1]
    coded, scales = quantized.view(np.uint8), scale_inv.reshape(-1)
    blocks = positions // columns // BLOCK * scale_inv.shape[1] + positions % columns // BLOCK
    num_touched = np.bincount(blocks, minlength=len(scales))
    fresh = _fresh_scales(bits, num_touched, scale_inv, name)
    rescaled = fresh.view(np.uint32) != scales.view(np.uint32)
    scale_positions = np.flatnonzero(rescaled)
    scales[scale_positions] = fresh[scale_positions]

    coder = _Coder(max(_TILE_ELEMENTS, BLOCK * BLOCK))
    found, values = _recode_elements(coder, bits, coded, scales, positions, blocks, rescaled)
    for block in scale_positions:
        where, new = _recode_block(coder, bits, coded, scales[block], divmod(int(block), scale_inv.shape[1]))
        found.append(where)
        values.append(new)
    everywhere = np.concatenate([np.empty(0, np.int64), *found])
    order = np.argsort(everywhere, kind="stable")
    return Requantized(
        positions=everywhere[order],
        bits=np.concatenate([np.empty(0, np.uint8), *values])[order],
        scale_positions=scale_positions,
        scale_bits=scales.view(np.uint32)[scale_positions],
    )


def _replace(
    quantized: Float8Array, scale_inv: npt.NDArray[np.float32], coded: Float8Array, scales: npt.NDArray[np.float32]
) -> Requantized:
    """Copy new elements and scales over the old ones, and say what changed."""
    old, new = quantized.reshape(-1).view(np.uint8), coded.reshape(-1).view(np.uint8)
    old_scales, new_scales = scale_inv.reshape(-1).view(np.uint32), scales.reshape(-1).view(np.uint32)
    positions, scale_positions = np.flatnonzero(old != new), np.flatnonzero(old_scales != new_scales)
    old[positions] = new[positions]
    old_scales[scale_positions] = new_scales[scale_positions]
    return Requantized(
        positions=positions,
        bits=new[positions],
        scale_positions=scale_positions,
        scale_bits=new_scales[scale_positions],
    )


def _fresh_scales(
    bits: npt.NDArray[np.uint16], num_touched: npt.NDArray[np.int64], scale_inv: npt.NDArray[np.float32], name: str
) -> npt.NDArray[np.float32]:
    """Return all scales, flat, with those of the touched blocks computed anew."""
    touched = num_touched.reshape(scale_inv.shape) > 0
    fresh = scale_inv.copy()
    for band in np.flatnonzero(touched.any(axis=1)):
        among = np.flatnonzero(touched[band])
        first, last = int(among[0]), int(among[-1])
        maxima = band_maxima(bits[band * BLOCK : (band + 1) * BLOCK, first * BLOCK : (last + 1) * BLOCK])
        maxima = maxima[among - first]
        _check_finite(maxima, band=int(band), name=name, columns=among)
        fresh[band, among] = _scales(maxima)
    return fresh.reshape(-1)


def _recode_elements(
    coder: _Coder,
    bits: npt.NDArray[np.uint16],
    coded: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    positions: Indices,
    blocks: npt.NDArray[np.int64],
    rescaled: npt.NDArray[np.bool_],
) -> tuple[list[Indices], list[npt.NDArray[np.uint8]]]:
    """Code single elements anew, in place, except in `rescaled` blocks; return positions whose bits changed, and bits."""
    alone = ~rescaled[blocks]
    positions, blocks = positions[alone], blocks[alone]
    found, values = [], []
    flat = bits.reshape(-1)
    for at in range(0, len(positions), _TILE_ELEMENTS):
        where = positions[at : at + _TILE_ELEMENTS]
        new = np.empty(len(where), np.uint8)
        coder.code(flat[where], scales[blocks[at : at + _TILE_ELEMENTS]], new)
        differ = new != coded.reshape(-1)[where]
        found.append(where[differ])
        values.append(new[differ])
        coded.reshape(-1)[found[-1]] = values[-1]
    return found, values


def _recode_block(
    coder: _Coder,
    bits: npt.NDArray[np.uint16],
    coded: npt.NDArray[np.uint8],
    scale: np.float32,
    place: tuple[int, int],
) -> tuple[Indices, npt.NDArray[np.uint8]]:
    """Code one block anew, in place; return the flat positions whose bits changed, and the bits."""
    row, column = place[0] * BLOCK, place[1] * BLOCK
    old = coded[row : row + BLOCK, column : column + BLOCK]
    new = np.empty(old.shape, np.uint8)
    coder.code(bits[row : row + BLOCK, column : column + BLOCK], np.full(1, scale, np.float32), new)
    rows, columns = np.nonzero(new != old)
    values = new[rows, columns]
    old[rows, columns] = values
    return (rows + row) * coded.shape[1] + columns + column, values


class _Coder:
    """Turns bf16 bits and scales into e4m3 bits; holds the intermediate arrays."""

    def __init__(self, num_elements: int) -> None:
        self._value = np.empty(num_elements, np.uint32)
        self._magic = np.empty(num_elements, np.uint32)
        self._sum = np.empty(num_elements, np.uint32)

    def code(self, bits: npt.NDArray[np.uint16], scales: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> None:
        """Write the e4m3 bits of `bits` / `scales` (broadcast) to `out`; all numbers must be finite.

        Adding 2^(e + 20) to a magnitude with exponent e, or -6 if that is larger, makes the adder round it to three
        bits after the leading one, ties to even, and leaves the result as an integer in the low bits: 8 to 16, or 0 to
        8 for subnormals. Added to 8 (e + 6) that is the e4m3 pattern, carries included.
        """
        shape = bits.shape
        value, magic, total = (array[: bits.size].reshape(shape) for array in (self._value, self._magic, self._sum))
        value[...] = bits & _MAGNITUDE
        value <<= 16
        quotient = value.view(np.float32)
        quotient /= scales
        np.minimum(quotient, _LARGEST, out=quotient)
        np.maximum(quotient, _SMALLEST_NORMAL, out=magic.view(np.float32))
        magic &= np.uint32(0x7F800000)
        magic += np.uint32(20 << 23)
        np.add(quotient, magic.view(np.float32), out=total.view(np.float32))
        total -= magic
        magic >>= 20
        total += magic
        total -= np.uint32((121 + 20) << 3)
        out[...] = total
        out |= ((bits >> 8) & np.uint16(0x80)).astype(np.uint8)


def _scales(maxima: Maxima) -> npt.NDArray[np.float32]:
    amax = (maxima.astype(np.uint32) << 16).view(np.float32)
    scales: npt.NDArray[np.float32] = np.maximum(amax / _LARGEST, _SMALLEST_SCALE)
    return scales


def bits_of_weight(weight: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint16]:
    if weight.dtype != ml_dtypes.bfloat16 or weight.ndim != 2:
        raise SchemaMismatchError(
            f"tensor {name} is {weight.dtype}{list(weight.shape)}; block-fp8 is made of two-dimensional bfloat16 weights: "
            "cast it, or name its module in modules_to_not_convert"
        )
    return weight.view(np.uint16)


def _check_finite(maxima: Maxima, *, band: int, name: str, columns: npt.NDArray[np.int64] | None = None) -> None:
    """Refuse maxima of blocks in `columns` of the grid (all by default) that have no scale."""
    if maxima.size and maxima.max() >= _INFINITY:
        at = int(np.argmax(maxima >= _INFINITY))
        column = at if columns is None else int(columns[at])
        raise ConfigError(
            f"tensor {name}: a weight in block ({band}, {column}) is infinite or NaN, so the block has no fp8 scale; "
            "go back to weights that are finite"
        )


def _check_grid(shape: tuple[int, ...], scale_inv: npt.NDArray[np.float32], name: str) -> None:
    wanted = grid_shape(shape[0], shape[1]) if len(shape) == 2 else None
    if scale_inv.shape != wanted or scale_inv.dtype != np.float32:
        raise SchemaMismatchError(
            f"tensor {name} of shape {list(shape)} needs float32 scales of shape {list(wanted or ())}, "
            f"got {scale_inv.dtype}{list(scale_inv.shape)}"
        )
