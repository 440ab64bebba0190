"""A whole fleet on one machine: real processes, emulated links, supervised until the run has ended.

      learner ◄────────────┬──────────────────┬──────────────────┐
      (store, weights,     │ link us          │ link eu          │ link ap     rate-limited, delayed, counted
       trajectories)       ▼                  ▼                  ▼
                        worker-us          worker-eu          worker-ap

      events.jsonl of everybody ──► Progress ──► live view ──► summary, report.html
      pid files of everybody    ──► Fleet: who runs, who died, who was restarted by hand

One thread (the main one) starts children, polls every `_POLL_SECONDS` and draws; links and the trace recorder have
threads of their own. A child that dies is reported with the command that starts it again; the run goes on and whoever
comes back is found by its pid file. A child that dies before it ever ran ends the simulation at once, with its last
lines. However the simulation ends, no process of it is left: those restarted by hand included.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from sparsewire.deploy.audit import audit_run
from sparsewire.deploy.config_file import Problem
from sparsewire.deploy.live import LiveView
from sparsewire.deploy.models import resolve_model
from sparsewire.deploy.processes import (
    Child,
    ProcessIdentity,
    end_processes,
    log_tail,
    read_pid_file,
    start_child,
)
from sparsewire.deploy.progress import EventTail, Progress
from sparsewire.deploy.report import print_summary, write_report
from sparsewire.deploy.signals import StopSignal
from sparsewire.deploy.sim_plan import (
    SimPlan,
    SimSettings,
    check_settings,
    learner_values,
    plan_simulation,
    restart_command,
    shown,
    worker_values,
    write_config,
)
from sparsewire.deploy.trace import TraceRecorder
from sparsewire.deploy.wan import WanLink
from sparsewire.sync.build import build_name
from sparsewire.sync.errors import SparsewireError
from sparsewire.sync.telemetry import EventLog, RedactingFormatter, secret_values

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_LINK_EVENT_SECONDS = 1.0
_GRACE = timedelta(seconds=20)
"""Time between SIGTERM and SIGKILL: a worker finishes its batch, the learner its step and a checkpoint."""
_BY_REQUEST = 128
"""Exit codes from here on, and negative ones, mean that somebody ended the process: it did not fail by itself."""
_WORKERS_END = timedelta(seconds=180)
"""Time that workers have to end by themselves after the learner has."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One role of the fleet and the process that plays it now."""

    role: str
    directory: Path
    restart: str
    """The command that starts it again by hand."""
    child: Child | None = None
    last: ProcessIdentity | None = None
    down_since: float | None = None
    ended: bool = False
    """It has done all its work."""
    lost: bool = False
    """It stayed away for too long."""


