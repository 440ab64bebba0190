"""The layout map finds where loaders put checkpoint tensors, and writes and digests them there, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sparsewire.rollout.vllm.exchange import digests_to_json, sum_digests
from sparsewire.rollout.vllm.layout import LayoutMap, Permutation, flat_bits
from sparsewire.rollout.vllm.trace import trace, verify
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import digest_bits
from sparsewire.sync.errors import DigestMismatchError, EngineError

Loader = Callable[[torch.nn.Module, str, torch.Tensor], None]


class Model(torch.nn.Module):
    """A parameter that holds one tensor of the checkpoint, in some layout, behind some padding."""

    def __init__(self, shape: tuple[int, ...], loader: Loader, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._loader(self, name, tensor)


def whole(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)


def rows(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data[1:4].copy_(tensor.narrow(0, 3, 3))


def columns(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.narrow(1, 2, 5).copy_(tensor.narrow(1, 5, 5))


def transposed(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor.t())


def expert(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data[2].narrow(0, 6, 6).copy_(tensor)


def padded(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight[:6].data.copy_(tensor)
    model.weight[6:].data.fill_(0)


LAYOUTS: dict[str, tuple[tuple[int, ...], Loader]] = {
    "whole": ((6, 10), whole),
    "rows": ((5, 10), rows),
    "columns": ((6, 8), columns),
    "transposed": ((10, 6), transposed),
    "expert": ((4, 12, 10), expert),
    "padded": ((9, 10), padded),
}


def checkpoint(seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 1 << 16, (6, 10)).astype(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def traced(model: Model, tensor: torch.Tensor) -> LayoutMap:
    before = flat_bits(model.weight).copy()
    layout, _ = trace(model, [("w", tensor)], load=model.load_weights)
    assert np.array_equal(flat_bits(model.weight), before)
    return layout


def held(layout: LayoutMap) -> set[int]:
    """Return the flat checkpoint positions that a map has places for."""
    positions = [source for segment in layout.tensors["w"].segments for source, _ in segment.chunks()]
    return set(np.concatenate(positions).tolist())


def permuted(layout: LayoutMap, model: Model) -> None:
    """Reorder the model's memory in blocks of ten elements, as a kernel might, and tell the map."""
    order = np.random.default_rng(3).permutation(10)
    flat = flat_bits(model.weight)
    blocks = flat.reshape(-1, 10)
    moved = np.empty_like(blocks)
    moved[:, order] = blocks
    blocks[:] = moved
    (memory,) = {segment.memory for segment in layout.tensors["w"].segments}
    memory.permutation = Permutation(forward=order.astype(np.int64))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("reorder", [False, True])
def test_patches_and_whole_loads_end_as_the_loader_would_put_them(kind: str, reorder: bool) -> None:
    shape, loader = LAYOUTS[kind]
    if reorder and np.prod(shape) % 10:
        shape = (*shape[:-1], shape[-1] + 2)
        if kind == "columns":
            shape = (6, 10)
    old, new = checkpoint(0), checkpoint(1)
    model, expected = Model(shape, loader), Model(shape, loader)
    model.load_weights([("w", old)])
    expected.load_weights([("w", new)])
    layout = traced(model, old)
    if reorder:
        permuted(layout, model)
        permuted(traced(expected, new), expected)
    generator = np.random.default_rng(2)
    positions = np.arange(60, dtype=np.int64)
    for part in np.split(generator.permutation(60), [7, 20, 41]):
        indices = positions[np.sort(part)]
        patch = TensorPatch(
            tensor=0,
            start=0,
            count=60,
            indices=indices,
            values=flat_bits(new)[indices],
            undo=flat_bits(old)[indices],
        )
        writes = layout.prepare("w", patch)
        assert all(write.finds_old() for write in writes)
        for write in writes:
            write.apply()
        for write in writes:
            write.revert()
            write.apply()
    assert np.array_equal(flat_bits(model.weight), flat_bits(expected.weight))

    layout.write_all("w", flat_bits(old))
    for segment in layout.tensors["w"].segments:
        assert segment.digest() == segment.digest_of(flat_bits(old))
    layout.write_all("w", flat_bits(new))
    assert np.array_equal(flat_bits(model.weight), flat_bits(expected.weight))


