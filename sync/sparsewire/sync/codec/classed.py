"""The classed body: what changed, coded against the exponents of the base. This form defines the format.

Pure. Elements of one exponent class change like coin tosses of one probability, so the gaps between their ranks are
geometric and take Rice codes; their steps are signs where all are one unit in the last place, tokens elsewhere. With the
change before at hand, steps of tokens may start from where the weight was headed (predict.py). All segments of a
chunk are one space here: their elements end to end. `parse_classed` checks everything that the bytes alone can show
before it allocates for it; `rebuild` then needs the base. docs/format.md gives every byte.

    head: cuts, and for each class how many, how coded   |  remainders | unary | signs | tokens | raw bits | exceptions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.bitfields import (
    equal_fields,
    fields,
    num_bytes,
    pack_bits,
    read_equal_fields,
    read_fields,
    read_unary,
    unary,
    unpack_bits,
)
from sparsewire.sync.codec.classes import MAX_CLASSES, ExponentClasses, complement
from sparsewire.sync.codec.predict import choose_gain, find_common, predict
from sparsewire.sync.codec.rans import (
    STATES_BYTES,
    Frequencies,
    cost_of_tokens,
    read_table,
    read_tokens,
    write_table,
    write_tokens,
)
from sparsewire.sync.codec.rice import MAX_PARAMETER, gaps_of, ranks_of, rice_parameter
from sparsewire.sync.codec.steps import (
    Tokens,
    join_predicted_steps,
    join_steps,
    num_predicted_raw_bits,
    num_predicted_tokens,
    num_raw_bits,
    num_tokens,
    split_predicted_steps,
    split_steps,
)
from sparsewire.sync.codec.streams import Reader, write_varint
from sparsewire.sync.errors import DamagedError, LastChangeMissingError, UnsupportedFormatError, WrongBaseError
from sparsewire.sync.native import MISSING_LAST_CHANGE, LastBits
from sparsewire.sync.types import Bits, Indices

PREDICTED_FLAG = 1
"""Of the first byte of a body: some class is coded against the change before."""
PREDICTED_WIDTH = 2
"""Bytes of an element that a prediction knows: bfloat16 alone."""

_PARAMETER, _INVERSE, _WIDE, _EXCEPTIONS = 0x1F, 0x20, 0x40, 0x80
_PREDICTED = _EXCEPTIONS
"""In a wide class, which has no exceptions."""


@dataclass(slots=True, kw_only=True)
class ClassChanges:
    """What one class holds, as far as the bytes alone tell."""

    num_changed: int
    parameter: int = 0
    num_unchanged: int | None = None
    """Given in the inverse form, whose ranks are those of the unchanged elements."""
    num_exceptions: int = 0
    wide: bool = False
    num_predicted: int = 0
    """Changes of a wide class whose steps start from their predictions."""
    frequencies: Frequencies | None = None
    """The token table of plain steps of a wide class, if it has any."""
    predicted_frequencies: Frequencies | None = None
    """The token table of steps from predictions, if there are any."""
    ranks: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    steps: Bits = field(default_factory=lambda: np.empty(0, np.uint8))
    """New minus old bits of the changed elements, by position; without those that are predicted."""
    predicted_steps: Bits = field(default_factory=lambda: np.empty(0, np.uint8))
    """New bits minus their predictions, by position."""

    @property
    def num_gaps(self) -> int:
        """Gaps in the streams."""
        return self.num_changed if self.num_unchanged is None else self.num_unchanged

    @property
    def parts(self) -> list[tuple[int, Frequencies, bool]]:
        """Of a wide class, in the order of the streams: how many tokens, their table, whether they are predicted ones."""
        parts = []
        if self.frequencies is not None:
            parts.append((self.num_changed - self.num_predicted, self.frequencies, False))
        if self.predicted_frequencies is not None:
            parts.append((self.num_predicted, self.predicted_frequencies, True))
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """A classed body whose streams are sound; where its changes lie depends on the base."""

    cuts: bytes
    classes: Sequence[ClassChanges]
    gain: int | None
    """How far predictions go, in units of 1/128; None in a body without them."""


def encode_classed(old: Bits, positions: Indices, steps: Bits, cuts: bytes, last: LastBits | None = None) -> bytes:
    """Return the body that adds `steps`, none of them zero, to the elements of `old` at ascending `positions`.

    With `last`, elements are taken to be bfloat16, and wide classes for which it pays are coded against predictions.

    Raises:
        ValueError: `cuts` are not ascending keys.
    """
    classes = ExponentClasses(old, cuts)
    changed_classes = classes.at(positions)
    # Of each change, whether it has a prediction, and its step from there.
    hinted, from_prediction, gain = np.zeros(len(steps), np.bool_), steps, 0
    if last is not None:
        again, places = find_common(positions, last[0])
        held, before = old[positions[again]], last[1][places]
        gain = choose_gain(held, before, held + steps[again])
        hinted[again] = True
        from_prediction = steps.copy()
        from_prediction[again] += held - predict(held, before, gain)
    # The stable order by class is the order of every stream.
    order = np.argsort(changed_classes, kind="stable")
    ends = np.cumsum(np.bincount(changed_classes, minlength=len(cuts) + 1))
    head = bytearray((0, len(cuts) + 1)) + cuts
    remainders, quotients, signs, tokens, raw, exceptions = [], [], [], [], [], bytearray()
    for number, (start, end) in enumerate(zip(ends - np.diff(ends, prepend=0), ends, strict=True)):
        chosen = order[start:end]
        write_varint(head, len(chosen))
        if not len(chosen):
            continue
        members = classes.members(number)
        ranks = members.ranks(positions[chosen])
        num_unchanged = members.size - len(ranks)
        inverse = 8 * num_unchanged < 5 * len(ranks)
        gaps = gaps_of(complement(ranks, members.size) if inverse else ranks)
        parameter = rice_parameter(gaps)
        remainders.append(equal_fields(gaps.astype(np.uint64), parameter))
        quotients.append(gaps >> parameter)
        moves = steps[chosen]
        down = moves == moves.dtype.type(np.iinfo(moves.dtype).max)
        others = np.flatnonzero((moves != 1) & ~down)
        wide = len(others) > _max_exceptions(len(moves))
        flags = (_INVERSE if inverse else 0) | (_WIDE if wide else _EXCEPTIONS if len(others) else 0)
        parts, num_predicted = _wide_parts(moves, from_prediction[chosen], hinted[chosen]) if wide else ([], 0)
        head.append(parameter | flags | (_PREDICTED if num_predicted else 0))
        if inverse:
            write_varint(head, num_unchanged)
        if wide:
            if num_predicted:
                write_varint(head, num_predicted)
                head[0] = PREDICTED_FLAG
            for part in parts:
                head += part.table
                tokens.append((part.tokens, part.frequencies))
                raw.append(fields(part.magnitudes, part.widths))
            continue
        signs.append(down.view(np.uint8))
        if len(others):
            write_varint(head, len(others))
            for gap, step in zip(gaps_of(others).tolist(), moves[others], strict=True):
                write_varint(exceptions, gap)
                exceptions += step.tobytes()
    if head[0]:
        head.append(gain)
    streams = [pack_bits(_join(remainders)), pack_bits(unary(_join(quotients))), pack_bits(_join(signs))]
    write_varint(head, len(streams[1]))
    if tokens:
        streams += [write_tokens(tokens), pack_bits(_join(raw))]
        write_varint(head, (len(streams[3]) - STATES_BYTES) // 2)
        write_varint(head, len(streams[4]))
    return b"".join((head, *streams, exceptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Steps of one class that share a token table."""

    tokens: Tokens
    frequencies: Frequencies
    table: bytes
    magnitudes: npt.NDArray[np.uint64]
    widths: npt.NDArray[np.int64]

    @property
    def cost(self) -> int:
        """About how many 1/256 bits it takes."""
        return cost_of_tokens(self.tokens, self.frequencies) + 256 * (8 * len(self.table) + int(self.widths.sum()))


