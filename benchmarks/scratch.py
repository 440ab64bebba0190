"""Train a small language model from nothing and record its bf16 weights: a trace of another kind than the shared one.

    python benchmarks/scratch.py DIR [--versions 6] [--warm-up 40] [--learning-rate 1e-3] [--fine-learning-rate 1e-6]

A decoder of 11 million parameters learns bytes of Python's standard library with AdamW in float32. DIR/pretrain then has the
next versions at the same rate, when most of the weights change in every step; DIR/tune those at the fine rate, as
RL has it. Takes a minute or two on two cores. The format is that of `--record-trace`, in docs/format.md. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import struct
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import nn

WIDTH, NUM_LAYERS, NUM_HEADS, LENGTH, BATCH = 384, 6, 6, 192, 6
WARM_UP_TAIL = 8
"""Steps at the fine rate before recording, so that Adam's moments are those of that rate."""


class Decoder(nn.Module):
    """A plain decoder over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, 256] of the byte after each."""
        length = tokens_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.embed(tokens_BT) + self.place(torch.arange(length))
        logits: torch.Tensor = self.head(self.layers(states, mask=mask, is_causal=True))
        return logits


def corpus() -> npt.NDArray[np.uint8]:
    """Return the bytes of the standard library's modules, in name order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), np.uint8)


def words(model: nn.Module) -> dict[str, npt.NDArray[np.uint16]]:
    """Return the weights as bf16 bits."""
    return {
        name: value.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
        for name, value in sorted(model.named_parameters())
    }


class Recorder:
    """Writes versions to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[str, npt.NDArray[np.uint16]] = {}
        self._number = 0

    def record(self, version: dict[str, npt.NDArray[np.uint16]]) -> None:
        """Write the first version whole, later ones as what differs."""
        if not self._last:
            self._folder.mkdir(parents=True, exist_ok=True)
            header, at = {}, 0
            for name, bits in version.items():
                header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
                at += bits.nbytes
            head = json.dumps(header).encode()
            whole = [struct.pack("<Q", len(head)), head, *(bits.tobytes() for bits in version.values())]
            (self._folder / "base.safetensors").write_bytes(b"".join(whole))
        else:
            self._number += 1
            flips = b"".join((bits ^ self._last[name]).tobytes() for name, bits in version.items())
            changed = sum(int(np.count_nonzero(bits != self._last[name])) for name, bits in version.items())
            (self._folder / f"{self._number:03d}.xor.zst").write_bytes(zstandard.ZstdCompressor().compress(flips))
            print(f"{self._folder.name} {self._number}: {changed / sum(b.size for b in version.values()):.3%} changed")
        self._last = version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--fine-learning-rate", type=float, default=1e-6)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    draws = np.random.default_rng(0)
    data = corpus()
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95))

    def step() -> float:
        starts = draws.integers(0, len(data) - LENGTH - 1, BATCH)
        text = torch.from_numpy(np.stack([data[at : at + LENGTH + 1] for at in starts]).astype(np.int64))
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for number in range(arguments.warm_up):
        loss = step()
        if number % 10 == 0:
            print(f"step {number}: loss {loss:.3f}", flush=True)
    for folder, rate, steps_before in (
        ("pretrain", arguments.learning_rate, 0),
        ("tune", arguments.fine_learning_rate, WARM_UP_TAIL),
    ):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(steps_before):
            step()
        recorder = Recorder(arguments.folder / folder)
        recorder.record(words(model))
        for _ in range(arguments.versions):
            step()
            recorder.record(words(model))


if __name__ == "__main__":
    main()
