"""The learner's probes are its own numbers, the same on any number of ranks, and cost its training nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from sparsewire.sync import Publisher
from sparsewire.sync.errors import ConfigError
from sparsewire.sync.probe import Probe
from sparsewire.sync.trajectories import Trajectory
from sparsewire.trainer.batch import assemble
from sparsewire.trainer.config import PROBE_TEXTS, ComputeDtype, ViewKind
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.learner import Learner, LearnerSettings
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import CausalLM, canonical_parameters, load_model
from sparsewire.trainer.outlet import Outlet
from sparsewire.trainer.probe import MAX_COMPLETION_TOKENS, MAX_PROMPT_TOKENS, MAX_TEXT_TOKENS, Prober, open_prober
from sparsewire.trainer.ranks import ProcessGroup

Groups = Callable[..., list[list[Trajectory]]]

_PROGRAM = Path(__file__).with_name("probe_program.py")


def _model(group: ProcessGroup, directory: Path, dtype: ComputeDtype = ComputeDtype.FLOAT32) -> CausalLM:
    return load_model(directory, mesh=group.mesh, device=group.device, compute_dtype=dtype)


def _prober(group: ProcessGroup, directory: Path, model: CausalLM) -> Prober:
    prober = open_prober(PROBE_TEXTS, directory=directory, model=model, group=group)
    assert prober is not None
    return prober


def _logprobs(probe: Probe | None) -> list[float]:
    assert probe is not None
    return [value for sequence in probe.sequences for value in sequence.logprobs]


@pytest.mark.parametrize(("dtype", "tolerance"), [(ComputeDtype.FLOAT32, 1e-4), (ComputeDtype.BFLOAT16, 0.2)])
def test_a_probe_is_what_the_plain_model_gives_each_sequence_alone(
    group: ProcessGroup, tiny_model: Path, dtype: ComputeDtype, tolerance: float
) -> None:
    probe = _prober(group, tiny_model, _model(group, tiny_model, dtype)).score()
    assert probe is not None
    plain: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for sequence in probe.sequences:
        assert sequence.num_given == 1
        assert len(sequence.token_ids) <= MAX_TEXT_TOKENS
        ids = torch.tensor([sequence.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1].float(), dim=-1)
        expected = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=tolerance)


def test_after_scoring_the_weights_are_the_float32_shards_again(group: ProcessGroup, tiny_model: Path) -> None:
    model = _model(group, tiny_model, ComputeDtype.BFLOAT16)
    before = local_view(model, kind=ViewKind.FP32)
    _prober(group, tiny_model, model).score()
    for parameter in canonical_parameters(model).values():
        assert isinstance(parameter, DTensor)
    for name, shard in local_view(model, kind=ViewKind.FP32).items():
        assert shard.array.tobytes() == before[name].array.tobytes(), name


def test_one_sequence_covers_the_vocabulary_evenly(group: ProcessGroup, tiny_model: Path) -> None:
    probe = _prober(group, tiny_model, _model(group, tiny_model)).score()
    assert probe is not None
    spread = probe.sequences[-1].token_ids
    assert len(spread) == 16
    assert set(np.diff(spread)) <= {18, 19}
    assert spread[0] < 18
    assert spread[-1] >= 300 - 18


def test_scoring_between_steps_changes_no_bit_of_training(
    group: ProcessGroup, tiny_model: Path, groups: Groups
) -> None:
    batch = assemble(groups(seed=0), version=0, vocabulary_size=256)
    settings = LearnerSettings(learning_rate=1e-3, clip=ClipRange(low=0.2, high=0.28), micro_batch_size=4)
    with_probes, without = (Learner(model=_model(group, tiny_model), group=group, settings=settings) for _ in range(2))
    prober = _prober(group, tiny_model, with_probes.model)
    found = []
    for _ in range(3):
        found.append(_logprobs(prober.score()))
        assert with_probes.step(batch) == without.step(batch)
    for name, parameter in canonical_parameters(with_probes.model).items():
        assert torch.equal(parameter.detach(), canonical_parameters(without.model)[name].detach()), name
    assert found[0] != found[1] != found[2]


def test_a_version_carries_the_probe_of_its_own_weights(
    group: ProcessGroup, tiny_model: Path, groups: Groups, tmp_path: Path
) -> None:
    batch = assemble(groups(seed=0), version=0, vocabulary_size=256)
    settings = LearnerSettings(learning_rate=1e-3, clip=ClipRange(low=0.2, high=0.28))
    learner = Learner(model=_model(group, tiny_model), group=group, settings=settings)
    prober = _prober(group, tiny_model, learner.model)
    with Publisher.open(f"file://{tmp_path}/store", run="r1", ranks=group.publishing) as publisher:
        outlet = Outlet(publisher=publisher, model=learner.model, prober=prober)
        assert outlet.publish(step=0).probe == prober.score()
        learner.step(batch)
        prober.follow(batch)
        outlet.start(step=1, stepped_unix_seconds=1.0)
        expected = prober.score()
        learner.step(batch)
        assert outlet.settle()
        assert publisher.head is not None
        assert publisher.head.probe == expected


def test_rows_with_most_and_least_advantage_join_cut_to_size(
    group: ProcessGroup, tiny_model: Path, trajectory: Callable[..., Trajectory]
) -> None:
    prober = _prober(group, tiny_model, _model(group, tiny_model))
    rows = [
        trajectory(sample=0, reward=0.5, prompt=(9,), completion=(8, 7)),
        trajectory(sample=1, reward=1.0, prompt=range(100, 150), completion=range(50, 90)),
        trajectory(sample=2, reward=0.0, prompt=(3, 4), completion=(5,)),
    ]
    prober.follow(assemble([rows], version=0, vocabulary_size=256))
    probe = prober.score()
    assert probe is not None
    best, worst = probe.sequences[-2:]
    assert best.token_ids == (*range(150 - MAX_PROMPT_TOKENS, 150), *range(50, 50 + MAX_COMPLETION_TOKENS))
    assert len(best.logprobs) == MAX_COMPLETION_TOKENS
    assert (worst.token_ids, worst.num_given) == ((3, 4, 5), 2)
    # A row whose tokens were unknown to the model has none left.
    rows = [trajectory(sample=sample, reward=float(sample), completion=(999,)) for sample in range(2)]
    prober.follow(assemble([rows], version=0, vocabulary_size=256))
    again = prober.score()
    assert again is not None
    assert len(again.sequences) == len(probe.sequences) - 2


def test_weights_that_are_not_finite_have_no_probe(group: ProcessGroup, tiny_model: Path) -> None:
    model = _model(group, tiny_model)
    prober = _prober(group, tiny_model, model)
    with torch.no_grad():
        canonical_parameters(model)["model.norm.weight"].mul_(float("nan"))
    assert prober.score() is None


def test_texts_that_make_no_probe_are_refused_or_mean_none(
    group: ProcessGroup, tiny_model: Path, tmp_path: Path
) -> None:
    model = _model(group, tiny_model)
    assert open_prober((), directory=tiny_model, model=model, group=group) is None
    with pytest.raises(ConfigError, match="has 0 tokens"):
        open_prober(("",), directory=tiny_model, model=model, group=group)
    with pytest.raises(ConfigError, match="probe_texts = "):
        open_prober(PROBE_TEXTS, directory=tmp_path, model=model, group=group)


def _run(
    folder: Path, num_ranks: int, model: Path, batch: Path, dtype: ComputeDtype
) -> list[list[dict[str, Any] | None]]:
    """Run the program on some ranks and return what each rank wrote."""
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    done = subprocess.run(
        [
            *(launcher if num_ranks > 1 else [sys.executable]),
            *(str(_PROGRAM), str(model), str(batch), str(folder), dtype.value),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"probes-{rank}-of-{num_ranks}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(ComputeDtype.FLOAT32, 2e-3), (ComputeDtype.BFLOAT16, 0.1)])
def test_two_ranks_make_the_probes_of_one(
    tiny_model: Path, groups: Groups, tmp_path: Path, dtype: ComputeDtype, tolerance: float
) -> None:
    batch = tmp_path / "batch.npz"
    batch.write_bytes(assemble(groups(seed=5), version=0, vocabulary_size=256).to_bytes())
    (alone,) = _run(tmp_path, 1, tiny_model, batch, dtype)
    first, second = _run(tmp_path, 2, tiny_model, batch, dtype)
    assert first == second
    assert len(first) == 3
    for expected, actual in zip(alone, first, strict=True):
        assert expected is not None
        assert actual is not None
        for one, two in zip(expected["sequences"], actual["sequences"], strict=True):
            assert one["token_ids"] == two["token_ids"]
            np.testing.assert_allclose(two["logprobs"], one["logprobs"], atol=tolerance)