def _part(steps: Bits, *, predicted: bool) -> _Part:
    tokens, magnitudes, widths = (split_predicted_steps if predicted else split_steps)(steps)
    table = bytearray()
    frequencies = write_table(table, tokens)
    return _Part(tokens=tokens, frequencies=frequencies, table=bytes(table), magnitudes=magnitudes, widths=widths)


def _wide_parts(steps: Bits, from_prediction: Bits, hinted: npt.NDArray[np.bool_]) -> tuple[list[_Part], int]:
    """Return the parts of a wide class and how many of its changes are predicted: none, unless that is smaller."""
    whole = [_part(steps, predicted=False)]
    num_hinted = int(hinted.sum())
    if not num_hinted:
        return whole, 0
    parts = [] if num_hinted == len(steps) else [_part(steps[~hinted], predicted=False)]
    parts.append(_part(from_prediction[hinted], predicted=True))
    count = bytearray()
    write_varint(count, num_hinted)
    extra = 256 * 8 * (len(count) + 1)
    return (parts, num_hinted) if extra + sum(p.cost for p in parts) < whole[0].cost else (whole, 0)


def is_predicted(body: bytes | memoryview) -> bool:
    """Return whether it takes the change before to decode a body, which may be empty."""
    return len(body) > 0 and bool(body[0] & PREDICTED_FLAG)


