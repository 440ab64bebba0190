"""What a simulation is to be, checked all at once, and the files that its processes are started from.

`SimSettings` is what the command line gives; `check_settings` finds every problem before anything is created;
`SimPlan` fixes folders, ports and URLs; `write_configs` writes one TOML per process, with which any of them can also
be started by hand.

    RUNS/RUN/events.jsonl  log.txt  report.html  learner.toml  worker-REGION.toml
    RUNS/RUN/store/                                    versions, unless another store is given
    RUNS/RUN/learner/      RUNS/RUN/worker-REGION/     state, events.jsonl, log.txt and pid of each process
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from sparsewire.deploy.config_file import (
    Problem,
    describe_unusable_store,
    describe_unwritable,
    problems_error,
    value_problems,
)
from sparsewire.deploy.models import describe_missing_model
from sparsewire.rollout.config import WorkerConfig
from sparsewire.rollout.tasks import open_task
from sparsewire.sync.errors import ConfigError
from sparsewire.sync.store.location import S3Location, parse_store_url
from sparsewire.trainer.config import LearnerConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIRST_PORT = 20_000
_LAST_PORT = 32_000
"""Ports are taken from below the ephemeral range, so that no outgoing connection takes one while its owner restarts."""
_PORT_ATTEMPTS = 200
_RETENTION_SLACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    """One emulated region."""

    name: str
    round_trip: timedelta
    """To the learner and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """What to simulate."""

    run: str
    runs_directory: Path
    model: str
    task: str
    num_steps: int
    ranks: int
    regions: tuple[RegionSpec, ...]
    bits_per_second: float
    """Of each region's link, in each direction."""
    store: str | None
    """None: a directory of the run, served by the learner over gRPC."""
    seed: int
    record_trace: Path | None
    restart_wait: timedelta
    """How long a process that died may stay away before it is given up."""
    live: bool
    metrics_port: int | None
    """The learner's; workers get the following ones."""
    learner: Mapping[str, object] = field(default_factory=dict)
    """Further keys of learner.toml."""
    worker: Mapping[str, object] = field(default_factory=dict)
    """Further keys of every worker's file."""

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return self.runs_directory / self.run


def parse_regions(text: str) -> tuple[RegionSpec, ...]:
    """Return the regions of `us=2,eu=80`: names with round-trip times in milliseconds.

    Raises:
        ConfigError: names the part that is wrong.
    """
    regions: list[RegionSpec] = []
    for part in text.split(","):
        name, equals, milliseconds = part.strip().partition("=")
        try:
            round_trip = timedelta(milliseconds=float(milliseconds))
        except (ValueError, OverflowError):
            round_trip = timedelta(-1)
        if not equals or not _NAME.fullmatch(name) or not timedelta() <= round_trip <= timedelta(seconds=10):
            raise ConfigError(
                f"region {part.strip()[:80]!r} is not NAME=MILLISECONDS between 0 and 10000; "
                "write for example us=2,eu=80,ap=150"
            )
        if any(region.name == name for region in regions):
            raise ConfigError(f"region {name!r} is listed twice; give each a name of its own")
        regions.append(RegionSpec(name=name, round_trip=round_trip))
    return tuple(regions)


def check_settings(settings: SimSettings, *, known: Sequence[Problem] = ()) -> None:
    """Refuse a simulation that cannot work; `known` are problems found while the settings were put together.

    Raises:
        ConfigError: lists every problem.
    """
    problems = list(known)
    if not _NAME.fullmatch(settings.run):
        problems.append(Problem("--run", "must be 1 to 64 letters, digits, dots, dashes or underscores"))
    elif settings.directory.is_dir() and any(settings.directory.iterdir()):
        problems.append(Problem("--run", f"{settings.directory} is not empty; choose another --run or remove it"))
    elif reason := describe_unwritable(settings.runs_directory):
        problems.append(Problem("--directory", reason))
    if reason := describe_missing_model(settings.model):
        problems.append(Problem("--model", reason))
    try:
        open_task(settings.task)
    except ConfigError as error:
        problems.append(Problem("--task", str(error)))
    if settings.store is not None and (reason := _store_problem(settings.store)):
        problems.append(Problem("--store", reason))
    if settings.record_trace is not None:
        if (settings.record_trace / "base.safetensors").exists():
            problems.append(Problem("--record-trace", f"{settings.record_trace} holds a trace already; give another"))
        elif reason := describe_unwritable(settings.record_trace):
            problems.append(Problem("--record-trace", reason))
    for option, kind, values in (
        ("--learner-set", LearnerConfig, settings.learner),
        ("--worker-set", WorkerConfig, settings.worker),
    ):
        problems += [Problem(f"{option} {found.key}", found.text) for found in value_problems(kind, values)]
    if importlib.util.find_spec("matplotlib") is None:
        problems.append(Problem("", "the report needs matplotlib: pip install 'sparsewire[demo]'"))
    if settings.metrics_port is not None:
        for offset, role in enumerate(["learner", *(f"worker {region.name}" for region in settings.regions)]):
            if not port_is_free(settings.metrics_port + offset):
                problems.append(
                    Problem("--metrics-port", f"port {settings.metrics_port + offset} for the {role} is taken")
                )
    if problems:
        raise problems_error(problems, where="the simulation")


