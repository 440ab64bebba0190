"""Static rANS over tokens (Duda 2013; interleaved after Giesen 2014): near the entropy, with a check for free.

Pure. Token number i of a sequence belongs to state i mod 8, so that a native reader has eight chains to work on. Several
tables may alternate within a sequence. A reader ends where the writer began, with every state at 2^16 and every word used, or
the stream is refused. Frequencies are out of 4,096 and travel as codes of 5 bits with two steps per octave.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.bitfields import equal_fields, num_bytes, pack_bits, read_equal_fields, unpack_bits
from sparsewire.sync.codec.steps import Tokens, bit_lengths
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


def cost_of_tokens(tokens: Tokens, frequencies: Frequencies) -> int:
    """Return about how many 1/256 bits `tokens` take, by integer arithmetic that is the same everywhere."""
    counts = np.bincount(tokens, minlength=len(frequencies))
    present = frequencies > 0
    return int((counts[present] * (256 * FREQUENCY_BITS - _log2_256(frequencies[present]))).sum())


def _log2_256(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return floor(256 * log2) of numbers of 1..4,096, by squaring."""
    whole = bit_lengths(values.astype(np.uint64)) - 1
    mantissa = values.astype(np.uint64) << (31 - whole).astype(np.uint64)
    found = whole
    for _ in range(8):
        mantissa = mantissa * mantissa >> np.uint64(31)
        bit = mantissa >> np.uint64(32)
        mantissa >>= bit
        found = 2 * found + bit.astype(np.int64)
    return found


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
    frequency = np.concatenate([frequencies[tokens] for tokens, frequencies in parts])[::-1].tolist()
    below = np.concatenate([(np.cumsum(f) - f)[tokens] for tokens, f in parts])[::-1].tolist()
    states = [START] * NUM_STATES
    words = []
    state = (len(frequency) - 1) % NUM_STATES
    # Plain integers: a token depends on the one eight before it, and arrays of eight are slower than this.
    for f, c in zip(frequency, below, strict=True):
        x = states[state]
        if x >= f << 32 - FREQUENCY_BITS:
            words.append(x & 0xFFFF)
            x >>= 16
        states[state] = (x // f << FREQUENCY_BITS) + x % f + c
        state = (state - 1) % NUM_STATES
    return np.array(states, "<u4").tobytes() + np.array(words[::-1], "<u2").tobytes()


def read_tokens(data: memoryview, parts: Sequence[tuple[int, Frequencies]]) -> list[Tokens]:
    """Return the tokens of each part, given as (number of tokens, table).

    Raises:
        DamagedError: `data` does not end exactly where the writer began.
    """
    states = np.frombuffer(data[:STATES_BYTES], "<u4").tolist()
    words = np.frombuffer(data[STATES_BYTES:], "<u2").tolist()
    if min(states) < START:
        raise DamagedError("chunk: a token stream starts below its lowest state: fetch it again")
    found = []
    state = used = 0
    for count, table in parts:
        symbols = np.repeat(np.arange(len(table)), table)
        frequency = table[symbols].tolist()
        # A slot minus the start of its token: what a state keeps of its low bits.
        offset = (np.arange(_TOTAL) - (np.cumsum(table) - table)[symbols]).tolist()
        slots = []
        for _ in range(count):
            x = states[state]
            slot = x & _TOTAL - 1
            slots.append(slot)
            x = frequency[slot] * (x >> FREQUENCY_BITS) + offset[slot]
            if x < START:
                if used == len(words):
                    raise DamagedError("chunk: a token stream ends too early: fetch it again")
                x = x << 16 | words[used]
                used += 1
            states[state] = x
            state = (state + 1) % NUM_STATES
        found.append(symbols[slots])
    if used != len(words) or states != [START] * NUM_STATES:
        raise DamagedError("chunk: a token stream does not end as it began: fetch it again")
    return found
