from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file

from sparsewire.trainer.dither import dither
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.model import canonical_parameters, load_model, local_shard
from sparsewire.trainer.ranks import ProcessGroup


def test_every_bfloat16_keeps_its_bits() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for seed in range(20):
        values = patterns.view(ml_dtypes.bfloat16).astype(np.float32)
        special = ~np.isfinite(values) | (values == 0)
        before = values.copy()
        dither(values, start=0, seed=seed, name="w")
        rounded = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        kept = ~np.isnan(values)
        np.testing.assert_array_equal(rounded[kept], patterns[kept])
        np.testing.assert_array_equal(values[special].view(np.uint32), before[special].view(np.uint32))
        assert (values[~special] != before[~special]).mean() > 0.99


def test_low_bits_do_not_depend_on_how_the_tensor_is_cut() -> None:
    whole = np.ones(1000, np.float32)
    dither(whole, start=0, seed=3, name="w")
    for cuts in ([0, 1000], [0, 1, 1000], [0, 333, 334, 999, 1000]):
        parts = [np.ones(stop - start, np.float32) for start, stop in pairwise(cuts)]
        for part, start in zip(parts, cuts, strict=False):
            dither(part, start=start, seed=3, name="w")
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_low_bits_are_even_over_the_interval_and_differ_by_seed_and_name() -> None:
    values = {}
    for seed, name in ((0, "a"), (1, "a"), (0, "b")):
        values[seed, name] = np.full(100_000, 1.5, np.float32)
        dither(values[seed, name], start=0, seed=seed, name=name)
    drawn = (values[0, "a"] - 1.5) / 2.0**-7
    assert abs(drawn.mean()) < 0.005
    assert abs(drawn.std() - 12**-0.5) < 0.005
    assert np.abs(drawn).max() <= 0.5
    assert (values[0, "a"] == values[1, "a"]).mean() < 0.01
    assert (values[0, "a"] == values[0, "b"]).mean() < 0.01


def test_a_dithered_model_has_the_view_of_the_stored_one(group: ProcessGroup, tiny_model: Path) -> None:
    model = load_model(tiny_model, mesh=group.mesh, device=group.device, dither_seed=0)
    stored = load_file(tiny_model / "model.safetensors")
    for name, shard in local_view(model).items():
        np.testing.assert_array_equal(
            shard.array.view(np.uint16), stored[name].view(torch.int16).numpy().view(np.uint16)
        )
    for parameter in canonical_parameters(model).values():
        local, _ = local_shard(parameter)
        assert ((local.contiguous().view(torch.int32) & 0xFFFF) != 0).float().mean() > 0.9
