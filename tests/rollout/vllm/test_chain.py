"""Chains of published versions applied in place end where a fresh vLLM started from the last version is, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from sparsewire.rollout.change import Change
from sparsewire.rollout.handshake import handshake
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.subscriber import Subscriber

Weights = dict[str, npt.NDArray[Any]]

NUM_VERSIONS = 20
PROMPTS = ("What is 1 + 2?", "ab", "The answer is")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama", "qwen3-moe", "qwen3-fp8"])
def test_chain_of_versions_ends_as_a_fresh_engine(
    kind: str,
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
    write_checkpoint: Callable[[Path, Path, Weights], None],
    open_llm: Callable[[Path], Any],
    tmp_path: Path,
) -> None:
    if kind == "qwen3-fp8":
        from sparsewire.rollout.vllm import fp8_reference

        fp8_reference.install()
    base = model_of(kind)
    weights = weights_of(base)
    engine = open_llm(base)
    url = f"file://{tmp_path}/store"
    with (
        Publisher.open(url, run="r1") as publisher,
        Subscriber.open(url, run="r1", mirror=tmp_path / "mirror", stage=True) as subscriber,
    ):
        publisher.publish(weights)
        subscriber.sync()
        binding = handshake(subscriber.schema, engine.driver.describe())
        assert {theirs for _, theirs in binding.mapped} == set(weights)
        assert engine.driver.opaque == {}
        engine.driver.bind(subscriber.schema)
        engine.driver.load(subscriber.tensors(), version=0)
        subscriber.release(0)
        before = engine.greedy(PROMPTS)
        for version in range(1, NUM_VERSIONS + 1):
            weights = nudge_weights(weights, version)
            publisher.publish(weights)
            subscriber.sync()
            update = subscriber.staged()
            assert update is not None
            assert not update.full
            change = Change(
                patches=list(update.patches()), base_version=version - 1, version=version, path=update.paths[0]
            )
            engine.driver.stage(change)
            engine.driver.apply(change)
            engine.driver.finish(version)
            assert engine.driver.held_version == version
            subscriber.release(version)
        assert engine.driver.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}
    after = engine.greedy(PROMPTS)
    assert after != before

    write_checkpoint(tmp_path / "last", base, weights)
    fresh = open_llm(tmp_path / "last")
    assert fresh.parameter_bytes() == engine.parameter_bytes()
    assert fresh.greedy(PROMPTS) == after
