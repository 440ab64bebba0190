"""Static rANS over tokens (Duda 2013; interleaved after Giesen 2014): near the entropy, with a check for free.

Pure. Token number i of a sequence belongs to state i mod 8, and the eight advance together here. Several tables may
alternate within a sequence. A reader ends where the writer began, with every state at 2^16 and every word used, or
the stream is refused. Frequencies are out of 4,096 and travel as codes of 5 bits with two steps per octave.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.bitfields import equal_fields, num_bytes, pack_bits, read_equal_fields, unpack_bits
from sparsewire.sync.codec.steps import Tokens
from sparsewire.sync.codec.streams import Reader, write_varint
from sparsewire.sync.errors import DamagedError

NUM_STATES = 8
STATES_BYTES = 4 * NUM_STATES
START = 1 << 16
FREQUENCY_BITS = 12
_TOTAL = 1 << FREQUENCY_BITS
_CODE_BITS = 5
_WEIGHTS = np.array([0] + [(2 + ((q - 1) & 1)) << ((q - 1) >> 1) for q in range(1, 1 << _CODE_BITS)], np.int64)

Frequencies = npt.NDArray[np.int64]
"""How often of 4,096 each token occurs, 0 for those that do not."""


def write_table(out: bytearray, tokens: Tokens) -> Frequencies:
    """Append the table that fits `tokens`, of which there is at least one, and return its frequencies."""
    counts = np.bincount(tokens)
    present = counts > 0
    shares = (counts[present] << 16) // len(tokens)
    codes = 1 + np.searchsorted(_WEIGHTS[1:-1] * _WEIGHTS[2:], shares * shares, side="right")
    write_varint(out, len(counts) - 1)
    out += pack_bits(np.concatenate((present.astype(np.uint8), equal_fields(codes.astype(np.uint64), _CODE_BITS))))
    return _frequencies(present, codes)


def read_table(reader: Reader, num_tokens: int) -> Frequencies:
    """Read a table of tokens below `num_tokens`.

    Raises:
        DamagedError: a token beyond that, or a form that `write_table` does not give.
    """
    highest = reader.varint()
    if highest >= num_tokens:
        raise DamagedError(f"chunk: a table of tokens up to {highest}, there are {num_tokens}: fetch it again")
    # The presence bits tell how many codes follow, so their bytes are looked at before they are taken.
    start = np.unpackbits(np.frombuffer(reader.peek(num_bytes(highest + 1)), np.uint8), bitorder="little")
    present = start[: highest + 1].view(np.bool_)
    num_present = int(present.sum())
    num_bits = highest + 1 + _CODE_BITS * num_present
    bits = unpack_bits(reader.take(num_bytes(num_bits)), num_bits)
    codes = read_equal_fields(bits[highest + 1 :], _CODE_BITS, num_present).astype(np.int64)
    if not present[highest] or not codes.all():
        raise DamagedError("chunk: a token table ends in an absent token or has a code of 0: fetch it again")
    return _frequencies(present, codes)


def _frequencies(present: npt.NDArray[np.bool_], codes: npt.NDArray[np.int64]) -> Frequencies:
    weights = _WEIGHTS[codes]
    chosen = 1 + weights * (_TOTAL - len(codes)) // weights.sum()
    chosen[np.argmax(weights)] += _TOTAL - chosen.sum()
    frequencies = np.zeros(len(present), np.int64)
    frequencies[present] = chosen
    return frequencies


def write_tokens(parts: Sequence[tuple[Tokens, Frequencies]]) -> bytes:
    """Return states and words of the parts' tokens, one after the other, each with its own table."""
    # Filled up with a token of frequency 4,096, which leaves a state as it is.
    frequency = _in_rows(np.concatenate([frequencies[tokens] for tokens, frequencies in parts]), _TOTAL)
    below = _in_rows(np.concatenate([(np.cumsum(f) - f)[tokens] for tokens, f in parts]), 0)
    states = np.full(NUM_STATES, START, np.uint64)
    words = []
    limits = frequency << np.uint64(32 - FREQUENCY_BITS)
    for row in range(len(frequency) - 1, -1, -1):
        full = states >= limits[row]
        if full.any():
            words.append(states[full][::-1].astype("<u2"))
            states = np.where(full, states >> np.uint64(16), states)
        quotients = states // frequency[row]
        states = (quotients << np.uint64(FREQUENCY_BITS)) + (states - quotients * frequency[row]) + below[row]
    stream = np.concatenate(words)[::-1] if words else np.empty(0, "<u2")
    return states.astype("<u4").tobytes() + stream.tobytes()


def read_tokens(data: memoryview, parts: Sequence[tuple[int, Frequencies]]) -> list[Tokens]:
    """Return the tokens of each part, given as (number of tokens, table).

    Raises:
        DamagedError: `data` does not end exactly where the writer began.
    """
    states = np.frombuffer(data[:STATES_BYTES], "<u4").astype(np.uint64)
    words = np.frombuffer(data[STATES_BYTES:], "<u2").astype(np.uint64)
    if (states < START).any():
        raise DamagedError("chunk: a token stream starts below its lowest state: fetch it again")
    symbols = np.array([np.repeat(np.arange(len(f)), f) for _, f in parts]).reshape(-1)
    frequency = np.array([np.repeat(f, f) for _, f in parts]).reshape(-1)
    # Slot minus the start of its token: what a state keeps of its low bits.
    offset = np.array([np.arange(_TOTAL) - np.repeat(np.cumsum(f) - f, f) for _, f in parts]).reshape(-1)
    frequency, offset = frequency.astype(np.uint64), offset.astype(np.uint64)
    counts = [count for count, _ in parts]
    total = sum(counts)
    num_rows = -(-total // NUM_STATES)
    tables = np.zeros(num_rows * NUM_STATES, np.int64)
    tables[:total] = np.repeat(np.arange(len(parts)) << FREQUENCY_BITS, counts)
    rows = tables.reshape(num_rows, NUM_STATES)
    slots = np.empty((num_rows, NUM_STATES), np.int64)
    low, shift, sixteen, start = np.uint64(_TOTAL - 1), np.uint64(FREQUENCY_BITS), np.uint64(16), np.uint64(START)
    used = 0
    for row in range(num_rows):
        count = min(NUM_STATES, total - row * NUM_STATES)
        active = states[:count]
        at = rows[row, :count] + (active & low).astype(np.int64)
        slots[row, :count] = at
        active = frequency[at] * (active >> shift) + offset[at]
        hungry = np.flatnonzero(active < start)
        if len(hungry):
            if used + len(hungry) > len(words):
                raise DamagedError("chunk: a token stream ends too early: fetch it again")
            active[hungry] = (active[hungry] << sixteen) | words[used : used + len(hungry)]
            used += len(hungry)
        states[:count] = active
    if used != len(words) or (states != start).any():
        raise DamagedError("chunk: a token stream does not end as it began: fetch it again")
    tokens = symbols[slots.reshape(-1)[:total]]
    return np.split(tokens, np.cumsum(counts)[:-1])


def _in_rows(values: npt.NDArray[np.int64], filler: int) -> npt.NDArray[np.uint64]:
    rows = np.full((-(-len(values) // NUM_STATES), NUM_STATES), filler, np.uint64)
    rows.reshape(-1)[: len(values)] = values
    return rows
