"""The learner: GRPO on any Hugging Face causal language model, sharded by FSDP2, and the reference user of the publisher.

In the order of the flow: `config`, `ranks` (processes), `model` and `dither` (sharded weights), `feed` (batches from the ledger),
`batch` (padding and dealing out), `loss`, `learner` (one step), `extract` (own shard of the view), `outlet`
(versions out), `checkpoint`, `loop` (the process).
"""

from __future__ import annotations

from sparsewire.trainer.config import ComputeDtype, Device, LearnerConfig
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.loop import run_learner

__all__ = ["LearnerConfig", "Device", "ComputeDtype", "local_view", "run_learner"]
