"""What the tests of the rollout share: weights of the tiny model as bits, and changes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from sparsewire.rollout.transformers_engine import TransformersEngine
from sparsewire.sync.delta import TensorPatch, changed_positions
from sparsewire.sync.types import Dtype, Schema, TensorSpec, bits_of

Weights = dict[str, npt.NDArray[Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs torch with one thread, so that results are bitwise reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_weights(directory: Path) -> Weights:
    """Read a bf16 checkpoint as NumPy arrays."""
    return {
        name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


@pytest.fixture(scope="session")
def tiny_weights(tiny_model: Path) -> Weights:
    """The tiny model's checkpoint."""
    return read_weights(tiny_model)


@pytest.fixture(scope="session")
def weights_reader() -> Callable[[Path], Weights]:
    """The function `read_weights(directory)`."""
    return read_weights


@pytest.fixture(scope="session")
def schema_of() -> Callable[[Mapping[str, npt.NDArray[Any]]], Schema]:
    """Returns the schema of arrays by name."""

    def make(weights: Mapping[str, npt.NDArray[Any]]) -> Schema:
        return Schema.of(
            [
                TensorSpec(name=name, dtype=Dtype.of(array.dtype), shape=tuple(array.shape))
                for name, array in weights.items()
            ]
        )

    return make


@pytest.fixture(scope="session")
def nudged() -> Callable[[Weights, int], Weights]:
    """Returns weights of which a few per cent moved by some units in the last place, as a seed decides."""

    def make(weights: Weights, seed: int) -> Weights:
        generator = np.random.default_rng(seed)
        changed: Weights = {}
        for name, array in weights.items():
            bits = bits_of(array).copy()
            where = generator.random(bits.size) < 0.05
            bits[where] += generator.integers(1, 40, int(where.sum())).astype(bits.dtype)
            changed[name] = bits.view(array.dtype).reshape(array.shape)
        return changed

    return make


@pytest.fixture(scope="session")
def patches_between(
    schema_of: Callable[[Mapping[str, npt.NDArray[Any]]], Schema],
) -> Callable[[Weights, Weights], list[TensorPatch]]:
    """Returns the patches that lead from one set of weights to another."""

    def make(old: Weights, new: Weights) -> list[TensorPatch]:
        patches = []
        for number, spec in enumerate(schema_of(old)):
            before, after = bits_of(old[spec.name]), bits_of(new[spec.name])
            where = changed_positions(before, after)
            patches.append(
                TensorPatch(
                    tensor=number,
                    start=0,
                    count=spec.num_elements,
                    indices=where,
                    values=after[where],
                    undo=before[where],
                )
            )
        return patches

    return make


@pytest.fixture
def open_engine(
    tiny_model: Path, schema_of: Callable[[Mapping[str, npt.NDArray[Any]]], Schema]
) -> Iterator[Callable[..., TransformersEngine]]:
    """Opens tiny engines with given weights at a given version, and closes them at the end."""
    engines: list[TransformersEngine] = []

    def make(
        weights: Weights | None = None,
        *,
        version: int = 0,
        directory: Path = tiny_model,
        kind: type[TransformersEngine] = TransformersEngine,
    ) -> TransformersEngine:
        engine = kind.open(directory)
        engines.append(engine)
        if weights is not None:
            engine.bind(schema_of(weights))
            engine.load(weights, version=version)
        return engine

    yield make
    for engine in engines:
        engine.close()