class Fleet:
    """Starts the processes of a run and knows at any time which of them run; times are `time.monotonic()`."""

    def __init__(self, *, members: Sequence[Member], events: EventLog, restart_wait: timedelta) -> None:
        self.members = members
        self._events = events
        self._restart_wait = restart_wait

    def start(self, role: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one role; from the main thread."""
        member = self.member(role)
        member.child = start_child(role, command, directory=member.directory, environment=environment)
        member.last = member.child.identity
        self._say(member, "started", f"{role} started (pid {member.child.identity and member.child.identity.pid})")

    def member(self, role: str) -> Member:
        """Return a role's state."""
        return next(member for member in self.members if member.role == role)

    def exits(self) -> list[tuple[Member, int]]:
        """Return who has ended since the last look, with the exit code; hand it to `settle`."""
        return [
            (member, code)
            for member in self.members
            if member.child is not None and (code := member.child.exit_code()) is not None
        ]

    def settle(self, exits: Sequence[tuple[Member, int]], progress: Progress, now: float) -> None:
        """Judge those who ended, and look whether anybody who was away is back.

        `progress` holds all events written before `exits` was called, so that what a process wrote last is known.

        Raises:
            SparsewireError: a process ended before it ever ran; carries its last lines.
        """
        for member, code in exits:
            self._gone(member, code, progress, now)
        for member in self.members:
            if member.child is None and not member.ended:
                self._look_for_restart(member, now)

    def _gone(self, member: Member, code: int, progress: Progress, now: float) -> None:
        member.child = None
        if has_finished(member.role, progress):
            member.ended = True
            self._say(member, "ended", f"{member.role} has done its work", exit_code=code)
        elif 0 < code < _BY_REQUEST and not has_started(member.role, progress):
            self._say(member, "failed", f"{member.role} failed to start ({how_it_ended(code)})", exit_code=code)
            raise SparsewireError(
                f"{member.role} failed to start ({how_it_ended(code)}); the end of {member.directory / 'log.txt'}:\n"
                f"{log_tail(member.directory)}"
            )
        else:
            member.down_since = now
            wait = int(self._restart_wait.total_seconds())
            message = f"{member.role} died ({how_it_ended(code)}); within {wait} s start it again: {member.restart}"
            self._say(member, "died", message, exit_code=code)

    def _look_for_restart(self, member: Member, now: float) -> None:
        identity = read_pid_file(member.directory)
        if identity is not None and identity != member.last:
            member.child = Child(role=member.role, directory=member.directory, process=None, identity=identity)
            member.last, member.down_since, member.lost = identity, None, False
            self._say(member, "adopted", f"{member.role} was restarted by hand (pid {identity.pid})")
        elif not member.lost and member.down_since is not None:
            away = now - member.down_since
            if away > self._restart_wait.total_seconds():
                member.lost = True
                self._say(member, "lost", f"{member.role} has been away for {away:.0f} s; the run goes on without it")

    def _say(self, member: Member, state: str, message: str, **fields: object) -> None:
        logger.info("%s", message)
        self._events.emit("process", role=member.role, state=state, message=message, **fields)

    def end(self, grace: timedelta) -> None:
        """End everything that runs, also what was restarted by hand since the last poll; returns when it is gone."""
        children = []
        for member in self.members:
            if member.child is not None:
                children.append(member.child)
            identity = read_pid_file(member.directory)
            if identity is not None and (member.child is None or identity != member.child.identity):
                children.append(Child(role=member.role, directory=member.directory, process=None, identity=identity))
            member.child = None
        for role in end_processes(children, grace=grace):
            logger.warning("%s did not end within %s and was killed", role, grace)
            self._events.emit("process", role=role, state="killed", message=f"{role} did not stop in time: killed")


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def has_started(role: str, progress: Progress) -> bool:
    """Say whether a role has ever come up."""
    if role == "learner":
        return bool(progress.learner_epochs)
    region = progress.regions.get(role.removeprefix("worker-"))
    return region is not None and (region.num_starts > 0 or bool(region.applied))


def has_finished(role: str, progress: Progress) -> bool:
    """Say whether a role has nothing left to do in this run."""
    learner_done = progress.learner_end is not None and progress.learner_step >= progress.num_steps
    if role == "learner":
        return learner_done
    region = progress.regions.get(role.removeprefix("worker-"))
    return region is not None and (learner_done or region.end_reason == "run_complete")


def simulate(settings: SimSettings, *, stop: StopSignal, console: Console, known: Sequence[Problem] = ()) -> int:
    """Run a simulation to its end and return its exit code; `known` are problems of the settings found before.

    0 when every step was made and every region ended at the newest version with verified digests, 1 when not, 128
    plus the signal when it was asked to stop.

    Raises:
        ConfigError: the settings cannot work; lists every problem.
        SparsewireError: a process failed to start, or one could not be ended.
    """
    check_settings(settings, known=known)
    console.print(f"model {settings.model}: resolving", style="dim")
    plan = plan_simulation(settings, model=resolve_model(settings.model))
    settings.directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_log_file(settings.directory / "log.txt"))
        events = stack.enter_context(EventLog(settings.directory / "events.jsonl"))
        links = [stack.enter_context(_link(plan, number)) for number in range(len(settings.regions))]
        _write_configs(plan, links)
        _greet(plan, console)
        events.emit("sim_start", run=settings.run, configuration=_configuration(plan))
        roles = ["learner", *(f"worker-{region.name}" for region in settings.regions)]
        fleet = Fleet(
            members=[
                Member(role=role, directory=settings.directory / role, restart=shown(restart_command(plan, role)))
                for role in roles
            ],
            events=events,
            restart_wait=settings.restart_wait,
        )
        recorder = None
        if settings.record_trace is not None:
            recorder = TraceRecorder(url=plan.store_url, run=settings.run, directory=settings.record_trace)
            stack.callback(recorder.stop)
        stack.callback(lambda: fleet.end(_GRACE if stop.num_signals < 2 else timedelta()))
        for role in roles:
            fleet.start(role, [sys.executable, "-m", "sparsewire.deploy.cli", *restart_command(plan, role)[1:]], {})
        if recorder is not None:
            recorder.start()
        supervisor = _Supervisor(plan=plan, fleet=fleet, links=links, events=events, stop=stop)
        with LiveView(console=console, live=settings.live) as view:
            reason = supervisor.run(view)
            view.say(f"ending the run: {reason}")
            fleet.end(_GRACE if stop.num_signals < 2 else timedelta())
        return _conclude(plan, supervisor, recorder, reason, console)


