"""Which item of the task a group works on: a fixed function of the run's seed and the group's number.

Pure. Each pass over the task visits every item once, in an order of its own, without a table: a four-round Feistel
network permutes the numbers below the next power of four, walked until the result is an item. Used by the ledger.
"""

from __future__ import annotations

import hashlib

MAX_ITEMS = 1 << 62
_NUM_ROUNDS = 4


def item_of(*, seed: int, group: int, num_items: int) -> int:
    """Return the item in [0, num_items) of `group`; groups n*num_items up to (n+1)*num_items meet each item once."""
    if not 1 <= num_items <= MAX_ITEMS or group < 0:
        raise ValueError(f"group {group} of {num_items} items: want a group from 0 on and 1..{MAX_ITEMS} items")
    epoch, place = divmod(group, num_items)
    half_bits = ((num_items - 1).bit_length() + 1) // 2
    while True:
        place = _permute(place, half_bits=half_bits, key=b"%d/%d" % (seed, epoch))
        if place < num_items:
            return place


def _permute(place: int, *, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = place >> half_bits, place & mask
    for round_number in range(_NUM_ROUNDS):
        mixed = hashlib.blake2b(b"%d/%d" % (round_number, right), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
    return (left << half_bits) | right
