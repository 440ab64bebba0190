"""Everybody's events as one state: what the live view shows and the report is drawn from.

`EventTail` reads the `events.jsonl` files below a run's folder incrementally, whole lines only, oldest first.
`Progress.apply` folds one event into the state; it is a pure function of the events in their order: no clock, no I/O.
Unknown events and unknown fields are ignored, so that a newer process can write for an older reader; docs/events.md
lists them all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = Mapping[str, Any]
"""One parsed line of an events file."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of the learner."""

    step: int
    version: int
    time_unix_seconds: float
    reward_mean: float
    loss: float
    grad_norm: float
    skipped: bool
    num_tokens: int
    num_trajectories: int
    staleness: tuple[int, ...]
    """For each trajectory trained on: how many versions older than the learner its oldest token was."""
    logprob_difference_mean: float
    wait_seconds: float
    compute_seconds: float
    publish_wait_seconds: float
    checkpoint_seconds: float

    @property
    def seconds(self) -> float:
        """Wall time of the step, waiting for trajectories included."""
        return self.wait_seconds + self.compute_seconds + self.publish_wait_seconds + self.checkpoint_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One committed version."""

    version: int
    step: int
    kind: str
    wire_bytes: int
    full_bytes: int
    num_changed: int
    num_elements: int
    epoch: int
    stepped_unix_seconds: float
    committed_unix_seconds: float

    @property
    def density(self) -> float:
        """Part of the elements whose bits changed, 0 to 1."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A worker's engine went to a version whose digest was proved."""

    region: str
    from_version: int | None
    version: int
    wire_bytes: int
    full: bool
    num_changed: int
    stepped_unix_seconds: float
    committed_unix_seconds: float
    seen_unix_seconds: float
    serving_unix_seconds: float
    fetch_seconds: float
    decode_seconds: float
    mirror_seconds: float
    """Scattering into the mirror."""
    stage_seconds: float
    pause_seconds: float
    """Waiting for the decode step in progress."""
    apply_seconds: float
    """Scattering into the engine."""
    audit_seconds: float
    """Digesting live weights."""
    stopped_seconds: float
    """The engine made no token, from the request to pause until it went on."""
    digest: str

    @property
    def step_to_serving_seconds(self) -> float:
        """From the end of the optimizer step to the first token that this version can make."""
        return self.serving_unix_seconds - self.stepped_unix_seconds

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds from step to serving by phase; they add up to `step_to_serving_seconds`.

        publish: encode, store, commit. announce: until the worker began to fetch. fetch, decode: as named. stage:
        scatter into the mirror and prepare the patch. stopped: the engine makes no token. other: what is left, such
        as waiting for a version before this one.
        """
        known = {
            "publish": max(0.0, self.committed_unix_seconds - self.stepped_unix_seconds),
            "announce": max(0.0, self.seen_unix_seconds - max(self.committed_unix_seconds, self.stepped_unix_seconds)),
            "fetch": self.fetch_seconds,
            "decode": self.decode_seconds,
            "stage": self.mirror_seconds + self.stage_seconds,
            "stopped": self.stopped_seconds,
        }
        return {**known, "other": max(0.0, self.step_to_serving_seconds - sum(known.values()))}


PHASES = ("publish", "announce", "fetch", "decode", "stage", "stopped", "other")
"""The phases of `Applied.phases`, in the order in which they happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A worker's engine scored the probe of a version."""

    version: int
    mean: float
    """Of |engine - learner| log-probability over its tokens, in nats; infinite where the engine's was not finite."""
    largest: float