class _Supervisor:
    """The loop in the main thread: events in, links counted, processes watched, view drawn."""

    def __init__(
        self, *, plan: SimPlan, fleet: Fleet, links: Sequence[WanLink], events: EventLog, stop: StopSignal
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._links = links
        self.events = events
        self._stop = stop
        self._tail = EventTail(plan.settings.directory)
        self._links_at = 0.0
        self.progress = Progress()

    def run(self, view: LiveView) -> str:
        """Poll until the run has ended one way or another, and return which."""
        learner_gone_at: float | None = None
        while True:
            now = time.monotonic()
            if now - self._links_at >= _LINK_EVENT_SECONDS:
                self.count_links()
                self._links_at = now
            exits = self._fleet.exits()
            self.read_events()
            self._fleet.settle(exits, self.progress, now)
            view.show(self.progress, now_unix_seconds=time.time())
            if self._stop.event.is_set():
                return "stopped by request"
            learner, *workers = self._fleet.members
            if learner.lost:
                return "the learner is lost"
            if all(member.lost for member in workers):
                return "all workers are lost"
            if learner.ended:
                learner_gone_at = learner_gone_at or now
                if all(member.ended or member.lost or member.down_since for member in workers):
                    return "complete"
                if now - learner_gone_at > _WORKERS_END.total_seconds():
                    return f"workers did not end within {_WORKERS_END} of the learner"
            self._stop.event.wait(_POLL_SECONDS)

    @property
    def stop_code(self) -> int | None:
        """The exit code of a run that was asked to stop."""
        return self._stop.exit_code

    def read_events(self) -> None:
        """Fold everything that has been written since the last time into the state."""
        for event in self._tail.read():
            self.progress.apply(event)

    def count_links(self) -> None:
        """Write down what has passed each link."""
        for link in self._links:
            for service, count in link.counts().items():
                self.events.emit(
                    "link",
                    region=link.region,
                    service=service,
                    down_bytes=count.down_bytes,
                    up_bytes=count.up_bytes,
                )


def _conclude(
    plan: SimPlan, supervisor: _Supervisor, recorder: TraceRecorder | None, reason: str, console: Console
) -> int:
    """Check what was served, write the last event and the report, print the summary, and return the exit code."""
    settings = plan.settings
    supervisor.count_links()
    supervisor.read_events()
    progress = supervisor.progress
    audit = audit_run(plan.store_url, run=settings.run, progress=progress)
    supervisor.events.emit("sim_end", reason=reason, audit=audit)
    supervisor.read_events()
    if recorder is not None and progress.version is not None and reason == "complete":
        recorder.finish(progress.version)
        console.print(f"trace: {recorder.num_versions} versions in {settings.record_trace}")
    report = settings.directory / "report.html"
    write_report(progress, report)
    print_summary(progress, console)
    console.print(f"report: {report}")
    if (code := supervisor.stop_code) is not None:
        return code
    return 0 if reason == "complete" and audit["verified"] and (recorder is None or recorder.failure is None) else 1


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Send this process's log lines to a file while the terminal belongs to the live view."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    handler = logging.FileHandler(path)
    handler.setFormatter(RedactingFormatter(json_lines=False, secrets=secret_values(os.environ)))
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        handler.close()


def _link(plan: SimPlan, number: int) -> WanLink:
    region = plan.settings.regions[number]
    return WanLink(
        region=region.name,
        round_trip=region.round_trip,
        bits_per_second=plan.settings.bits_per_second,
        services=plan.link_targets,
    )


def _write_configs(plan: SimPlan, links: Sequence[WanLink]) -> None:
    directory = plan.settings.directory
    command = shown(restart_command(plan, "learner"))
    write_config(directory / "learner.toml", learner_values(plan), comment=f"Start with: {command}")
    for number, link in enumerate(links):
        role = f"worker-{link.region}"
        addresses = {service: link.address(service) for service in plan.link_targets}
        command = shown(restart_command(plan, role))
        write_config(
            directory / f"{role}.toml",
            worker_values(plan, number, addresses),
            comment=f"Start with: {command} (its addresses are those of the simulation's links)",
        )


def _greet(plan: SimPlan, console: Console) -> None:
    settings = plan.settings
    regions = ", ".join(
        f"{region.name} {region.round_trip / timedelta(milliseconds=1):g} ms" for region in settings.regions
    )
    console.print(f"[bold]run {settings.run}[/bold]: {settings.num_steps} steps of {settings.task}, regions {regions}")
    console.print(f"everything is in {settings.directory}; a process that died can be started again with")
    for role in ["learner", *(f"worker-{region.name}" for region in settings.regions)]:
        console.print(f"  {shown(restart_command(plan, role))}", style="cyan", soft_wrap=True, highlight=False)
    if not plan.counts_weights:
        console.print(
            "weights do not pass the links (no plain http endpoint): their bytes are those that workers report"
        )


def _configuration(plan: SimPlan) -> dict[str, object]:
    """Return what the report's header tells; plain JSON values."""
    settings = plan.settings
    return {
        "model": settings.model,
        "task": settings.task,
        "num_steps": settings.num_steps,
        "ranks": settings.ranks,
        "regions": {region.name: region.round_trip / timedelta(milliseconds=1) for region in settings.regions},
        "rate_mbit": settings.bits_per_second / 1e6,
        "store": plan.store_url,
        "weights_by": "grpc" if plan.weights_address else "store",
        "weights_counted": plan.counts_weights,
        "seed": settings.seed,
        "build": build_name(),
    }