def _store_problem(url: str) -> str | None:
    try:
        location = parse_store_url(url)
    except ConfigError as error:
        return str(error)
    if url.startswith("memory://"):
        return "memory:// lives in one process only; use file:///directory, s3://bucket/prefix, or leave --store out"
    return describe_unusable_store(location.url, writable=True)


def port_is_free(port: int) -> bool:
    """Say whether this machine could listen on a port right now."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
    except (OSError, OverflowError):
        return False
    return True


def pick_port(taken: set[int]) -> int:
    """Return a free loopback port outside `taken`, and add it there.

    Raises:
        ConfigError: none was found.
    """
    for _ in range(_PORT_ATTEMPTS):
        port = random.SystemRandom().randrange(_FIRST_PORT, _LAST_PORT)
        if port not in taken and port_is_free(port):
            taken.add(port)
            return port
    raise ConfigError(f"no free port between {_FIRST_PORT} and {_LAST_PORT}; end other runs on this machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPlan:
    """Where everything of a simulation is."""

    settings: SimSettings
    model: Path
    store_url: str
    """As the learner and the simulation itself open it."""
    weights_address: str | None
    """The learner's weight service; None when workers read the store."""
    trajectories_address: str
    link_targets: Mapping[str, str]
    """What each region's link leads to: service to real host:port."""

    @property
    def counts_weights(self) -> bool:
        """Whether weights pass a link and are counted byte by byte."""
        return "weights" in self.link_targets

    def weights_url(self, link_address: str | None) -> str:
        """Return the URL from which a worker behind a link gets versions; `link_address` is that of `weights`."""
        if self.weights_address is not None:
            return f"grpc://{link_address}"
        location = parse_store_url(self.store_url)
        if link_address is not None and isinstance(location, S3Location):
            # The signature of a request covers its Host header, so the worker must believe in the link's address.
            return replace(location, endpoint_url=f"http://{link_address}").url
        return location.url


def plan_simulation(settings: SimSettings, *, model: Path) -> SimPlan:
    """Choose ports and URLs; creates nothing."""
    taken: set[int] = set()
    trajectories_address = f"127.0.0.1:{pick_port(taken)}"
    targets = {"trajectories": trajectories_address}
    weights_address = None
    if settings.store is None:
        store_url = (settings.directory.resolve() / "store").as_uri()
        weights_address = targets["weights"] = f"127.0.0.1:{pick_port(taken)}"
    else:
        location = parse_store_url(settings.store)
        store_url = location.url
        endpoint = urlsplit(_endpoint(location)) if isinstance(location, S3Location) else None
        if endpoint is not None and endpoint.scheme == "http" and endpoint.hostname:
            targets["weights"] = f"{endpoint.hostname}:{endpoint.port or 80}"
    return SimPlan(
        settings=settings,
        model=model,
        store_url=store_url,
        weights_address=weights_address,
        trajectories_address=trajectories_address,
        link_targets=targets,
    )


def _endpoint(location: S3Location) -> str:
    return location.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def learner_values(plan: SimPlan) -> dict[str, object]:
    """Return the content of learner.toml."""
    settings = plan.settings
    values: dict[str, object] = {
        "run": settings.run,
        "model": str(plan.model),
        "store": plan.store_url,
        "directory": str(settings.directory.resolve() / "learner"),
        "trajectories_address": plan.trajectories_address,
        "task": settings.task,
        "seed": settings.seed,
        "num_steps": settings.num_steps,
        "retain_versions": max(32, settings.num_steps + _RETENTION_SLACK),
    }
    if plan.weights_address is not None:
        values["weights_address"] = plan.weights_address
    if settings.metrics_port is not None:
        values["metrics_port"] = settings.metrics_port
    return {**values, **settings.learner}


def worker_values(plan: SimPlan, number: int, link_addresses: Mapping[str, str]) -> dict[str, object]:
    """Return the content of a worker's file; `link_addresses` are those of its region's link, by service."""
    settings = plan.settings
    region = settings.regions[number].name
    values: dict[str, object] = {
        "run": settings.run,
        "model": str(plan.model),
        "weights": plan.weights_url(link_addresses.get("weights")),
        "trajectories": link_addresses["trajectories"],
        "region": region,
        "worker_id": f"worker-{region}",
        "directory": str(settings.directory.resolve() / f"worker-{region}"),
        "num_threads": 1,
        "seed": settings.seed,
    }
    if settings.metrics_port is not None:
        values["metrics_port"] = settings.metrics_port + 1 + number
    return {**values, **settings.worker}


def write_config(path: Path, values: Mapping[str, object], *, comment: str) -> None:
    """Write a flat TOML file."""
    lines = [f"# {comment}", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case _:
            raise ConfigError(
                f"a configuration file cannot hold a {type(value).__name__}; give text, a number or a list"
            )


def restart_command(plan: SimPlan, role: str) -> Sequence[str]:
    """Return the command with which a person starts a role again."""
    config = plan.settings.directory / f"{role}.toml"
    kind = "learner" if role == "learner" else "worker"
    ranks = ["--ranks", str(plan.settings.ranks)] if kind == "learner" and plan.settings.ranks > 1 else []
    return ["sparsewire", kind, "--config", str(config), *ranks]


def shown(command: Sequence[str]) -> str:
    """Return a command as one types it."""
    return shlex.join(command)
