"""Inputs of the benchmarks: recorded RL traces, and synthetic steps of chosen density."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import zstandard

Words = npt.NDArray[np.uint16]

SYNTHETIC_SCALES = {"0.22 %": 4.26e-8, "0.85 %": 1.987e-7, "2.8 %": 8.11e-7}
"""Standard deviation of the step that gives about this density on weights ~ N(0, 0.02)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Two consecutive versions of some bf16 tensors, as bits, and the one before them where it is known."""

    name: str
    old: dict[str, Words]
    new: dict[str, Words]
    before: dict[str, Words] | None = None

    @property
    def num_elements(self) -> int:
        return sum(array.size for array in self.old.values())

    @property
    def num_changed(self) -> int:
        return sum(int(np.count_nonzero(self.old[name] != self.new[name])) for name in self.old)


def synthetic(label: str, num_elements: int, seed: int = 0) -> Delta:
    """Return fp32 master weights ~ N(0, 0.02) before and after one step of N(0, s), both rounded to bf16."""
    random = np.random.default_rng(seed)
    master = random.normal(0, 0.02, num_elements).astype(np.float32)
    step = random.normal(0, SYNTHETIC_SCALES[label], num_elements).astype(np.float32)
    old = master.astype(ml_dtypes.bfloat16).view(np.uint16)
    new = (master + step).astype(ml_dtypes.bfloat16).view(np.uint16)
    return Delta(name=f"synthetic {label}", old={"w": old}, new={"w": new})


def overwrite_words(amplitude: float, num_elements: int, seed: int = 0) -> tuple[Words, Words]:
    """Return the changed words before and after normal noise of an amplitude on standard normal bf16 weights.

    The input of Table 2 in the NeMo-DCR paper, which has 20 million elements.
    """
    random = np.random.default_rng(seed)
    weights = random.standard_normal(num_elements, np.float32).astype(ml_dtypes.bfloat16)
    noise = random.standard_normal(num_elements, np.float32) * np.float32(amplitude)
    after = (weights.astype(np.float32) + noise).astype(ml_dtypes.bfloat16)
    old, new = weights.view(np.uint16), after.view(np.uint16)
    changed = old != new
    return old[changed], new[changed]


def trace(directory: Path) -> Iterator[Delta]:
    """Yield the deltas of a recorded trace: `base.safetensors`, then `NNN.xor.zst`, each XORed onto the one before."""
    raw = (directory / "base.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    data = memoryview(raw)[8 + header_bytes :]
    version: dict[str, Words] = {}
    before = None
    for name in sorted(header):
        begin, end = header[name]["data_offsets"]
        version[name] = np.frombuffer(data[begin:end], np.uint16)
    for path in sorted(directory.glob("*.xor.zst")):
        flat = np.frombuffer(zstandard.decompress(path.read_bytes()), np.uint16)
        after, at = {}, 0
        for name, old in version.items():
            after[name] = old ^ flat[at : at + old.size]
            at += old.size
        yield Delta(name=f"{directory.name} {path.name.split('.')[0]}", old=version, new=after, before=before)
        before, version = version, after
