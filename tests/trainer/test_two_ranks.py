from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparsewire.sync import Subscriber
from sparsewire.sync.trajectories import Trajectory
from sparsewire.trainer.batch import assemble

_PROGRAM = Path(__file__).with_name("two_rank_program.py")
_LEARNING_RATE = 1e-4

Weights = dict[str, npt.NDArray[Any]]


class Job:
    """One launch of the program on some ranks, and what it wrote."""

    def __init__(
        self, directory: Path, *, num_ranks: int, model: Path, batch: Path, checkpoints: Path, **more: str
    ) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.num_ranks = num_ranks
        self.store = f"file://{directory}/store"
        fields = {
            "model": str(model),
            "batch": str(batch),
            "output": str(directory),
            "checkpoints": str(checkpoints),
            "store": self.store,
            "compute_dtype": "float32",
            "resume": "no",
            **more,
        }
        path = directory / "job.json"
        path.write_text(json.dumps(fields))
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={num_ranks}",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
        ]  # fmt: skip
        alone = [sys.executable]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [*(launcher if num_ranks > 1 else alone), str(_PROGRAM), str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    def whole(self, moment: str) -> Weights:
        """The gathered weights, `name:float32` and `name:bfloat16`."""
        with np.load(self.directory / moment / "whole.npz") as arrays:
            return dict(arrays)

    def shards(self, moment: str, rank: int) -> Weights:
        """One rank's shards, `name:bits` and `name:start`."""
        with np.load(self.directory / moment / f"shards-{rank}.npz") as arrays:
            return dict(arrays)

    def report(self, rank: int) -> dict[str, Any]:
        """What a rank said about its steps."""
        report: dict[str, Any] = json.loads((self.directory / f"report-{rank}.json").read_text())
        return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def batch_file(folder: Path, groups: Callable[..., list[list[Trajectory]]]) -> Path:
    path = folder / "batch.npz"
    path.write_bytes(assemble(groups(seed=5), version=0, vocabulary_size=256).to_bytes())
    return path


@pytest.fixture
def jobs(folder: Path, batch_file: Path, tiny_model: Path) -> tuple[Job, Job]:
    """The same steps on one rank and on two; launched once for the module."""
    return tuple(_launch_once(folder, num_ranks, batch_file, tiny_model) for num_ranks in (1, 2))  # type: ignore[return-value]


_LAUNCHED: dict[tuple[Path, int], Job] = {}


def _launch_once(folder: Path, num_ranks: int, batch: Path, model: Path) -> Job:
    key = (folder, num_ranks)
    if key not in _LAUNCHED:
        _LAUNCHED[key] = Job(
            folder / f"on-{num_ranks}",
            num_ranks=num_ranks,
            model=model,
            batch=batch,
            checkpoints=folder / f"checkpoints-{num_ranks}",
        )
    return _LAUNCHED[key]


def _names(weights: Weights, kind: str) -> list[str]:
    return [name.removesuffix(f":{kind}") for name in weights if name.endswith(f":{kind}")]


@pytest.mark.slow
def test_two_ranks_optimise_the_same_objective_as_one(jobs: tuple[Job, Job]) -> None:
    one, two = jobs
    alone, shared = one.report(0)["stats"], two.report(0)["stats"]
    for name in ("loss", "grad_norm", "ratio_mean", "ratio_max", "clip_fraction", "kl", "entropy", "num_tokens"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-4), name
    assert two.report(1)["stats"] == shared
    expected, actual = one.whole("stepped"), two.whole("stepped")
    far = total = 0
    for name in _names(expected, "float32"):
        difference = np.abs(expected[f"{name}:float32"] - actual[f"{name}:float32"])
        # The first Adam step is the gradient's sign times the learning rate, so only a gradient of rounding noise can
        # turn the other way, and by no more than two steps.
        assert difference.max() <= 2.01 * _LEARNING_RATE, name
        far += int((difference > 0.05 * _LEARNING_RATE).sum())
        total += difference.size
    assert far / total < 1e-3


@pytest.mark.slow
def test_each_rank_extracts_its_own_shard_and_joined_they_are_the_gathered_bits(jobs: tuple[Job, Job]) -> None:
    _, two = jobs
    whole = two.whole("stepped")
    parts = [two.shards("stepped", rank) for rank in range(2)]
    for name in _names(whole, "bfloat16"):
        expected = whole[f"{name}:bfloat16"].reshape(-1)
        at = 0
        for part in parts:
            bits = part[f"{name}:bits"]
            if len(bits):
                assert part[f"{name}:start"] == at, name
            assert len(bits) < len(expected), name
            np.testing.assert_array_equal(bits, expected[at : at + len(bits)])
            at += len(bits)
        assert at == len(expected), name


@pytest.mark.slow
def test_published_bits_are_the_gathered_models_bits(jobs: tuple[Job, Job]) -> None:
    _, two = jobs
    whole = two.whole("stepped")
    with Subscriber.open(two.store, run="r1") as subscriber:
        assert subscriber.sync() == 1
        tensors = subscriber.tensors()
        assert sorted(tensors) == sorted(_names(whole, "bfloat16"))
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.view(np.uint16), whole[f"{name}:bfloat16"])


@pytest.mark.slow
def test_a_gradient_not_finite_on_one_rank_is_skipped_on_all_and_the_next_version_has_no_change(
    jobs: tuple[Job, Job],
) -> None:
    _, two = jobs
    for rank in range(2):
        report = two.report(rank)
        assert report["skipped"] is True
        assert report["versions"] == [0, 1]
        assert report["num_changed"] == 0
        assert report["heard"] == ["0", "1"]
    before, after = two.whole("stepped"), two.whole("skipped")
    for name in _names(before, "float32"):
        np.testing.assert_array_equal(before[f"{name}:float32"], after[f"{name}:float32"])


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1)])
def test_a_checkpoint_loads_on_another_number_of_ranks(
    jobs: tuple[Job, Job], folder: Path, batch_file: Path, tiny_model: Path, saved_on: int, loaded_on: int
) -> None:
    source = jobs[saved_on - 1]
    resumed = Job(
        folder / f"from-{saved_on}-to-{loaded_on}",
        num_ranks=loaded_on,
        model=tiny_model,
        batch=batch_file,
        checkpoints=folder / f"checkpoints-{saved_on}",
        resume="yes",
    )
    saved, loaded = source.whole("stepped"), resumed.whole("resumed")
    for name in _names(saved, "float32"):
        np.testing.assert_array_equal(saved[f"{name}:float32"], loaded[f"{name}:float32"])
