"""The learner: GRPO on any Hugging Face causal language model, sharded by FSDP2, and the reference user of the publisher.

In the order of the flow: `config`, `ranks` (processes), `model` and `dither` (sharded weights), `feed` (batches from the ledger),
`batch` (padding and dealing out), `loss`, `learner` (one step), `extract` (own shard of the view), `probe`
(what the learner makes of a few tokens), `outlet` (versions out), `checkpoint`, `loop` (the process).

Only the configuration is re-exported here; `extract.local_view` and `loop.run_learner` import torch and are named in
full.
"""

from __future__ import annotations

from sparsewire.trainer.config import ComputeDtype, Device, LearnerConfig, ViewKind

__all__ = ["LearnerConfig", "Device", "ComputeDtype", "ViewKind"]
