"""Block-fp8 is one function of the bf16 bits: by hand, over shards, over touched blocks, and across the wire."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsewire.sync import Publisher, Shard, Subscriber, block_fp8_view
from sparsewire.sync.block_fp8 import is_block_quantized, quantization_config
from sparsewire.sync.errors import ConfigError, SchemaMismatchError
from sparsewire.sync.quantize import dequantize_blocks, grid_shape, quantize_blocks, requantize_touched

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn
NAME = "model.layers.0.mlp.up_proj.weight"


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def all_gather(self, payload: bytes) -> Sequence[bytes]:
        self._slots[self.rank] = payload
        self._barrier.wait(30)
        gathered = list(self._slots)
        self._barrier.wait(30)
        return gathered


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Run `work` on threads that are each other's ranks; return what each returned or raised."""
    slots, barrier = [b""] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(work, ThreadRanks(rank, slots, barrier)) for rank in range(size)]
        return [future.exception(60) or future.result() for future in futures]


def random_weight(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[Any]:
    """Return bf16 weights whose blocks differ in size by many powers of two, some of them zero."""
    spread = np.exp2(random.integers(-30, 30, grid_shape(rows, columns)).astype(np.float32))
    spread[random.random(spread.shape) < 0.1] = 0
    wide = np.repeat(np.repeat(spread, 128, 0), 128, 1)[:rows, :columns]
    weight: npt.NDArray[Any] = (random.normal(0, 1, (rows, columns)).astype(np.float32) * wide).astype(BF16)
    return weight


def by_definition(weight: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Return what the definition says, block by block, with the casts of ml_dtypes."""
    rows, columns = weight.shape
    coded, scales = np.empty(weight.shape, FP8), np.empty(grid_shape(rows, columns), np.float32)
    for band in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(band * 128, band * 128 + 128), slice(column * 128, column * 128 + 128)
            block = weight[place].astype(np.float32)
            scales[band, column] = max(np.abs(block).max() / np.float32(448), np.float32(2.0**-116))
            coded[place] = np.clip(block / scales[band, column], -448, 448).astype(FP8)
    return coded, scales


def assert_equal_bits(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (256, 384), (300, 70), (5, 1000)])
def test_bits_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    weight = random_weight(np.random.default_rng(sum(shape)), *shape)
    coded, scales = quantize_blocks(weight)
    expected, expected_scales = by_definition(weight)
    assert_equal_bits(scales, expected_scales)
    assert_equal_bits(coded, expected)


def test_every_finite_bf16_pattern_is_coded_as_the_definition_says() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    patterns = patterns[patterns & 0x7FFF < 0x7F80]
    # In order of magnitude, so that a block holds like numbers: subnormals, tiny ones below the floor, huge ones.
    by_size = patterns[np.argsort(patterns & 0x7FFF, kind="stable")].view(BF16)
    for weight in (by_size.reshape(-1, 128), by_size.reshape(128, -1), patterns.view(BF16).reshape(-1, 510)):
        coded, scales = quantize_blocks(weight)
        expected, expected_scales = by_definition(weight)
        assert_equal_bits(scales, expected_scales)
        assert_equal_bits(coded, expected)


def test_zeros_keep_their_sign_and_a_block_of_zeros_has_the_smallest_scale() -> None:
    weight = np.zeros((2, 130), BF16)
    weight[1] = -0.0
    weight[0, 128] = 3.0
    coded, scales = quantize_blocks(weight)
    assert scales.tolist() == [[2.0**-116, np.float32(3) / np.float32(448)]]
    assert coded.view(np.uint8)[0].tolist() == [0] * 128 + [0x7E, 0]
    assert set(coded.view(np.uint8)[1]) == {0x80}
    assert not dequantize_blocks(coded, scales)[0, :128].any()


def test_weights_come_back_within_half_a_step_of_e4m3() -> None:
    weight = random_weight(np.random.default_rng(0), 256, 256)
    coded, scales = quantize_blocks(weight)
    back, true = dequantize_blocks(coded, scales), weight.astype(np.float32)
    bound = np.maximum(np.abs(true) / 16, np.repeat(np.repeat(scales, 128, 0), 128, 1) * 2.0**-10)
    assert (np.abs(back - true) <= bound * 1.00001).all()


def test_a_layout_other_than_contiguous_gives_the_same_bits() -> None:
    weight = random_weight(np.random.default_rng(1), 200, 300)
    for ours, theirs in zip(quantize_blocks(np.asfortranarray(weight)), quantize_blocks(weight), strict=True):
        assert_equal_bits(ours, theirs)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_not_finite_is_refused_by_tensor_and_block(bad: float) -> None:
    weight = np.ones((300, 300), BF16)
    coded, scales = quantize_blocks(weight)
    weight[140, 299] = bad
    with pytest.raises(ConfigError, match=r"tensor w.*block \(1, 2\)"):
        quantize_blocks(weight, name="w")
    before = coded.copy(), scales.copy()
    with pytest.raises(ConfigError, match=r"tensor w.*block \(1, 2\)"):
        requantize_touched(weight, np.array([140 * 300 + 299]), coded, scales, name="w")
    assert_equal_bits(coded, before[0])
    assert_equal_bits(scales, before[1])


def test_other_dtypes_and_grids_are_refused() -> None:
    weight = np.ones((4, 4), np.float32)
    with pytest.raises(SchemaMismatchError, match=r"tensor w is float32\[4, 4\].*modules_to_not_convert"):
        quantize_blocks(weight, name="w")
    coded, scales = quantize_blocks(weight.astype(BF16))
    with pytest.raises(SchemaMismatchError, match=r"needs float32 scales of shape \[1, 1\]"):
        dequantize_blocks(coded, scales.reshape(1))
    with pytest.raises(SchemaMismatchError, match=r"positions 3\.\.16 are outside"):
        requantize_touched(weight.astype(BF16), np.array([3, 16]), coded, scales)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    density=st.sampled_from([0.0, 1e-4, 0.01, 0.5, 1.0]),
    kind=st.sampled_from(["steps", "new", "shrink"]),
)
def test_requantised_blocks_have_the_bits_of_a_full_quantisation(
    seed: int, rows: int, columns: int, density: float, kind: str
) -> None:
    random = np.random.default_rng(seed)
    weight = random_weight(random, rows, columns)
    coded, scales = quantize_blocks(weight)
    old = coded.copy(), scales.copy()
    flat = weight.reshape(-1)
    positions = np.flatnonzero(random.random(flat.size) < density)
    match kind:
        case "steps":
            patterns = flat.view(np.uint16)
            patterns[positions] += np.where(
                patterns[positions] & 0x7FFF > 0, random.integers(-1, 2, len(positions)), 0
            ).astype(np.uint16)
        case "new":
            flat[positions] = random_weight(random, rows, columns).reshape(-1)[positions]
        case _:
            # The largest of each block goes, so scales fall.
            positions = np.union1d(positions, np.flatnonzero(np.abs(flat) >= np.abs(flat).max()))
            flat[positions] = 0
    change = requantize_touched(weight, positions, coded, scales)
    expected = quantize_blocks(weight)
    assert_equal_bits(coded, expected[0])
    assert_equal_bits(scales, expected[1])
    for before, after, at, bits in (
        (old[0].view(np.uint8), coded.view(np.uint8), change.positions, change.bits),
        (old[1].view(np.uint32), scales.view(np.uint32), change.scale_positions, change.scale_bits),
    ):
        np.testing.assert_array_equal(at, np.flatnonzero(before.reshape(-1) != after.reshape(-1)))
        np.testing.assert_array_equal(bits, after.reshape(-1)[at])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    rows=st.integers(1, 400),
    columns=st.integers(1, 200),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_shards_tile_the_bits_of_the_whole(seed: int, rows: int, columns: int, cuts: list[float]) -> None:
    weight = random_weight(np.random.default_rng(seed), rows, columns)
    whole = block_fp8_view({NAME: weight})
    borders = [0, *sorted(int(cut * rows) for cut in cuts), rows]

    def work(ranks: ThreadRanks) -> dict[str, Shard]:
        start, stop = borders[ranks.rank], borders[ranks.rank + 1]
        shard = Shard(weight[start:stop], start * columns, weight.shape)
        return block_fp8_view({NAME: shard}, ranks=ranks)

    parts = on_ranks(len(borders) - 1, work)
    for name, expected in whole.items():
        at = 0
        for part in parts:
            assert part[name].shape == expected.shape
            assert part[name].start == at
            at += part[name].array.size
        joined = np.concatenate([part[name].array.reshape(-1) for part in parts])
        assert_equal_bits(joined.reshape(expected.shape), expected)


def test_all_ranks_refuse_what_one_cannot_quantise() -> None:
    weight = np.ones((256, 4), BF16)
    weight[200] = np.inf

    def work(ranks: ThreadRanks) -> object:
        rows = slice(100 * ranks.rank, 100 * ranks.rank + 100 + 56 * ranks.rank)
        return block_fp8_view({NAME: Shard(weight[rows], rows.start * 4, weight.shape)}, ranks=ranks)

    raised = on_ranks(2, work)
    assert all(isinstance(error, ConfigError) and NAME in str(error) for error in raised), raised

    def break_a_row(ranks: ThreadRanks) -> object:
        start = 512 * ranks.rank
        part = np.ones(512 - ranks.rank, BF16)
        return block_fp8_view({NAME: Shard(part, start, weight.shape)}, ranks=ranks)

    raised = on_ranks(2, break_a_row)
    assert all(isinstance(error, SchemaMismatchError) and "whole rows" in str(error) for error in raised), raised


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.11.mlp.gate_proj.weight", (64, 64), True),
        ("model.layers.3.mlp.experts.17.down_proj.weight", (64, 64), True),
        ("language_model.model.layers.3.mlp.up_proj.weight", (64, 64), True),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (64, 64), True),
        ("layers.3.mlp.up_proj.weight", (64, 64), True),
        ("model.layers.3.mlp.gate.weight", (8, 64), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 64), False),
        ("model.layers.3.block_sparse_moe.gate.weight", (8, 64), False),
        ("model.layers.61.embed_tokens.weight", (300, 64), False),
        ("model.layers.61.eh_proj.weight", (64, 128), False),
        ("model.layers.61.shared_head.head.weight", (300, 64), False),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 1, 4), False),
        ("model.layers.3.mlp.experts.gate_up_proj", (8, 128, 64), False),
        ("model.embed_tokens.weight", (300, 64), False),
        ("lm_head.weight", (300, 64), False),
        ("model.norm.weight", (64,), False),
    ],
)
def test_linear_weights_of_decoder_layers_are_quantised_and_nothing_else(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_block_quantized(name, shape) is expected


def test_modules_are_left_out_by_name_or_by_whole_parts_of_it() -> None:
    shapes = {
        f"model.layers.{layer}.mlp.{part}.weight": (4, 4) for layer in (0, 1) for part in ("up_proj", "gate_proj")
    }
    shapes["model.embed_tokens.weight"] = (9, 4)

    def kept(*patterns: str) -> list[str]:
        return [name for name in shapes if not is_block_quantized(name, shapes[name], modules_to_not_convert=patterns)]

    assert kept("gate") == ["model.embed_tokens.weight"]
    assert kept("model.layers.1.mlp.up_proj") == ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
    assert kept("layers.0") == [*(name for name in shapes if "layers.0" in name), "model.embed_tokens.weight"]
    assert quantization_config(shapes, modules_to_not_convert=("layers.0.mlp.up_proj",)) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", "model.layers.0.mlp.up_proj"],
    }


def test_the_view_holds_fp8_scales_and_the_rest_untouched() -> None:
    weight, norm = np.ones((130, 4), BF16), np.ones(4, BF16)
    view = block_fp8_view({NAME: weight, "model.norm.weight": norm})
    assert {name: (array.dtype, array.shape) for name, array in view.items()} == {
        NAME: (FP8, (130, 4)),
        f"{NAME}_scale_inv": (np.float32, (2, 1)),
        "model.norm.weight": (BF16, (4,)),
    }
    assert view["model.norm.weight"] is norm
    with pytest.raises(SchemaMismatchError, match=r"_scale_inv already"):
        block_fp8_view({NAME: weight, f"{NAME}_scale_inv": norm})
    with pytest.raises(SchemaMismatchError, match=f"tensor {NAME} is float32"):
        block_fp8_view({NAME: weight.astype(np.float32)})


def test_published_fp8_views_arrive_bit_for_bit(memory_url: str, assert_same_bits: Callable[..., None]) -> None:
    random = np.random.default_rng(7)
    weights = {
        f"model.layers.{layer}.mlp.{part}.weight": (random.normal(0, 0.02, (300, 200))).astype(BF16)
        for layer in range(2)
        for part in ("up_proj", "gate_proj")
    }
    weights["model.embed_tokens.weight"] = random.normal(0, 0.02, (300, 40)).astype(BF16)
    with (
        Publisher.open(memory_url, run="r1") as publisher,
        Subscriber.open(memory_url, run="r1") as subscriber,
    ):
        for version in range(4):
            view = block_fp8_view(weights)
            manifest = publisher.publish(view)
            assert subscriber.sync() == version
            assert_same_bits(subscriber.tensors(), view)
            if version:
                assert 0 < manifest.num_changed < manifest.num_elements / 50
            for array in weights.values():
                bits = array.reshape(-1).view(np.uint16)
                bits[random.random(bits.size) < 0.02] += 1


def test_a_bf16_checkpoint_seeds_a_block_fp8_run(
    directory_url: str, tmp_path: Path, assert_same_bits: Callable[..., None]
) -> None:
    random = np.random.default_rng(3)
    weights = {
        "model.embed_tokens.weight": random.normal(0, 0.02, (300, 40)).astype(BF16),
        NAME: random_weight(random, 300, 200),
    }
    header, at = {}, 0
    for name, array in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    raw = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in weights.values())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    view = block_fp8_view(weights)
    with Publisher.open(directory_url, run="r1") as publisher:
        publisher.publish(view)
    with Subscriber.open(directory_url, run="r1", seed=tmp_path / "model.safetensors") as subscriber:
        subscriber.sync()
        assert subscriber.seeded_version == 0
        assert_same_bits(subscriber.tensors(), view)