@dataclass(slots=True, kw_only=True)
class Region:
    """What one region's worker has done so far."""

    name: str
    worker_id: str = ""
    engine: str = ""
    version: int | None = None
    seeded: bool | None = None
    """Whether the starting weights came from local disk instead of the WAN."""
    num_starts: int = 0
    applied: list[Applied] = field(default_factory=list)
    num_tokens: int = 0
    num_trajectories: int = 0
    generate_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    """One line for each update that failed, with its phase and reason."""
    probes: list[Scored] = field(default_factory=list)
    num_probe_alarms: int = 0
    end_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes over a region's link for one service."""

    down_bytes: int
    up_bytes: int


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state of a run; `apply` events in the order in which they were written."""

    run: str = ""
    configuration: dict[str, Any] = field(default_factory=dict)
    """What the simulation was started with."""
    started_unix_seconds: float | None = None
    last_unix_seconds: float | None = None
    end_reason: str | None = None
    """Why the simulation ended; None while it runs."""
    learner_step: int = 0
    learner_epochs: list[int] = field(default_factory=list)
    learner_end: str | None = None
    num_skipped: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    """By step number; a step repeated after a restart replaces the first one."""
    published: dict[int, Published] = field(default_factory=dict)
    num_republished: int = 0
    """Versions committed twice: must stay 0."""
    regions: dict[str, Region] = field(default_factory=dict)
    links: dict[tuple[str, str], LinkBytes] = field(default_factory=dict)
    """By region and service; cumulative."""
    ledger: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Changes of state worth telling, with their time."""
    audit: dict[str, Any] = field(default_factory=dict)
    """What the simulation found at the end when it compared every served digest with its manifest."""

    @property
    def version(self) -> int | None:
        """The newest committed version."""
        return max(self.published, default=None)

    @property
    def num_steps(self) -> int:
        """Steps that the run is to make; 0 while unknown."""
        return int(self.configuration.get("num_steps", 0))

    @property
    def weight_bytes(self) -> int:
        """Bytes that crossed the WAN for weights, in both directions, all regions together."""
        return sum(link.down_bytes + link.up_bytes for (_, service), link in self.links.items() if service == "weights")

    @property
    def full_bytes(self) -> int:
        """Bytes that shipping every version after the starting weights whole to every region would have cost."""
        per_region = sum(published.full_bytes for version, published in self.published.items() if version > 0)
        return per_region * len(self.regions)

    @property
    def staleness(self) -> list[int]:
        """Staleness in versions of every trajectory trained on."""
        return [versions for step in self.ordered_steps for versions in step.staleness]

    @property
    def ordered_steps(self) -> list[Step]:
        """All steps in order."""
        return [self.steps[number] for number in sorted(self.steps)]

    def region(self, name: str) -> Region:
        """Return a region's state, created on first mention."""
        return self.regions.setdefault(name, Region(name=name))

    def lag_versions(self, region: str) -> int | None:
        """Return how many versions a region's engine is behind the newest; None before its first."""
        served = self.regions[region].version
        newest = self.version
        return None if served is None or newest is None else max(0, newest - served)

    def lag_seconds(self, region: str, now_unix_seconds: float) -> float | None:
        """Return for how long a version newer than the served one has existed: 0 when current, None before the first."""
        served = self.regions[region].version
        if served is None:
            return None
        waiting = [p.committed_unix_seconds for version, p in self.published.items() if version > served]
        return max(0.0, now_unix_seconds - min(waiting)) if waiting else 0.0

    def apply(self, event: Event) -> None:
        """Fold one event into the state."""
        at = float(event.get("time_unix_seconds", 0.0))
        self.last_unix_seconds = max(at, self.last_unix_seconds or at)
        match event.get("event"):
            case "sim_start":
                self.run = str(event.get("run", ""))
                self.started_unix_seconds = at
                self.configuration = dict(event.get("configuration", {}))
                for name in self.configuration.get("regions", {}):
                    self.region(name)
            case "sim_end":
                self.end_reason = str(event.get("reason", ""))
                self.audit = dict(event.get("audit", {}))
            case "process":
                self.notes.append((at, str(event.get("message", ""))))
            case "link":
                key = (str(event.get("region")), str(event.get("service")))
                self.region(key[0])
                self.links[key] = LinkBytes(
                    down_bytes=int(event.get("down_bytes", 0)), up_bytes=int(event.get("up_bytes", 0))
                )
            case "learner_start":
                self.learner_end = None
                self.learner_step = int(event.get("step", 0))
                self.learner_epochs.append(int(event.get("epoch", 0)))
                if event.get("resumed"):
                    self.notes.append((at, f"learner resumed at step {self.learner_step}, epoch {event.get('epoch')}"))
            case "step":
                self._step(event, at)
            case "published":
                self._published(event)
            case "ledger":
                self.ledger = _plain(event)
            case "learner_end":
                self.learner_end = str(event.get("reason", ""))
                self.num_skipped = int(event.get("num_skipped", 0))
                if isinstance(event.get("counts"), dict):
                    self.ledger = dict(event["counts"])
            case (
                "worker_start"
                | "version_applied"
                | "apply_failed"
                | "probe_scored"
                | "probe_alarm"
                | "generated"
                | "worker_end"
            ):
                self._worker(event, at)

    def _step(self, event: Event, at: float) -> None:
        number = int(event.get("step", 0))
        seconds = event.get("seconds") or {}
        self.learner_step = number
        self.steps[number] = Step(
            step=number,
            version=int(event.get("version", 0)),
            time_unix_seconds=at,
            reward_mean=_number(event, "reward_mean"),
            loss=_number(event, "loss"),
            grad_norm=_number(event, "grad_norm"),
            skipped=bool(event.get("skipped")),
            num_tokens=int(event.get("num_tokens", 0)),
            num_trajectories=int(event.get("num_trajectories", 0)),
            staleness=tuple(int(versions) for versions in event.get("staleness", ())),
            logprob_difference_mean=_number(event, "logprob_difference_mean"),
            wait_seconds=_number(seconds, "wait"),
            compute_seconds=_number(seconds, "compute"),
            publish_wait_seconds=_number(seconds, "publish_wait"),
            checkpoint_seconds=_number(seconds, "checkpoint"),
        )

    def _published(self, event: Event) -> None:
        version = int(event.get("version", 0))
        self.num_republished += version in self.published
        self.published[version] = Published(
            version=version,
            step=int(event.get("step", 0)),
            kind=str(event.get("kind", "")),
            wire_bytes=int(event.get("wire_bytes", 0)),
            full_bytes=int(event.get("full_bytes", 0)),
            num_changed=int(event.get("num_changed", 0)),
            num_elements=int(event.get("num_elements", 0)),
            epoch=int(event.get("epoch", 0)),
            stepped_unix_seconds=_number(event, "stepped_unix_seconds"),
            committed_unix_seconds=_number(event, "committed_unix_seconds"),
        )

    def _worker(self, event: Event, at: float) -> None:
        source = str(event.get("source", "")).removeprefix("worker-")
        region = self.region(str(event.get("region") or source))
        match event.get("event"):
            case "worker_start":
                region.num_starts += 1
                region.end_reason = None
                region.worker_id = str(event.get("worker_id", ""))
                region.engine = str(event.get("engine", ""))
                if region.seeded is None and event.get("seeded") is not None:
                    region.seeded = bool(event.get("seeded"))
                region.version = event.get("version")
                if region.num_starts > 1:
                    self.notes.append((at, f"worker in {region.name} came back (start {region.num_starts})"))
            case "version_applied":
                applied = _applied(region.name, event)
                region.applied.append(applied)
                region.version = applied.version
            case "apply_failed":
                line = f"version {event.get('version')}: {event.get('phase')}: {event.get('reason')}"
                if line not in region.failures[-1:]:
                    self.notes.append((at, f"update failed in {region.name}: {line}"))
                region.failures.append(line)
            case "probe_scored":
                region.probes.append(_scored(event))
            case "probe_alarm":
                region.num_probe_alarms += 1
                scored = _scored(event)
                line = f"the engine in {region.name} computes otherwise than the learner, by up to {scored.largest:.2g} nats"
                self.notes.append((at, f"version {scored.version}: {line}"))
            case "generated":
                region.num_tokens += int(event.get("num_tokens", 0))
                region.num_trajectories += int(event.get("num_trajectories", 0))
                region.generate_seconds += _number(event, "seconds")
            case "worker_end":
                region.end_reason = str(event.get("reason", ""))


