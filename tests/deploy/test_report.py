"""The report says what the events say, in one file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from sparsewire.deploy.progress import Progress, load_progress
from sparsewire.deploy.report import first_and_last_reward, print_summary, render_report, verdict, write_report


class TextOf(HTMLParser):
    """Collects the text of a page, tags that stay open, and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page(recorded_run: Path) -> str:
    return render_report(load_progress(recorded_run))


def test_the_page_holds_the_numbers_of_the_run(page: str) -> None:
    parser = TextOf()
    parser.feed(page)
    text = " ".join(parser.text)
    for wanted in (
        "run example",
        "all 74 updates in 3 regions verified, every region at version 24",
        "0.59%",
        "19.4 GB",
        "25 of 25",
        "received 1,560 = trained 1,536 + pending 0 + dropped 24: holds",
        "us 2 ms, eu 80 ms, ap 150 ms",
        "worker-eu died (signal 9)",
        "probes, largest difference",
        "6, 0.22 nats",
        "every version full",
        "versions between sampling and training",
    ):
        assert wanted in text, wanted


def test_the_page_refers_to_nothing_outside_itself_and_to_every_id_once(page: str) -> None:
    parser = TextOf()
    parser.feed(page)
    assert not re.findall(r"https?://", page)
    assert len(parser.ids) == len(set(parser.ids))
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert wanted <= set(parser.ids)


def test_every_colour_of_a_plot_follows_the_light_or_dark_page(page: str) -> None:
    plots = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        assert "var(--" in plot
        assert not re.findall(r"#[0-9a-f]{6}\b", plot)


def test_equal_events_give_an_equal_page(recorded_run: Path, page: str) -> None:
    assert render_report(load_progress(recorded_run)) == page


def test_a_run_without_any_step_still_has_a_report_and_a_summary(tmp_path: Path) -> None:
    write_report(Progress(), tmp_path / "report.html")
    assert "was compared yet" in (tmp_path / "report.html").read_text()
    with (tmp_path / "out").open("w") as file:
        print_summary(Progress(), Console(file=file))
    assert first_and_last_reward(Progress()) is None


@pytest.mark.parametrize("num_steps", [1, 2, 60])
def test_runs_of_any_length_can_be_drawn(
    write_run_of: Callable[[Path, int], None], tmp_path: Path, num_steps: int
) -> None:
    write_run_of(tmp_path, num_steps)
    assert render_report(load_progress(tmp_path)).count("<svg ") == 5


def test_text_from_events_cannot_become_markup() -> None:
    progress = Progress()
    progress.apply(
        {"event": "sim_start", "run": "<b>x", "configuration": {"model": "<script>", "regions": {"<i>": 1.0}}}
    )
    progress.apply({"event": "process", "message": "<img src=x>"})
    page = render_report(progress)
    TextOf().feed(page)
    assert "&lt;script&gt;" in page


def test_the_summary_tells_reward_bytes_pauses_ledger_and_density(recorded_run: Path, tmp_path: Path) -> None:
    progress = load_progress(recorded_run)
    rewards = first_and_last_reward(progress)
    assert rewards is not None
    with (tmp_path / "out").open("w") as file:
        print_summary(progress, Console(file=file, width=140))
    text = (tmp_path / "out").read_text()
    for wanted in (
        f"{rewards[0]:.3f} (first three steps)",
        f"{rewards[1]:.3f} (last three)",
        "all 74 updates",
        "19.4 GB",
        "density: median 1.",
    ):
        assert wanted in text, wanted
    assert "received 1,560 = trained 1,536 + pending 0 + dropped 24: holds" in text


def test_probe_alarms_stand_in_the_page_and_among_what_happened() -> None:
    progress = Progress()
    scored = {"region": "eu", "version": 3, "mean": None, "max": None, "threshold": 1.0}
    progress.apply({"event": "probe_scored", **scored})
    progress.apply({"event": "probe_alarm", **scored})
    page = render_report(progress)
    assert "1, inf nats, 1 alarms" in page
    assert "version 3: the engine in eu computes otherwise than the learner, by up to inf nats" in page


@pytest.mark.parametrize(
    ("audit", "sentence"),
    [
        ({}, "nothing was compared"),
        ({"problem": "bucket gone", "regions": {}}, "bucket gone"),
        (
            {"head": 3, "regions": {"eu": {"num_served": 1, "version": 3, "unverified_versions": [2]}}},
            "unverified versions were served in eu",
        ),
        (
            {"head": 3, "regions": {"eu": {"num_served": 1, "version": 2, "unverified_versions": []}}},
            "eu did not reach version 3",
        ),
    ],
)
def test_what_is_not_proved_is_not_called_verified(audit: dict[str, object], sentence: str) -> None:
    proved, text = verdict(Progress(audit=audit))
    assert not proved
    assert sentence in text
