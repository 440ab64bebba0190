"""One vLLM over two tensor-parallel ranks: each takes its share of every version, and both or neither take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from sparsewire.rollout.change import Change
from sparsewire.rollout.engine import GenerationRequest
from sparsewire.rollout.vllm.engine import VllmEngine, wait_for
from sparsewire.sync.delta import TensorPatch, changed_positions
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import EngineError
from sparsewire.sync.trajectories.types import SamplingParams
from sparsewire.sync.types import Dtype, Schema, TensorSpec, bits_of

Weights = dict[str, npt.NDArray[Any]]

SOON = timedelta(seconds=30)


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


@pytest.fixture
def open_pair(
    open_vllm: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], VllmEngine]]:
    """Opens engines over two ranks, which accept functions from this test."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    opened: list[VllmEngine] = []

    def make(directory: Path) -> VllmEngine:
        opened.append(open_vllm(directory, tensor_parallel_size=2))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def on_ranks(engine: VllmEngine, function: Callable[[Any], Any]) -> list[Any]:
    """Run a function of the worker in every rank and return what they returned."""
    call = engine._llm.collective_rpc(function)
    return list(wait_for(engine._loop, call, what="run a test's function", timeout=SOON))


def parameter_hashes(worker: Any) -> dict[str, str]:
    """Hash all parameters of a rank as the kernels read them."""
    import hashlib

    import torch

    return {
        name: hashlib.sha256(
            parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, parameter in worker.get_model().named_parameters()
    }


def break_second_rank(worker: Any) -> None:
    """Let a write fail in the middle of what the second rank has staged."""

    class BrokenWrite:
        def __init__(self, write: Any) -> None:
            self.write = write

        def __getattr__(self, name: str) -> Any:
            return getattr(self.write, name)

        def apply(self) -> None:
            raise RuntimeError("planted fault in the middle of the scatter")

    if worker.rank == 1:
        writes = worker.weight_transfer_engine._weights._staged.writes
        writes[len(writes) // 2] = BrokenWrite(writes[len(writes) // 2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3-moe"])
def test_chain_over_two_ranks_ends_as_a_fresh_pair_and_a_fault_on_one_is_taken_back_on_both(
    kind: str,
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
    write_checkpoint: Callable[[Path, Path, Weights], None],
    open_pair: Callable[[Path], VllmEngine],
    tmp_path: Path,
) -> None:
    weights = weights_of(model_of(kind))
    engine = open_pair(model_of(kind))
    engine.bind(schema_of(weights))
    engine.load(weights, version=0)
    for version in range(20):
        new = nudge_weights(weights, version)
        change = change_between(weights, new, version)
        engine.stage(change)
        engine.pause(timeout=SOON)
        if version == 10:
            before = on_ranks(engine, parameter_hashes)
            on_ranks(engine, break_second_rank)
            with pytest.raises(EngineError, match="planted fault"):
                engine.apply(change, version=version + 1)
            assert engine.version is None
            engine.apply(change.inverted(), version=version)
            assert on_ranks(engine, parameter_hashes) == before
            assert engine.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}
            change = change_between(weights, new, version)
        engine.apply(change, version=version + 1)
        engine.digest_at(change)
        engine.resume()
        weights = new
    assert engine.version == 20
    assert engine.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}

    def generate(from_engine: VllmEngine) -> list[tuple[list[int], list[float]]]:
        request = GenerationRequest(
            request_id="0",
            prompt_token_ids=from_engine.encode_chat("What is 1 + 2?"),
            sampling=SamplingParams(temperature=1e-3, max_new_tokens=20),
            seed=0,
        )
        made = from_engine.generate([request])
        return [(one.completion_token_ids.tolist(), one.logprobs.tolist()) for one in made]

    hashes, made = on_ranks(engine, parameter_hashes), generate(engine)
    engine.close()
    write_checkpoint(tmp_path / "last", model_of(kind), weights)
    fresh = open_pair(tmp_path / "last")
    assert on_ranks(fresh, parameter_hashes) == hashes
    fresh.bind(schema_of(weights))
    fresh.load(weights, version=20)
    assert on_ranks(fresh, parameter_hashes) == hashes
    assert generate(fresh) == made