def parse_classed(body: memoryview, *, num_changed: int, num_elements: int, width: int) -> ParsedBody:
    """Read and check what `encode_classed` wrote, as far as it goes without the base.

    Memory is bounded by a multiple of `num_elements`, the elements of all classed segments.

    Raises:
        DamagedError: lengths, counts, padding or states are not as they must be.
        UnsupportedFormatError: flags of the body that this build does not know.
    """
    reader = Reader(body)
    flags, num_classes = reader.take(2)
    if flags & ~PREDICTED_FLAG or (flags and width != PREDICTED_WIDTH):
        raise UnsupportedFormatError(
            f"chunk: flags {flags:#x} of a classed body of {width}-byte elements unknown: upgrade the older side"
        )
    if not 1 <= num_classes <= MAX_CLASSES:
        raise DamagedError(f"chunk: {num_classes} classes, at most {MAX_CLASSES}: fetch it again")
    cuts = bytes(reader.take(num_classes - 1))
    if any(after <= before for before, after in zip(b"\0" + cuts, cuts, strict=False)):
        raise DamagedError(f"chunk: cuts {list(cuts)} do not ascend: fetch it again")
    classes = [_read_entry(reader, num_elements=num_elements, width=width) for _ in range(num_classes)]
    found = sum(c.num_changed for c in classes)
    if found != num_changed or found + sum(c.num_unchanged or 0 for c in classes) > num_elements:
        raise DamagedError(
            f"chunk: {found} changes in the classes, its header states {num_changed} of {num_elements} elements: "
            "fetch it again"
        )
    wide = [c for c in classes if c.wide]
    gain = reader.take(1)[0] if flags else None
    if any(c.num_predicted for c in wide) != bool(flags) or gain == 0:
        raise DamagedError(f"chunk: flags {flags:#x} and gain {gain} do not fit its predicted classes: fetch it again")
    unary_bytes = reader.varint()
    token_bytes, raw_bytes = (STATES_BYTES + 2 * reader.varint(), reader.varint()) if wide else (0, 0)
    num_gaps = sum(c.num_gaps for c in classes)
    num_remainders = sum(c.num_gaps * c.parameter for c in classes)
    # What no writer exceeds: a parameter above 0 pays only if it saves its remainders, and all gaps lie within the space.
    if num_remainders > num_elements or unary_bytes > num_bytes(num_gaps + num_elements):
        raise DamagedError(
            f"chunk: {num_remainders} bits of remainders, {unary_bytes} bytes of unary numbers for {num_gaps} gaps among "
            f"{num_elements} elements: fetch it again"
        )
    remainders = unpack_bits(reader.take(num_bytes(num_remainders)), num_remainders)
    quotients = read_unary(reader.take(unary_bytes), num_gaps)
    num_signs = num_changed - sum(c.num_changed for c in wide)
    signs = unpack_bits(reader.take(num_bytes(num_signs)), num_signs)
    _place_gaps(classes, remainders, quotients)
    token_stream, raw_stream = reader.take(token_bytes), reader.take(raw_bytes)
    if wide:
        _place_wide_steps(wide, token_stream, raw_stream, width)
    at = 0
    for changes in classes:
        if not changes.wide:
            changes.steps = _unit_steps(signs[at : at + changes.num_changed], changes.num_exceptions, reader, width)
            at += changes.num_changed
    reader.finish()
    return ParsedBody(cuts=cuts, classes=classes, gain=gain)


