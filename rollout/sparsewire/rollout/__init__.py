"""Rollout: a worker that samples with weights it can prove, while new versions land between its decode steps.

In the order of the flow:

- `config`: what one worker is told.
- `engine`: the seam to whatever generates tokens.
- `handshake`: places every tensor of the run in the engine, or refuses.
- `gate`: lets weights change only between decode steps.
- `storage`: an engine's tensors as bits, written and digested in place.
- `sampling`: one token from a distribution, reproducible per request.
- `transformers_engine`: the embedded engine.
- `proof`: what a patch must read like once applied.
- `probe`: whether the engine computes what the learner does.
- `updater`: follows the run's versions and lands them in the engine.
- `tasks`: prompts and rewards.
- `sampler`: leases in, scored trajectories out.
- `loop`: the worker process.

Only the light parts are re-exported here; `transformers_engine` and `loop` import torch and are named in full.
"""

from __future__ import annotations

from sparsewire.rollout.config import WorkerConfig
from sparsewire.rollout.engine import Engine, EngineTensor, Generation, GenerationRequest, Placement
from sparsewire.rollout.handshake import Binding, handshake
from sparsewire.rollout.tasks import Task, open_task

__all__ = [
    "WorkerConfig",
    "Engine",
    "EngineTensor",
    "Generation",
    "GenerationRequest",
    "Placement",
    "Binding",
    "handshake",
    "Task",
    "open_task",
]
