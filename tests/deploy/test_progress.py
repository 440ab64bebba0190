"""Events of all processes fold into one state, in whatever pieces they arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from sparsewire.deploy.live import LiveView, format_bytes, format_seconds, screen, sparkline
from sparsewire.deploy.progress import PHASES, EventTail, Progress, load_progress


def test_a_finished_run_folds_into_its_numbers(recorded_run: Path) -> None:
    progress = load_progress(recorded_run)
    assert progress.run == "example"
    assert progress.num_steps == 24
    assert progress.end_reason == "complete"
    assert progress.learner_end == "complete"
    assert [step.step for step in progress.ordered_steps] == list(range(1, 25))
    assert progress.version == 24
    assert progress.num_republished == 0
    assert len(progress.staleness) == 24 * 64
    assert set(progress.regions) == {"us", "eu", "ap"}
    assert {name: len(region.applied) for name, region in progress.regions.items()} == {"us": 25, "eu": 25, "ap": 24}
    assert progress.regions["us"].num_trajectories == 24 * 21
    assert progress.regions["us"].seeded is True
    assert progress.weight_bytes == sum(38_000_000 + number + 210_000 for number in range(3))
    assert progress.full_bytes == 3 * 24 * 2 * 134_515_008
    assert progress.ledger["num_trained"] == 24 * 64
    assert progress.audit["verified"] is True


def test_phases_of_an_update_add_up_to_the_time_from_step_to_serving(recorded_run: Path) -> None:
    progress = load_progress(recorded_run)
    for region in progress.regions.values():
        for applied in region.applied:
            assert tuple(applied.phases) == PHASES
            assert sum(applied.phases.values()) == pytest.approx(applied.step_to_serving_seconds)


def test_reading_while_files_grow_gives_the_same_state_as_reading_them_whole(
    recorded_run: Path, tmp_path: Path
) -> None:
    growing = tmp_path / "growing"
    tail = EventTail(growing)
    progress = Progress()
    files = [recorded_run / "events.jsonl", *sorted(recorded_run.glob("*/events.jsonl"))]
    contents = {path.relative_to(recorded_run): path.read_bytes() for path in files}
    longest = max(len(content) for content in contents.values())
    for end in range(0, longest + 997, 997):
        for name, content in contents.items():
            (growing / name).parent.mkdir(parents=True, exist_ok=True)
            (growing / name).write_bytes(content[:end])
        for event in tail.read():
            progress.apply(event)
    assert tail.read() == []
    whole = load_progress(recorded_run)
    assert progress.steps == whole.steps
    assert progress.published == whole.published
    assert progress.links == whole.links
    assert progress.regions == whole.regions


def test_a_half_written_line_waits_for_its_end_and_a_broken_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "link", "region": "us", "service": "weights", "down')
    tail = EventTail(tmp_path)
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b'_bytes": 5, "up_bytes": 1}\nnot json\n[1]\n{"no": "event"}\n{"event": "sim_end"}\n')
    assert [event["event"] for event in tail.read()] == ["link", "sim_end"]


def test_unknown_events_and_missing_fields_do_no_harm() -> None:
    progress = Progress()
    for event in ("of_the_future", "step", "published", "version_applied", "generated", "ledger", "link", "worker_end"):
        progress.apply({"event": event, "source": "worker-us"})
    assert progress.steps[0].reward_mean == 0.0
    assert progress.regions["us"].version == 0


def test_the_region_is_known_from_the_folder_where_an_event_does_not_say_it(tmp_path: Path) -> None:
    (tmp_path / "worker-ap").mkdir()
    (tmp_path / "worker-ap" / "events.jsonl").write_text(
        json.dumps({"event": "generated", "time_unix_seconds": 1.0, "num_tokens": 7}) + "\n"
    )
    assert load_progress(tmp_path).regions["ap"].num_tokens == 7


def test_a_restarted_learner_repeats_steps_without_counting_them_twice() -> None:
    progress = Progress()
    progress.apply({"event": "learner_start", "epoch": 1, "step": 0})
    progress.apply({"event": "step", "step": 1, "reward_mean": 0.1})
    progress.apply({"event": "step", "step": 2, "reward_mean": 0.2})
    progress.apply({"event": "learner_start", "epoch": 2, "step": 1, "resumed": True})
    assert progress.learner_step == 1
    progress.apply({"event": "step", "step": 2, "reward_mean": 0.3})
    assert [step.reward_mean for step in progress.ordered_steps] == [0.1, 0.3]
    assert progress.learner_epochs == [1, 2]
    assert any("resumed at step 1" in message for _, message in progress.notes)


def test_a_version_published_twice_is_counted() -> None:
    progress = Progress()
    for _ in range(2):
        progress.apply({"event": "published", "version": 3})
    assert progress.num_republished == 1


def test_lag_is_counted_in_versions_and_from_the_commit_of_the_first_one_missed() -> None:
    progress = Progress()
    progress.apply({"event": "published", "version": 1, "committed_unix_seconds": 100.0})
    progress.apply({"event": "version_applied", "region": "eu", "version": 1})
    assert progress.lag_versions("eu") == 0
    assert progress.lag_seconds("eu", 500.0) == 0.0
    progress.apply({"event": "published", "version": 2, "committed_unix_seconds": 110.0})
    progress.apply({"event": "published", "version": 3, "committed_unix_seconds": 120.0})
    assert progress.lag_versions("eu") == 2
    assert progress.lag_seconds("eu", 125.0) == 15.0


def test_the_screen_shows_reward_versions_lag_bytes_pause_and_ledger(recorded_run: Path) -> None:
    progress = load_progress(recorded_run)
    console = Console(width=150, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115 - closed with the test
    console.print(screen(progress, now_unix_seconds=progress.last_unix_seconds or 0.0))
    console.file.close()
    text = console.export_text()
    for wanted in (
        "run example",
        "24 of 24",
        "0.59%",
        "19.4 GB",
        "us 2 ms",
        "ap 150 ms",
        "num_trained 1536",
        "signal 9",
    ):
        assert wanted in text


def test_without_a_terminal_each_step_and_note_is_one_line(recorded_run: Path, tmp_path: Path) -> None:
    progress = load_progress(recorded_run)
    with (tmp_path / "out").open("w") as file, LiveView(console=Console(file=file), live=True) as view:
        view.show(progress, now_unix_seconds=0.0)
        view.show(progress, now_unix_seconds=0.0)
    lines = (tmp_path / "out").read_text().splitlines()
    assert len([line for line in lines if line.startswith("step ")]) == 24
    assert len([line for line in lines if "signal 9" in line]) == 1
    assert "us v24, eu v24, ap v24" in lines[-1]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1e6, "1 MB"), (269_030_016, "269 MB"), (19.37e9, "19.4 GB")]
)
def test_sizes_are_written_with_three_digits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12.3 ms"), (0.9996, "1 s"), (2.5, "2.5 s"), (119, "119 s"), (125, "2 min 05 s")]
)
def test_durations_are_written_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_sparkline_has_one_bar_a_value_and_keeps_the_last_ones() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([float(value) for value in range(100)], width=2) == "██"