def rebuild(parsed: ParsedBody, old: Bits, last: LastBits | None = None) -> tuple[Indices, Bits]:
    """Return the changed positions of the base `old`, ascending, and their new bits.

    Raises:
        WrongBaseError: the classes of `old`, or the changes that it shares with `last`, are not those that the body
            speaks of.
        LastChangeMissingError: the body has predictions and `last` is None.
    """
    if parsed.gain is not None and last is None:
        raise LastChangeMissingError(MISSING_LAST_CHANGE)
    classes = ExponentClasses(old, parsed.cuts)
    positions, steps = [], []
    for number, changes in enumerate(parsed.classes):
        if not changes.num_changed:
            continue
        members = classes.members(number)
        ranks = changes.ranks
        if changes.num_unchanged is not None:
            wrong = changes.num_changed + changes.num_unchanged != members.size
        else:
            wrong = changes.num_changed > members.size
        if wrong or (len(ranks) and ranks[-1] >= members.size):
            raise WrongBaseError(
                f"chunk: class {number} of the base has {members.size} elements, changes lie beyond: it was made from "
                "other weights than those held here; catch up from an anchor"
            )
        if changes.num_unchanged is not None:
            ranks = complement(ranks, members.size)
        places = members.positions(ranks)
        positions.append(places)
        steps.append(_all_steps(changes, old, places, parsed.gain, last) if changes.num_predicted else changes.steps)
    if not positions:
        return np.empty(0, np.int64), np.empty(0, old.dtype)
    unordered = np.concatenate(positions)
    order = np.argsort(unordered)
    ascending = unordered[order]
    return ascending, old[ascending] + np.concatenate(steps)[order]


def _all_steps(changes: ClassChanges, old: Bits, places: Indices, gain: int | None, last: LastBits | None) -> Bits:
    """Return the steps from the base of a class that has predicted ones."""
    assert gain is not None
    assert last is not None
    again, found = find_common(places, last[0])
    if len(again) != changes.num_predicted:
        raise WrongBaseError(
            f"chunk: {len(again)} of its changes are in the change before, it states {changes.num_predicted}: it was "
            "made from another change than that held here; catch up by another path"
        )
    held = old[places[again]]
    moved = predict(held, last[1][found], gain) + changes.predicted_steps - held
    if not moved.all():
        raise WrongBaseError("chunk: a predicted change ends where it began: it was made from another change before")
    steps = np.empty_like(old, shape=len(places))
    plain = np.ones(len(places), np.bool_)
    plain[again] = False
    steps[plain], steps[again] = changes.steps, moved
    return steps