@pytest.mark.parametrize("dimension", [0, 1])
def test_digests_of_shards_add_up_and_replicas_count_once(dimension: int) -> None:
    tensor = checkpoint()
    layouts = []
    for rank in (0, 1, 1):

        def shard(model: Any, name: str, loaded: torch.Tensor, rank: int = rank) -> None:
            size = loaded.shape[dimension] // 2
            model.weight.data.copy_(loaded.narrow(dimension, rank * size, size))

        model = Model((3, 10) if dimension == 0 else (6, 5), shard)
        model.load_weights([("w", tensor)])
        layouts.append(traced(model, tensor))
    assert held(layouts[0]) | held(layouts[1]) == set(range(60))
    answers = [{"digests": digests_to_json(("w", *part) for part in layout.digest("w"))} for layout in layouts]
    assert sum_digests(answers)["w"] == digest_bits(flat_bits(tensor))
    layouts[2].write_all("w", flat_bits(checkpoint(1)))
    answers[2] = {"digests": digests_to_json(("w", *part) for part in layouts[2].digest("w"))}
    with pytest.raises(DigestMismatchError, match="two copies"):
        sum_digests(answers)


def doubled(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor * 2)


def changed_afterwards(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.weight.data.copy_(-torch.exp(model.weight.data))


def added(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.add_(tensor)


def repeated(model: Any, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor[:1].expand(6, 10))


@pytest.mark.parametrize("loader", [doubled, changed_afterwards, added, repeated])
def test_tensor_that_its_loader_transforms_is_opaque_and_refuses(loader: Loader) -> None:
    model = Model((6, 10), loader)
    layout = traced(model, checkpoint())
    assert layout.tensors["w"].opaque is not None
    assert layout.tensors["w"].segments == ()
    with pytest.raises(EngineError, match="in place"):
        layout.write_all("w", flat_bits(checkpoint()))


def test_tensor_whose_dtype_changes_is_opaque_with_both_named() -> None:
    layout = traced(Model((6, 10), whole, torch.float32), checkpoint())
    assert layout.tensors["w"].opaque == "the checkpoint has torch.bfloat16, weight is torch.float32"


def test_repacked_memory_is_found_by_reading_back_and_mapped_only_by_an_order_that_fits() -> None:
    tensor = checkpoint()
    order = np.random.default_rng(3).permutation(10).astype(np.int64)
    wrong = Permutation(forward=np.roll(order, 1))
    for proposals, mapped in (([], False), ([wrong], False), ([wrong, Permutation(forward=order)], True)):
        model = Model((6, 10), whole)
        model.load_weights([("w", tensor)])
        layout, sources = trace(model, [("w", tensor)], load=model.load_weights)
        permuted(layout, model)
        (segment,) = layout.tensors["w"].segments
        segment.memory.permutation = None
        verify(layout, sources, permutations=lambda _, proposals=proposals: proposals)  # type: ignore[misc]
        assert (layout.tensors["w"].opaque is None) == mapped
        if mapped:
            assert layout.digest("w") == [(segment.key, digest_bits(flat_bits(tensor)))]


def test_tied_names_share_one_place_and_a_second_name_of_the_model_is_an_alias() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(6, 10, dtype=torch.bfloat16)
            self.head = torch.nn.Linear(10, 6, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embed.weight

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    model = Tied()
    layout, _ = trace(model, [("embed.weight", checkpoint())], load=model.load_weights)
    assert layout.tensors["embed.weight"].aliases == ("head.weight",)
    both = [("embed.weight", checkpoint()), ("head.weight", checkpoint())]
    layout, _ = trace(model, both, load=model.load_weights)
    assert layout.tensors["embed.weight"].aliases == ()
    assert layout.tensors["head.weight"].shares_with == "embed.weight"


@pytest.mark.parametrize("position", [-1, 60])
def test_patch_outside_its_tensor_is_refused(position: int) -> None:
    layout = traced(Model((6, 10), whole), checkpoint())
    bits: npt.NDArray[np.uint16] = np.ones(1, np.uint16)
    patch = TensorPatch(
        tensor=0, start=min(position, 0), count=61, indices=np.array([position], np.int64), values=bits, undo=bits
    )
    with pytest.raises(EngineError, match="covers positions"):
        layout.prepare("w", patch)
