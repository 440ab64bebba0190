"""A small model that changes like a trained one, and stores to publish it to."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.sync.store.memory import forget_memory_store

View: TypeAlias = dict[str, npt.NDArray[Any]]


@pytest.fixture
def memory_url() -> Iterator[str]:
    """URL of an empty memory store."""
    name = f"t{uuid.uuid4().hex}"
    yield f"memory://{name}"
    forget_memory_store(name)


@pytest.fixture
def directory_url(tmp_path: Path) -> str:
    """URL of an empty directory store."""
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path / 'store'}"


@pytest.fixture
def make_view() -> Callable[[int], View]:
    """Return a function that makes a view of mixed dtypes and sizes, bf16 mostly, from a seed."""

    def make(seed: int) -> View:
        random = np.random.default_rng(seed)
        return {
            "model.embed.weight": random.normal(0, 0.02, (300, 40)).astype(ml_dtypes.bfloat16),
            "model.layers.0.weight": random.normal(0, 0.02, (64, 64)).astype(ml_dtypes.bfloat16),
            "model.layers.0.norm": np.ones(64, ml_dtypes.bfloat16),
            "model.layers.0.scale": random.normal(0, 1, (4, 4)).astype(np.float32),
            "model.step": np.array(3, np.int64),
            "model.empty": np.empty((0, 8), ml_dtypes.bfloat16),
        }

    return make


@pytest.fixture
def change() -> Callable[..., View]:
    """Return a function that moves a share of all bf16 elements by one unit in the last place, in a copy."""

    def step(view: View, seed: int, density: float = 0.01) -> View:
        random = np.random.default_rng(seed)
        after: View = {}
        for name, array in view.items():
            after[name] = array.copy()
            if array.dtype == ml_dtypes.bfloat16 and array.size:
                flat = after[name].reshape(-1).view(np.uint16)
                picked = random.random(array.size) < density
                flat[picked] += random.choice(np.array([1, 0xFFFF], np.uint16), int(picked.sum()))
        return after

    return step


@pytest.fixture
def assert_same_bits() -> Callable[[Any, View], None]:
    """Return a function that compares a mapping of arrays with a view, bit for bit."""

    def compare(got: Any, wanted: View) -> None:
        assert sorted(got) == sorted(wanted)
        for name, array in wanted.items():
            assert got[name].dtype == array.dtype, name
            assert got[name].shape == array.shape, name
            assert got[name].tobytes() == array.tobytes(), name

    return compare
