"""The engine seam: what a worker needs of whatever generates tokens, and nothing more.

Tensors are named and numbered as in the run's checkpoint (canonical Hugging Face names); how an engine fuses,
shards or ties them is its own affair. Weights cross this border as bits. Threads: `generate` runs in one thread and
holds no lock between decode steps; `stage`, `pause`, `apply`, `load`, `digest` and `resume` come from the updater's
thread.
Implementations: `TransformersEngine` (embedded default); vLLM has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparsewire.rollout.change import Change
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import TensorDigest
from sparsewire.sync.trajectories.types import FinishReason, SamplingParams, VersionSpan
from sparsewire.sync.types import Schema, TensorSpec


class Placement(StrEnum):
    """Where a tensor of the engine gets its bits from."""

    MAPPED = "mapped"
    """One tensor of the run lands here."""
    TIED = "tied"
    """Shares storage with a mapped tensor."""
    FROZEN = "frozen"
    """Never trained, not part of the run; keeps what the engine loaded."""
    DERIVED = "derived"
    """Computed by the engine itself (rotary tables, masks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """One tensor of the engine at checkpoint coordinates."""

    spec: TensorSpec
    placement: Placement
    shares_with: str | None = None
    """For a tied tensor: the name whose storage it shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion wanted."""

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    seed: int
    """Seeds this request's own random stream, so a sample does not depend on its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One completion made."""

    request_id: str
    completion_token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """Generates tokens with weights that can be replaced bit by bit between decode steps."""

    def describe(self) -> Sequence[EngineTensor]:
        """List every tensor of the engine, by checkpoint name."""
        ...

    @property
    def version(self) -> int | None:
        """The version whose bits are loaded and proved; None while there is none and nothing may be served."""
        ...

    def bind(self, schema: Schema) -> None:
        """Fix the run's schema, against which patches number their tensors; called once, after the handshake."""
        ...

    def load(self, tensors: Mapping[str, npt.NDArray[Any]], *, version: int) -> None:
        """Replace all mapped weights; the caller has paused the engine or not started it."""
        ...

    def pause(self, *, timeout: timedelta) -> None:
        """Return once no decode step runs and none will start before `resume`; requests in flight are kept.

        Raises:
            EngineError: the step in progress did not end in time; the engine is not paused.
        """
        ...

    def stage(self, change: Change) -> None:
        """Make ready to apply a change, its inverse included, while generation goes on; forgets what was staged before.

        Whatever costs time belongs here rather than into the pause.

        Raises:
            SparsewireError: the change does not fit this engine; nothing was written.
        """
        ...

    def apply(self, patches: Iterable[TensorPatch], *, version: int) -> None:
        """Scatter absolute bits into the paused engine and flip its version; idempotent.

        A `Change` that was staged is applied at once. Without patches only the version flips; that needs no pause.

        Raises:
            EngineError: it failed part-way; the caller undoes or reloads before `resume`.
        """
        ...

    def withdraw(self) -> None:
        """Hold no version any more: nothing is served, whatever resumes, until a `load` succeeds."""
        ...

    def resume(self) -> None:
        """Let generation go on; resuming an engine that runs is no error."""
        ...

    def digest(self, names: Iterable[str]) -> Mapping[str, TensorDigest]:
        """Return digests of the live weights, read from where generation reads them."""
        ...

    def digest_at(self, patches: Iterable[TensorPatch]) -> Mapping[str, TensorDigest]:
        """Return, by tensor of the run, digests of the live elements that `patches` write."""
        ...

    def encode_chat(self, prompt: str) -> npt.NDArray[np.int32]:
        """Return the token ids of one user message in the model's chat format, ready for the assistant's turn."""
        ...

    def decode_text(self, token_ids: npt.NDArray[np.int32]) -> str:
        """Return the text of completion tokens without special tokens."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Complete a batch of prompts; updates may land between its decode steps.

        Raises:
            EngineError: no version is loaded, or the model failed.
        """
        ...

    def close(self) -> None:
        """Free the model."""
        ...
