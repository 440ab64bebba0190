"""Write the seeds of the fuzz corpus: small sound bodies of every width and form, and changes to encode.

Run from the repository root after a change of the format: `python tests/fuzz/make_corpus.py`. Inputs that a fuzzer found
interesting are kept beside them, under names that this does not touch.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from sparsewire.sync.codec.classed import encode_classed, is_predicted

CORPUS = Path(__file__).with_name("corpus")


def main() -> None:
    """Write one file for each width, density and kind of step."""
    draws = np.random.default_rng(3)
    for power in range(4):
        width = 1 << power
        bits = np.dtype(f"<u{width}")
        for density in (0.02, 0.3, 0.97):
            for kind in ("unit", "exceptions", "wide"):
                count = 600 // width
                floats = (draws.standard_normal(count) * 0.02).astype(
                    {4: np.float32, 8: np.float64}.get(width, np.float32)
                )
                old = draws.integers(0, 256, count).astype(bits)
                if width in (4, 8):
                    old = floats.view(bits)
                elif width == 2:
                    old = (floats.view(np.uint32) >> np.uint32(16)).astype(bits)
                changed = np.flatnonzero(draws.random(count) < density)
                steps = draws.choice([1, -1], len(changed)).astype(np.int64)
                odd = draws.random(len(changed)) < {"unit": 0.0, "exceptions": 0.01, "wide": 0.5}[kind]
                steps[odd] = np.int64(3) << draws.integers(0, 8 * width - 3, odd.sum())
                new = old.copy()
                new[changed] += steps.astype(bits)
                changed = np.flatnonzero(new != old)
                keys = [40, 80] if width == 1 else [110, 116, 120, 121, 122]
                cuts = bytes(keys if draws.random() < 0.7 else [])
                body = encode_classed(old, changed, new[changed] - old[changed], cuts)
                name = f"{width}-{density}-{kind}"
                head = struct.pack("<BHHB", power | int(draws.integers(4)) << 2, count, len(changed), 0)
                (CORPUS / f"decode-{name}").write_bytes(head + old.tobytes() + body)
                head = struct.pack("<BHHB", power | int(draws.integers(4)) << 2 | 1 << 4, count, 0, len(cuts))
                (CORPUS / f"encode-{name}").write_bytes(head + cuts + old.tobytes() + new.tobytes())
    for number, density in enumerate((0.05, 0.3, 0.6, 0.97)):
        write_predicted(draws, f"2-{density}-predicted", density, cuts=bytes([115, 117, 119, 121][: 4 - number]))


def write_predicted(draws: np.random.Generator, name: str, density: float, cuts: bytes) -> None:
    """Write a body with predictions and what it was made from."""
    first = draws.standard_normal(400) * 0.002
    step = draws.standard_normal(400) * 3e-5 * (draws.random(400) < density**0.5)
    parts = first, first + step, first + 1.9 * step + 1e-6 * draws.standard_normal(400) * (step != 0)
    before, old, new = ((p.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16) for p in parts)
    at, last_at = np.flatnonzero(old != new), np.flatnonzero(before != old)
    body = encode_classed(old, at, new[at] - old[at], cuts, (last_at, before[last_at]))
    assert is_predicted(body), name
    entries = np.stack((np.diff(last_at, prepend=-1) - 1, before[last_at]), axis=1).astype("<u2")
    last = struct.pack("<H", len(last_at)) + entries.tobytes()
    options = 1 | int(draws.integers(4)) << 2 | 1 << 5
    head = struct.pack("<BHHB", options, 400, len(at), 0)
    (CORPUS / f"decode-{name}").write_bytes(head + old.tobytes() + last + body)
    head = struct.pack("<BHHB", options | 1 << 4, 400, 0, len(cuts))
    (CORPUS / f"encode-{name}").write_bytes(head + cuts + old.tobytes() + new.tobytes() + last)


if __name__ == "__main__":
    main()
