"""Write the seeds of the fuzz corpus: small sound bodies of every width and form, and changes to encode.

Run from the repository root after a change of the format: `python tests/fuzz/make_corpus.py`. Inputs that a fuzzer found
interesting are kept beside them, under names that this does not touch.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from sparsewire.sync.codec.classed import encode_classed

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


if __name__ == "__main__":
    main()
