"""Leases in, scored trajectories out: the part of the worker that knows both the engine and the task.

Called by the worker loop in its own thread. A sample is a function of (worker's seed, run, group, sample, attempt) and
of the versions that made it. Completions that ended by abort are left out: their leases expire and are handed out
again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Histogram

from sparsewire.rollout.engine import Engine, Generation, GenerationRequest
from sparsewire.rollout.tasks import Task, open_task
from sparsewire.sync.telemetry import EventLog
from sparsewire.sync.trajectories.types import FinishReason, Lease, Trajectory, TrajectoryKey

_TOKENS = Counter("sparsewire_worker_generated_tokens_total", "Completion tokens sampled.")
_TRAJECTORIES = Counter("sparsewire_worker_trajectories_total", "Completions by how they ended.", ["outcome"])
_BATCH_SECONDS = Histogram(
    "sparsewire_worker_batch_seconds",
    "Time to generate one batch of prompt groups.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)


class Sampler:
    """Turns leases into trajectories."""

    def __init__(
        self,
        *,
        engine: Engine,
        events: EventLog,
        run: str,
        worker_id: str,
        region: str,
        seed: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._events = events
        self._run = run
        self._worker_id = worker_id
        self._region = region
        self._seed = seed
        self._clock = clock
        self._tasks: dict[str, Task] = {}
        self.num_trajectories = 0
        """Trajectories made so far."""

    def sample(self, leases: Sequence[Lease]) -> list[Trajectory]:
        """Generate and score every sample of `leases` as one batch.

        Raises:
            ConfigError: a lease names a task that is not known here.
            EngineError: the engine holds no proved weights, or failed.
        """
        prompts = {lease.group: self._prompt(lease) for lease in leases}
        work = [(lease, sample) for lease in leases for sample in lease.samples]
        started = time.monotonic()
        generations = self._engine.generate(
            [self._request(lease, sample, prompts[lease.group]) for lease, sample in work]
        )
        seconds = time.monotonic() - started
        _BATCH_SECONDS.observe(seconds)
        trajectories: list[Trajectory] = []
        made: dict[int, list[Trajectory]] = {lease.group: [] for lease in leases}
        for (lease, sample), generation in zip(work, generations, strict=True):
            _TOKENS.inc(len(generation.completion_token_ids))
            _TRAJECTORIES.labels(generation.finish_reason.value).inc()
            if generation.finish_reason is FinishReason.ABORT:
                continue
            trajectory = self._trajectory(lease, sample, prompts[lease.group], generation)
            trajectories.append(trajectory)
            made[lease.group].append(trajectory)
        for group, finished in made.items():
            self._report(group, finished, seconds)
        self.num_trajectories += len(trajectories)
        return trajectories

    def _task(self, name: str) -> Task:
        if name not in self._tasks:
            self._tasks[name] = open_task(name)
        return self._tasks[name]

    def _prompt(self, lease: Lease) -> npt.NDArray[np.int32]:
        return self._engine.encode_chat(self._task(lease.task).prompt(lease.item))

    def _request(self, lease: Lease, sample: int, prompt: npt.NDArray[np.int32]) -> GenerationRequest:
        name = f"{lease.group}/{sample}/{lease.attempt}"
        digest = hashlib.sha256(f"{self._seed} {self._run} {name}".encode()).digest()
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=lease.sampling,
            seed=int.from_bytes(digest[:8], "little"),
        )

    def _trajectory(
        self, lease: Lease, sample: int, prompt: npt.NDArray[np.int32], generation: Generation
    ) -> Trajectory:
        completion = self._engine.decode_text(generation.completion_token_ids)
        return Trajectory(
            run=self._run,
            key=TrajectoryKey(group=lease.group, sample=sample, attempt=lease.attempt),
            task=lease.task,
            item=lease.item,
            worker_id=self._worker_id,
            region=self._region,
            prompt_token_ids=prompt,
            completion_token_ids=generation.completion_token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            reward=self._task(lease.task).score(lease.item, completion),
            finish_reason=generation.finish_reason,
            created_unix_seconds=self._clock(),
        )

    def _report(self, group: int, finished: Sequence[Trajectory], seconds: float) -> None:
        if not finished:
            return
        versions = [span.version for trajectory in finished for span in trajectory.spans]
        self._events.emit(
            "generated",
            group=group,
            num_trajectories=len(finished),
            num_tokens=sum(len(trajectory.completion_token_ids) for trajectory in finished),
            seconds=round(seconds, 6),
            version=max(versions),
            oldest_version=min(versions),
            reward_mean=sum(trajectory.reward for trajectory in finished) / len(finished),
        )
