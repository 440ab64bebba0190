"""A rank's weights change as a whole or not at all, also where tensors can only be loaded through vLLM's loaders."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from sparsewire.rollout.change import Change
from sparsewire.sync.delta import TensorPatch, changed_positions
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import ConfigError, DigestMismatchError, EngineError
from sparsewire.sync.types import Dtype, Schema, TensorSpec, bits_of

Weights = dict[str, npt.NDArray[Any]]


def schema_of(weights: Weights) -> Schema:
    return Schema.of(
        [TensorSpec(name=name, dtype=Dtype.of(array.dtype), shape=array.shape) for name, array in weights.items()]
    )


def change_between(old: Weights, new: Weights, base_version: int) -> Change:
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
    return Change(patches=patches, base_version=base_version, version=base_version + 1)


class BrokenWrite:
    """A staged write that fails when it is applied, and can be taken back."""

    def __init__(self, write: Any) -> None:
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.write, name)

    def apply(self) -> None:
        raise EngineError("planted fault in the middle of the scatter")


@pytest.fixture
def engine(model_of: Callable[[str], Path], weights_of: Callable[[Path], Weights], open_llm: Callable[..., Any]) -> Any:
    """An untied Qwen3 at version 0."""
    opened = open_llm(model_of("qwen3"))
    weights = weights_of(model_of("qwen3"))
    opened.driver.bind(schema_of(weights))
    opened.driver.load(weights, version=0)
    return opened


def test_fault_in_the_middle_of_the_scatter_is_taken_back(
    engine: Any,
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
) -> None:
    old = weights_of(model_of("qwen3"))
    new = nudge_weights(old, 1)
    before = engine.parameter_bytes()
    change = change_between(old, new, 0)
    engine.driver.stage(change)
    writes = engine.rank._staged.writes
    middle = len(writes) // 2
    writes[middle] = BrokenWrite(writes[middle])
    with pytest.raises(EngineError, match="planted fault"):
        engine.driver.apply(change)
    assert engine.parameter_bytes() == before
    assert engine.rank.version == 0
    engine.driver.apply(change.inverted())
    assert engine.parameter_bytes() == before
    writes[middle] = writes[middle].write
    engine.driver.apply(change)
    engine.driver.apply(change)
    assert engine.driver.digest(new) == {name: tensor_digest(array) for name, array in new.items()}
    engine.driver.apply(change.inverted())
    assert engine.parameter_bytes() == before


def test_rank_that_cannot_take_a_fault_back_holds_no_version(
    engine: Any,
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
) -> None:
    class Stuck(BrokenWrite):
        def revert(self) -> None:
            raise EngineError("planted fault on the way back")

    old = weights_of(model_of("qwen3"))
    new = nudge_weights(old, 1)
    change = change_between(old, new, 0)
    engine.driver.stage(change)
    writes = engine.rank._staged.writes
    writes[3] = Stuck(writes[3])
    with pytest.raises(EngineError, match="on the way back"):
        engine.driver.apply(change)
    assert engine.rank.version is None
    engine.driver.load(new, version=1)
    assert engine.rank.version == 1
    assert engine.driver.digest(new) == {name: tensor_digest(array) for name, array in new.items()}


def test_change_that_replaces_other_bits_than_those_held_is_refused_when_staged(
    engine: Any,
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
) -> None:
    other = nudge_weights(weights_of(model_of("qwen3")), 1)
    before = engine.parameter_bytes()
    with pytest.raises(DigestMismatchError, match="is damaged"):
        engine.driver.stage(change_between(other, nudge_weights(other, 2), 0))
    assert engine.parameter_bytes() == before


def test_opaque_tensor_is_loaded_whole_with_its_layer_and_taken_back(
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
    write_checkpoint: Callable[[Path, Path, Weights], None],
    open_llm: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = model_of("qwen3")
    weights = weights_of(base)
    engine = open_llm(base)
    engine.initialize({}, timeout=timedelta(seconds=60))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        layout = engine.rank._layout.tensors[name]
        layout.opaque, layout.segments = "pretended to be repacked", ()
    engine.driver.bind(schema_of(weights))
    assert set(engine.driver.opaque) == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }
    engine.driver.load(weights, version=0)
    for version in range(3):
        before = engine.parameter_bytes()
        new = nudge_weights(weights, version)
        change = change_between(weights, new, version)
        if version:
            with pytest.raises(EngineError, match="load the version whole"):
                engine.driver.stage(change)
            engine.driver.load(weights, version=version)
        engine.driver.stage(change)
        engine.driver.apply(change)
        assert engine.driver.digest(new) == {name: tensor_digest(array) for name, array in new.items()}
        engine.driver.apply(change.inverted())
        assert engine.parameter_bytes() == before
        engine.driver.apply(change)
        weights = new
    write_checkpoint(tmp_path / "last", base, weights)
    fresh = open_llm(tmp_path / "last")
    assert fresh.parameter_bytes() == engine.parameter_bytes()
    prompts = ["What is 1 + 2?", "ab"]
    assert fresh.greedy(prompts) == engine.greedy(prompts)


def test_vllm_too_old_for_the_backend_is_refused_by_name() -> None:
    from sparsewire.rollout.vllm.plugin import check_version

    for version in ("0.24.0", "0.9.2"):
        with pytest.raises(ConfigError, match=rf"vLLM {version} is too old"):
            check_version(version)
    for version in ("0.25.0", "0.32.0+cpu", "0.33.1"):
        check_version(version)