def _read_entry(reader: Reader, *, num_elements: int, width: int) -> ClassChanges:
    num_changed = reader.varint()
    if not num_changed:
        return ClassChanges(num_changed=0)
    flags = reader.take(1)[0]
    parameter, inverse, wide = flags & _PARAMETER, bool(flags & _INVERSE), bool(flags & _WIDE)
    num_unchanged = reader.varint() if inverse else None
    num_exceptions = reader.varint() if flags & _EXCEPTIONS and not wide else 0
    num_predicted = reader.varint() if flags & _PREDICTED and wide else 0
    if num_changed + (num_unchanged or 0) > num_elements or parameter > MAX_PARAMETER:
        raise DamagedError(
            f"chunk: a class of {num_changed} changed and {num_unchanged} unchanged elements, Rice parameter "
            f"{parameter}, exceeds the limits: fetch it again"
        )
    most = num_changed if wide else min(num_changed, _max_exceptions(num_changed))
    if flags & _EXCEPTIONS and not 1 <= num_exceptions + num_predicted <= most:
        raise DamagedError(
            f"chunk: {num_exceptions} exceptions, {num_predicted} predicted in {num_changed} changes: fetch it again"
        )
    return ClassChanges(
        num_changed=num_changed,
        parameter=parameter,
        num_unchanged=num_unchanged,
        num_exceptions=num_exceptions,
        wide=wide,
        num_predicted=num_predicted,
        frequencies=read_table(reader, num_tokens(width)) if wide and num_predicted < num_changed else None,
        predicted_frequencies=_read_predicted_table(reader, width) if num_predicted else None,
    )


def _read_predicted_table(reader: Reader, width: int) -> Frequencies:
    frequencies = read_table(reader, num_predicted_tokens(width))
    if len(frequencies) > 1 and frequencies[1]:
        raise DamagedError("chunk: a table of steps from predictions has token 1: fetch it again")
    return frequencies


def _max_exceptions(num_changed: int) -> int:
    """Return how many steps other than +1 and -1 a class may have that is not wide: beyond, tokens are smaller."""
    return max(2, num_changed // 256)


def _place_gaps(classes: Sequence[ClassChanges], remainders: np.ndarray, quotients: np.ndarray) -> None:
    bit = at = 0
    for changes in classes:
        count, width = changes.num_gaps, changes.parameter
        low = read_equal_fields(remainders[bit : bit + count * width], width, count)
        gaps = (quotients[at : at + count] << width) | low.astype(np.int64)
        changes.ranks = ranks_of(gaps)
        bit += count * width
        at += count


def _place_wide_steps(
    wide: Sequence[ClassChanges], token_stream: memoryview, raw_stream: memoryview, width: int
) -> None:
    parts = [part for changes in wide for part in changes.parts]
    tokens = read_tokens(token_stream, [(count, frequencies) for count, frequencies, _ in parts])
    kinds = [predicted for _, _, predicted in parts]
    widths = [
        (num_predicted_raw_bits if predicted else num_raw_bits)(part, width)
        for part, predicted in zip(tokens, kinds, strict=True)
    ]
    bits = unpack_bits(raw_stream, int(sum(part.sum() for part in widths)))
    raw = read_fields(bits, np.concatenate(widths))
    at = 0
    steps = []
    for part, predicted in zip(tokens, kinds, strict=True):
        steps.append((join_predicted_steps if predicted else join_steps)(part, raw[at : at + len(part)], width))
        at += len(part)
    found = iter(steps)
    for changes in wide:
        for _, _, predicted in changes.parts:
            if predicted:
                changes.predicted_steps = next(found)
            else:
                changes.steps = next(found)


def _unit_steps(signs: np.ndarray, num_exceptions: int, reader: Reader, width: int) -> Bits:
    top = (1 << 8 * width) - 1
    steps: Bits = np.where(signs, top, 1).astype(f"<u{width}")
    at = -1
    for _ in range(num_exceptions):
        at += reader.varint() + 1
        step = int.from_bytes(reader.take(width), "little")
        if at >= len(steps) or signs[at] or step in (0, 1, top):
            raise DamagedError(f"chunk: exception {step} at change {at} of {len(steps)}: fetch it again")
        steps[at] = step
    return steps


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
