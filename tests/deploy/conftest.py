"""A run's events as its processes would write them: three regions, 24 steps, one restarted worker."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REGIONS = {"us": 2.0, "eu": 80.0, "ap": 150.0}
NUM_ELEMENTS = 134_515_008
START = 1_780_000_000.0


def digest(version: int) -> str:
    return f"{version:064x}"


def write_events(path: Path, events: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def write_run(directory: Path, *, num_steps: int = 24) -> None:
    """Write the events files of a finished run below `directory`."""
    chance = random.Random(3)
    sim: list[dict[str, Any]] = [
        {
            "event": "sim_start",
            "time_unix_seconds": START,
            "run": "example",
            "configuration": {
                "model": "smollm2",
                "task": "addition",
                "num_steps": num_steps,
                "ranks": 1,
                "regions": REGIONS,
                "rate_mbit": 200.0,
                "seed": 0,
            },
        }
    ]
    learner: list[dict[str, Any]] = [
        {
            "event": "learner_start",
            "time_unix_seconds": START + 8,
            "pid": 1,
            "epoch": 1,
            "step": 0,
            "version": 0,
            "build": "sparsewire/0.1.0",
            "resumed": False,
        },
        published(0, START + 12, 0, NUM_ELEMENTS, "anchor", 178_000_000),
    ]
    workers: dict[str, list[dict[str, Any]]] = {
        region: [
            {
                "event": "worker_start",
                "time_unix_seconds": START + 9,
                "pid": 2,
                "region": region,
                "worker_id": f"worker-{region}",
                "version": None,
                "seeded": True,
                "engine": "transformers",
            },
            applied(
                region,
                None,
                0,
                START + 12,
                START + 17,
                {"fetch": 0.1, "decode": 2.0, "mirror": 0.1, "stage": 0.1, "paused": 0.4},
            ),
        ]
        for region in REGIONS
    }
    at = START + 20
    for step in range(1, num_steps + 1):
        wait, compute = chance.uniform(3, 6), chance.uniform(6, 8)
        at += wait + compute
        density = 0.011 * (1 + math.exp(-step / 3)) * chance.uniform(0.9, 1.1)
        num_changed = int(NUM_ELEMENTS * density)
        learner.append(
            {
                "event": "step",
                "time_unix_seconds": at,
                "step": step,
                "version": step,
                "reward_mean": min(1.0, 0.03 + 0.55 / (1 + math.exp(-(step - 11) / 3)) + chance.uniform(-0.05, 0.05)),
                "reward_std": 0.3,
                "loss": 0.01,
                "grad_norm": 0.8,
                "skipped": False,
                "num_tokens": 500,
                "num_trajectories": 64,
                "staleness": [chance.choice([0, 1, 1, 1, 1, 2]) for _ in range(64)],
                "logprob_difference_mean": 0.004,
                "seconds": {"wait": wait, "compute": compute, "publish_wait": 0.05, "checkpoint": 0.0},
            }
        )
        learner.append(published(step, at, num_changed, NUM_ELEMENTS, "delta", int(num_changed * 1.02)))
        for region, round_trip in REGIONS.items():
            if region == "ap" and step == 7:
                continue
            seconds = {
                "fetch": num_changed * 1.02 / 25e6 + 3 * round_trip / 1000,
                "decode": chance.uniform(0.3, 0.6),
                "mirror": chance.uniform(0.1, 0.2),
                "stage": chance.uniform(0.04, 0.08),
                "pause": 0.002,
                "apply": 0.008,
                "audit": 0.05,
                "paused": chance.uniform(0.011, 0.03),
            }
            behind = chance.uniform(0.4, 1.0) + (60.0 if region == "eu" and step == 15 else 0.0)
            serving = (
                at + 1.1 + behind + sum(seconds[phase] for phase in ("fetch", "decode", "mirror", "stage", "paused"))
            )
            workers[region].append(applied(region, step - 1, step, at, serving, seconds, num_changed))
            if step % 4 == 0:
                workers[region].append(
                    {
                        "event": "probe_scored",
                        "time_unix_seconds": serving + 0.3,
                        "region": region,
                        "version": step,
                        "mean": 0.03,
                        "max": 0.2 + step / 1000,
                        "threshold": 1.0,
                        "num_tokens": 61,
                        "seconds": 0.25,
                    }
                )
            workers[region].append(
                {
                    "event": "generated",
                    "time_unix_seconds": serving + 1,
                    "region": region,
                    "group": step,
                    "num_trajectories": 21,
                    "num_tokens": 180,
                    "seconds": 3.0,
                    "version": step,
                    "reward_mean": 0.4,
                }
            )
    counts = {
        "num_received": 1560,
        "num_trained": 64 * num_steps,
        "num_pending": 0,
        "dropped": {"stale": 16, "run_complete": 1560 - 64 * num_steps - 16},
        "num_duplicates": 3,
    }
    learner.append({"event": "ledger", "time_unix_seconds": at + 1, **counts})
    learner.append(
        {
            "event": "learner_end",
            "time_unix_seconds": at + 2,
            "reason": "complete",
            "step": num_steps,
            "version": num_steps,
            "counts": counts,
            "num_skipped": 0,
        }
    )
    for number, region in enumerate(REGIONS):
        workers[region].append(
            {
                "event": "worker_end",
                "time_unix_seconds": at + 3,
                "region": region,
                "reason": "run_complete",
                "num_trajectories": 500,
            }
        )
        sim.append(link(region, "weights", at + 4, 38_000_000 + number, 210_000))
        sim.append(link(region, "trajectories", at + 4, 90_000, 610_000))
    sim.append(
        {
            "event": "process",
            "time_unix_seconds": START + 160,
            "role": "worker-eu",
            "state": "died",
            "message": "worker-eu died (signal 9); within 300 s start it again: "
            "sparsewire worker --config runs/example/worker-eu.toml",
        }
    )
    sim.append(
        {
            "event": "sim_end",
            "time_unix_seconds": at + 5,
            "reason": "complete",
            "audit": {
                "verified": True,
                "head": num_steps,
                "num_versions": num_steps + 1,
                "problem": "",
                "regions": {
                    region: {
                        "version": num_steps,
                        "num_served": num_steps + (region != "ap"),
                        "num_verified": num_steps + (region != "ap"),
                        "unverified_versions": [],
                    }
                    for region in REGIONS
                },
            },
        }
    )
    write_events(directory / "events.jsonl", sim)
    write_events(directory / "learner" / "events.jsonl", learner)
    for region, events in workers.items():
        write_events(directory / f"worker-{region}" / "events.jsonl", events)


def published(
    version: int, stepped: float, num_changed: int, num_elements: int, kind: str, wire_bytes: int
) -> dict[str, Any]:
    return {
        "event": "published",
        "time_unix_seconds": stepped + 1.1,
        "version": version,
        "step": version,
        "kind": kind,
        "wire_bytes": wire_bytes,
        "full_bytes": 2 * num_elements,
        "num_changed": num_changed,
        "num_elements": num_elements,
        "density": num_changed / num_elements,
        "epoch": 1,
        "stepped_unix_seconds": stepped,
        "committed_unix_seconds": stepped + 1.1,
        "seconds": {"encode": 0.8, "put": 0.1, "commit": 0.05},
    }


def applied(
    region: str,
    from_version: int | None,
    version: int,
    stepped: float,
    serving: float,
    seconds: dict[str, float],
    num_changed: int = NUM_ELEMENTS,
) -> dict[str, Any]:
    return {
        "event": "version_applied",
        "time_unix_seconds": serving,
        "region": region,
        "from_version": from_version,
        "version": version,
        "wire_bytes": num_changed,
        "full": from_version is None,
        "num_changed": num_changed,
        "stepped_unix_seconds": stepped,
        "committed_unix_seconds": stepped + 1.1,
        "seen_unix_seconds": stepped + 1.1 + 0.3,
        "serving_unix_seconds": serving,
        "seconds": seconds,
        "digest": digest(version),
    }


def link(region: str, service: str, at: float, down_bytes: int, up_bytes: int) -> dict[str, Any]:
    return {
        "event": "link",
        "time_unix_seconds": at,
        "region": region,
        "service": service,
        "down_bytes": down_bytes,
        "up_bytes": up_bytes,
    }


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 24 steps; tests only read it."""
    directory = tmp_path_factory.mktemp("recorded") / "example"
    write_run(directory)
    return directory


@pytest.fixture
def write_run_of() -> Callable[[Path, int], None]:
    """Write a finished run of some steps into a folder."""

    def write(directory: Path, num_steps: int) -> None:
        write_run(directory, num_steps=num_steps)

    return write
