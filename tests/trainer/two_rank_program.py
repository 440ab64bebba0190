"""Run under torchrun by test_two_ranks: takes the steps of a job file and writes what this rank holds.

Usage: two_rank_program.py JOB.json; the job names model, batch, output, checkpoints and what to do.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from sparsewire.sync import Publisher
from sparsewire.trainer.batch import TrainingBatch
from sparsewire.trainer.checkpoint import CheckpointStore
from sparsewire.trainer.config import ComputeDtype, Device
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.learner import Learner, LearnerSettings
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import canonical_parameters, load_model
from sparsewire.trainer.ranks import ProcessGroup, open_process_group


def main(job: dict[str, str]) -> None:
    """Do the job."""
    torch.set_num_threads(1)
    with open_process_group(Device.CPU) as group:
        output = Path(job["output"])
        batch = TrainingBatch.from_bytes(Path(job["batch"]).read_bytes())
        model = load_model(
            Path(job["model"]),
            mesh=group.mesh,
            device=group.device,
            compute_dtype=ComputeDtype(job["compute_dtype"]),
            activation_checkpointing=True,
        )
        settings = LearnerSettings(learning_rate=1e-4, clip=ClipRange(low=0.2, high=0.28), micro_batch_size=4)
        learner = Learner(model=model, group=group, settings=settings)
        checkpoints = CheckpointStore(directory=Path(job["checkpoints"]), ranks=group.control, keep=2)
        if job["resume"] == "yes":
            assert checkpoints.load_newest(learner) is not None
            _write(output / "resumed", learner, group)
        stats = learner.step(batch)
        _write(output / "stepped", learner, group)
        checkpoints.save(learner, version=1)
        with Publisher.open(job["store"], run="r1", ranks=group.publishing) as publisher:
            manifest = publisher.publish(local_view(model), step=1)
            poisoned = replace(batch, advantages_N=np.full_like(batch.advantages_N, np.nan))
            # Only the last rank sees the poison; all must skip, and the version that follows has no change.
            skip = learner.step(poisoned if group.rank == group.size - 1 else batch)
            empty = publisher.publish(local_view(model), step=2)
        _write(output / "skipped", learner, group)
        report = {
            "stats": asdict(stats),
            "skipped": skip.skipped,
            "versions": [manifest.version, empty.version],
            "num_changed": empty.num_changed,
            "heard": [payload.decode() for payload in group.control.all_gather(str(group.rank).encode())],
        }
        (output / f"report-{group.rank}.json").write_text(json.dumps(report))


def _write(directory: Path, learner: Learner, group: ProcessGroup) -> None:
    """Write this rank's shards of the view, and on rank 0 the gathered weights in float32 and bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = {}
    for name, shard in local_view(learner.model).items():
        shards[f"{name}:bits"] = shard.array.reshape(-1).view(np.uint16)
        shards[f"{name}:start"] = np.asarray(shard.start)
    np.savez(directory / f"shards-{group.rank}.npz", allow_pickle=False, **shards)
    whole = {}
    for name, parameter in canonical_parameters(learner.model).items():
        tensor = parameter.detach()
        assert isinstance(tensor, DTensor)
        full = tensor.full_tensor()
        whole[f"{name}:float32"] = full.numpy()
        whole[f"{name}:bfloat16"] = full.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    if group.rank == 0:
        np.savez(directory / "whole.npz", allow_pickle=False, **whole)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
