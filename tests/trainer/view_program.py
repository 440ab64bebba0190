"""Run under torchrun by test_extract: publishes two versions of a model in several views, from this rank's shards.

Usage: view_program.py MODEL STORE; each kind of view is a run of its own, named after it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sparsewire.sync import Publisher
from sparsewire.trainer.config import Device, ViewKind
from sparsewire.trainer.model import canonical_parameters, load_model
from sparsewire.trainer.outlet import Outlet
from sparsewire.trainer.ranks import open_process_group


def main(directory: Path, store: str) -> None:
    """Publish."""
    torch.set_num_threads(1)
    with open_process_group(Device.CPU) as group:
        model = load_model(directory, mesh=group.mesh, device=group.device, dither_seed=1)
        for version in range(2):
            for kind in (ViewKind.FP8_BLOCK, ViewKind.FP16):
                with Publisher.open(store, run=kind, ranks=group.publishing) as publisher:
                    outlet = Outlet(publisher=publisher, model=model, kind=kind, ranks=group.control)
                    outlet.start(step=version, stepped_unix_seconds=0.0)
                    assert outlet.settle()
            with torch.no_grad():
                for parameter in canonical_parameters(model).values():
                    parameter.mul_(1.003)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