def _applied(region: str, event: Event) -> Applied:
    seconds = event.get("seconds") or {}
    from_version = event.get("from_version")
    return Applied(
        region=region,
        from_version=None if from_version is None else int(from_version),
        version=int(event.get("version", 0)),
        wire_bytes=int(event.get("wire_bytes", 0)),
        full=bool(event.get("full")),
        num_changed=int(event.get("num_changed", 0)),
        stepped_unix_seconds=_number(event, "stepped_unix_seconds"),
        committed_unix_seconds=_number(event, "committed_unix_seconds"),
        seen_unix_seconds=_number(event, "seen_unix_seconds"),
        serving_unix_seconds=_number(event, "serving_unix_seconds"),
        fetch_seconds=_number(seconds, "fetch"),
        decode_seconds=_number(seconds, "decode"),
        mirror_seconds=_number(seconds, "mirror"),
        stage_seconds=_number(seconds, "stage"),
        pause_seconds=_number(seconds, "pause"),
        apply_seconds=_number(seconds, "apply"),
        audit_seconds=_number(seconds, "audit"),
        stopped_seconds=_number(seconds, "paused"),
        digest=str(event.get("digest", "")),
    )


def _scored(event: Event) -> Scored:
    mean, largest = (math.inf if event.get(key) is None else float(event[key]) for key in ("mean", "max"))
    return Scored(version=int(event.get("version", 0)), mean=mean, largest=largest)


def _number(fields: Mapping[str, Any], key: str) -> float:
    value = fields.get(key)
    return 0.0 if value is None else float(value)


def _plain(event: Event) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("event", "time_unix_seconds", "source")}


class EventTail:
    """Reads the events files below a folder as they grow, each line once; files may appear at any time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Event]:
        """Return the events written since the last call, in order of their time over all files.

        Each carries `source`, the name of the folder that its file lies in.

        A line still being written is left for the next call; a line that is no event is skipped.
        """
        paths = [self._directory / "events.jsonl", *sorted(self._directory.glob("*/events.jsonl"))]
        timed: list[tuple[float, Event]] = []
        for path in paths:
            # Within a file the order of its lines holds, even where a clock was set back.
            newest = 0.0
            for event in self._read_file(path) if path.is_file() else ():
                newest = max(newest, float(event.get("time_unix_seconds", 0.0)))
                timed.append((newest, event))
        return [event for _, event in sorted(timed, key=lambda pair: pair[0])]

    def _read_file(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while block := file.read(_READ_BYTES):
                end = block.rfind(b"\n") + 1
                if end == 0:
                    if len(block) < _READ_BYTES:
                        return
                    end = len(block)
                for line in block[:end].splitlines():
                    event = _parse(line)
                    if event is not None:
                        yield {"source": path.parent.name, **event}
                self._offsets[path] = self._offsets.get(path, 0) + end
                file.seek(self._offsets[path])


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def load_progress(directory: Path) -> Progress:
    """Return the state of a run from the events files below its folder."""
    progress = Progress()
    for event in EventTail(directory).read():
        progress.apply(event)
    return progress
