"""The simulation's supervisor notices deaths, adopts what was restarted by hand, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sparsewire.deploy.config_file import load_learner_config, load_worker_config
from sparsewire.deploy.processes import identify
from sparsewire.deploy.progress import EventTail, Progress
from sparsewire.deploy.sim_plan import (
    SimSettings,
    check_settings,
    learner_values,
    parse_regions,
    pick_port,
    plan_simulation,
    port_is_free,
    restart_command,
    worker_values,
    write_config,
)
from sparsewire.deploy.simulate import Fleet, Member
from sparsewire.sync.errors import ConfigError, SparsewireError
from sparsewire.sync.telemetry import EventLog

ROLE = """
import sys, time
from pathlib import Path
from sparsewire.deploy.processes import follow_parent, write_pid_file
from sparsewire.sync.telemetry import EventLog
follow_parent()
directory = Path(sys.argv[1])
write_pid_file(directory)
with EventLog(directory / "events.jsonl") as events:
    events.emit("worker_start", region="us", worker_id="worker-us")
    while not (directory / "finish").exists():
        time.sleep(0.02)
    events.emit("worker_end", region="us", reason="run_complete")
"""


class Bench:
    """One worker role in a fleet, and the state that its events give."""

    def __init__(self, directory: Path, *, restart_wait: timedelta) -> None:
        self.directory = directory
        self.role_directory = directory / "worker-us"
        self.member = Member(role="worker-us", directory=self.role_directory, restart="start worker-us")
        self.events = EventLog(directory / "events.jsonl")
        self.fleet = Fleet(members=[self.member], events=self.events, restart_wait=restart_wait)
        self.progress = Progress()
        self._tail = EventTail(directory)

    def poll(self, *, now: float | None = None) -> None:
        exits = self.fleet.exits()
        for event in self._tail.read():
            self.progress.apply(event)
        self.fleet.settle(exits, self.progress, time.monotonic() if now is None else now)

    def poll_until(self, condition: Callable[[], object], *, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if condition():
                return
            assert time.monotonic() < deadline, f"not within {seconds} s; notes: {self.progress.notes}"
            time.sleep(0.02)

    def notes(self) -> list[str]:
        for event in self._tail.read():
            self.progress.apply(event)
        return [message for _, message in self.progress.notes]

    @property
    def num_starts(self) -> int:
        return self.progress.region("us").num_starts


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, restart_wait=timedelta(seconds=30))
    yield bench
    bench.fleet.end(timedelta(seconds=5))
    bench.events.close()


def start(bench: Bench) -> None:
    bench.fleet.start("worker-us", [sys.executable, "-c", ROLE, str(bench.role_directory)], {})
    bench.poll_until(lambda: bench.num_starts == 1)


def kill_child(bench: Bench) -> None:
    assert bench.member.child is not None
    assert bench.member.child.identity is not None
    os.kill(bench.member.child.identity.pid, signal.SIGKILL)
    bench.poll_until(lambda: bench.member.child is None)


def test_a_role_that_does_its_work_has_ended(bench: Bench) -> None:
    start(bench)
    (bench.role_directory / "finish").touch()
    bench.poll_until(lambda: bench.member.ended)
    assert bench.notes()[-1] == "worker-us has done its work"


def test_a_role_that_dies_is_reported_with_its_command_and_adopted_when_restarted_by_hand(bench: Bench) -> None:
    start(bench)
    kill_child(bench)
    assert "worker-us died (signal 9); within 30 s start it again: start worker-us" in bench.notes()
    with subprocess.Popen([sys.executable, "-c", ROLE, str(bench.role_directory)]) as by_hand:
        bench.poll_until(lambda: bench.member.child is not None)
        assert bench.member.child is not None
        assert bench.member.child.identity == identify(by_hand.pid)
        bench.poll_until(lambda: bench.num_starts == 2)
        (bench.role_directory / "finish").touch()
        bench.poll_until(lambda: bench.member.ended)
        assert by_hand.wait(10) == 0
    assert any("was restarted by hand" in note for note in bench.notes())


def test_a_role_that_stays_away_is_lost_and_found_again_when_it_comes_late(bench: Bench) -> None:
    start(bench)
    kill_child(bench)
    bench.poll(now=time.monotonic() + 29)
    assert not bench.member.lost
    bench.poll(now=time.monotonic() + 31)
    assert bench.member.lost
    with subprocess.Popen([sys.executable, "-c", ROLE, str(bench.role_directory)]) as by_hand:
        bench.poll_until(lambda: bench.member.child is not None)
        assert not bench.member.lost
        bench.fleet.end(timedelta(seconds=5))
        assert by_hand.wait(10) != 0


def test_ending_the_fleet_ends_also_what_was_restarted_by_hand_since_the_last_look(bench: Bench) -> None:
    start(bench)
    kill_child(bench)
    with subprocess.Popen([sys.executable, "-c", ROLE, str(bench.role_directory)]) as by_hand:
        deadline = time.monotonic() + 20
        while (bench.role_directory / "events.jsonl").read_text().count("worker_start") != 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        bench.fleet.end(timedelta(seconds=5))
        assert by_hand.wait(10) == -signal.SIGTERM


def test_a_role_that_never_came_up_ends_the_simulation_with_its_last_lines(bench: Bench) -> None:
    program = "import sys; print('first line'); sys.exit('sparsewire: the configuration has a problem')"
    bench.fleet.start("worker-us", [sys.executable, "-c", program], {})
    with pytest.raises(SparsewireError, match=r"exit code 1.*\n(.*\n)*.*the configuration has a problem"):
        bench.poll_until(lambda: False)


def settings(tmp_path: Path, **changes: object) -> SimSettings:
    values: dict[str, object] = {
        "run": "r1",
        "runs_directory": tmp_path / "runs",
        "model": "smollm2",
        "task": "addition",
        "num_steps": 3,
        "ranks": 1,
        "regions": parse_regions("us=2,eu=80.5"),
        "bits_per_second": 2e8,
        "store": None,
        "seed": 5,
        "record_trace": None,
        "restart_wait": timedelta(seconds=1),
        "live": False,
        "metrics_port": None,
    }
    return SimSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_regions_are_names_with_milliseconds() -> None:
    regions = parse_regions("us=2, eu=80.5")
    assert [(region.name, region.round_trip) for region in regions] == [
        ("us", timedelta(milliseconds=2)),
        ("eu", timedelta(milliseconds=80.5)),
    ]


@pytest.mark.parametrize(
    "text", ["", "us", "us=", "us=x", "us=-1", "us=nan", "us=inf", "us=1,us=2", "u s=1", "us=99999"]
)
def test_regions_that_make_no_sense_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"us=2,eu=80|listed twice"):
        parse_regions(text)


def test_the_written_files_are_configurations_that_load(tmp_path: Path, tiny_model: Path) -> None:
    chosen = settings(
        tmp_path, learner={"groups_per_step": 2, "betas": [0.9, 0.99]}, worker={"idle_timeout_seconds": 60.0}
    )
    check_settings(chosen)
    plan = plan_simulation(chosen, model=tiny_model)
    chosen.directory.mkdir(parents=True)
    write_config(chosen.directory / "learner.toml", learner_values(plan), comment="a learner")
    learner = load_learner_config(chosen.directory / "learner.toml", {})
    assert (learner.run, learner.num_steps, learner.groups_per_step, learner.betas) == ("r1", 3, 2, (0.9, 0.99))
    assert learner.weights_address == plan.weights_address
    addresses = {"weights": "127.0.0.1:1234", "trajectories": "127.0.0.1:1235"}
    write_config(chosen.directory / "worker-eu.toml", worker_values(plan, 1, addresses), comment="a worker")
    worker = load_worker_config(chosen.directory / "worker-eu.toml", {})
    assert (worker.region, worker.weights, worker.trajectories) == ("eu", "grpc://127.0.0.1:1234", "127.0.0.1:1235")
    assert worker.idle_timeout_seconds == 60.0
    assert list(restart_command(plan, "worker-eu")) == [
        "sparsewire",
        "worker",
        "--config",
        str(chosen.directory / "worker-eu.toml"),
    ]


def test_workers_reach_an_http_store_through_their_link(tmp_path: Path, tiny_model: Path) -> None:
    url = "s3://bucket/prefix?endpoint_url=http://127.0.0.1:8333&region=eu-central-1"
    plan = plan_simulation(settings(tmp_path, store=url), model=tiny_model)
    assert plan.weights_address is None
    assert plan.link_targets["weights"] == "127.0.0.1:8333"
    through = plan.weights_url("127.0.0.1:4000")
    assert through == "s3://bucket/prefix?endpoint_url=http://127.0.0.1:4000&region=eu-central-1"
    assert plan.store_url == url


def test_workers_reach_a_store_behind_tls_directly(tmp_path: Path, tiny_model: Path) -> None:
    url = "s3://bucket/prefix?endpoint_url=https://store.example"
    plan = plan_simulation(settings(tmp_path, store=url), model=tiny_model)
    assert not plan.counts_weights
    assert plan.weights_url(None) == url


def test_a_folder_that_is_not_empty_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    (tmp_path / "runs" / "r1" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        check_settings(settings(tmp_path))


def test_all_problems_of_a_simulation_are_found_at_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    (trace / "base.safetensors").touch()
    broken = settings(
        tmp_path,
        run="a/b",
        model="smollm",
        task="adition",
        store="memory://x",
        record_trace=trace,
        learner={"lerning_rate": 1, "num_threads": 0},
        worker={"pause_timeout_seconds": -1},
    )
    with pytest.raises(ConfigError) as refusal:
        check_settings(broken)
    message = str(refusal.value)
    assert message.startswith("the simulation has 8 problems:")
    for wanted in (
        "--run",
        "did you mean 'smollm2'",
        "did you mean addition",
        "memory:// lives in one process",
        "holds a trace already",
        "did you mean learning_rate?",
        "--learner-set num_threads",
        "--worker-set pause_timeout_seconds",
    ):
        assert wanted in message, wanted


def test_picked_ports_are_free_distinct_and_below_the_ephemeral_range() -> None:
    taken: set[int] = set()
    ports = [pick_port(taken) for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(20_000 <= port < 32_000 for port in ports)
    assert not port_is_free(1 << 20)
