"""Run plainly or under torchrun by test_probe: scores probes between steps and writes what this rank found.

Usage: probe_program.py MODEL BATCH OUTPUT COMPUTE_DTYPE
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from sparsewire.trainer.batch import TrainingBatch
from sparsewire.trainer.config import PROBE_TEXTS, ComputeDtype, Device
from sparsewire.trainer.learner import Learner, LearnerSettings
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import load_model
from sparsewire.trainer.probe import open_prober
from sparsewire.trainer.ranks import open_process_group


def main(model_directory: Path, batch_file: Path, output: Path, compute_dtype: ComputeDtype) -> None:
    """Score, step, and score again."""
    torch.set_num_threads(1)
    with open_process_group(Device.CPU) as group:
        batch = TrainingBatch.from_bytes(batch_file.read_bytes())
        model = load_model(model_directory, mesh=group.mesh, device=group.device, compute_dtype=compute_dtype)
        learner = Learner(
            model=model,
            group=group,
            settings=LearnerSettings(learning_rate=1e-3, clip=ClipRange(low=0.2, high=0.28), micro_batch_size=4),
        )
        prober = open_prober(PROBE_TEXTS, directory=model_directory, model=model, group=group)
        assert prober is not None
        probes = [prober.score()]
        for _ in range(2):
            learner.step(batch)
            prober.follow(batch)
            probes.append(prober.score())
        found = [None if probe is None else asdict(probe) for probe in probes]
        (output / f"probes-{group.rank}-of-{group.size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), ComputeDtype(sys.argv[4]))
