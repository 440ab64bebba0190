"""What a run came to: a summary for the terminal, and one self-contained page with plots.

Both are drawn from a `Progress` alone, so a report can be made again from a run's folder at any time. The page refers
to nothing outside itself, follows the reader's light or dark setting, and holds no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from sparsewire.deploy.figures import (
    bytes_figure,
    density_figure,
    reward_figure,
    serving_figure,
    staleness_figure,
    updates_of,
)
from sparsewire.deploy.live import format_bytes, format_seconds, format_share
from sparsewire.deploy.page import PAGE
from sparsewire.deploy.progress import PHASES, Progress, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One table of the report."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def first_and_last_reward(progress: Progress) -> tuple[float, float] | None:
    """Return the mean reward of the first three and of the last three steps; None before the first step."""
    rewards = [step.reward_mean for step in progress.ordered_steps]
    if not rewards:
        return None
    return sum(rewards[:3]) / len(rewards[:3]), sum(rewards[-3:]) / len(rewards[-3:])


def verdict(progress: Progress) -> tuple[bool, str]:
    """Return whether all that was served was proved to be what the learner committed, and a sentence about it."""
    audit = progress.audit
    if not audit:
        return False, "the run has not ended: nothing was compared yet"
    if audit.get("problem"):
        return False, f"the store could not be read: {audit['problem']}"
    regions: Mapping[str, Any] = audit.get("regions", {})
    served = sum(int(found["num_served"]) for found in regions.values())
    wrong = [name for name, found in regions.items() if found["unverified_versions"]]
    behind = [name for name, found in regions.items() if found["version"] != audit.get("head")]
    if wrong:
        return False, f"unverified versions were served in {', '.join(wrong)}"
    if behind:
        return False, f"{', '.join(behind)} did not reach version {audit.get('head')}"
    return True, f"all {served} updates in {len(regions)} regions verified, every region at version {audit.get('head')}"


def region_sheet(progress: Progress) -> Sheet:
    """Return what each region served and how fast: a column a region."""
    columns: list[list[str]] = []
    for name, region in progress.regions.items():
        found = progress.audit.get("regions", {}).get(name, {})
        updates = updates_of(progress, name)
        totals = [applied.step_to_serving_seconds for applied in updates]
        pauses = [applied.stopped_seconds for applied in updates]
        columns.append(
            [
                "-" if region.version is None else str(region.version),
                f"{found.get('num_verified', 0)} of {len(region.applied)}",
                _median_and_max(totals),
                _median_and_max(pauses),
                {True: "local disk", False: "the network", None: "-"}[region.seeded],
                f"{region.num_trajectories:,}",
                f"{region.num_tokens:,}",
                str(len(region.failures)),
                _probes(region),
                str(max(0, region.num_starts - 1)),
            ]
        )
    measures = (
        "version at the end",
        "updates verified",
        "step to serving, median (max)",
        "engine stopped, median (max)",
        "starting weights from",
        "trajectories made",
        "tokens made",
        "failed updates",
        "probes, largest difference",
        "restarts",
    )
    return Sheet(
        title="Regions",
        headings=("", *progress.regions),
        rows=[(measure, *(column[row] for column in columns)) for row, measure in enumerate(measures)],
        note="probes: tokens that learner and engine both scored at a version; what differs beyond rounding, up to about "
        "half a nat, is not computed with the weights that were proved.",
    )


def _probes(region: Region) -> str:
    """Return how many versions the engine scored, how far it was from the learner at most, and the alarms."""
    if not region.probes:
        return "-"
    largest = max(scored.largest for scored in region.probes)
    alarms = f", {region.num_probe_alarms} alarms" if region.num_probe_alarms else ""
    return f"{len(region.probes)}, {largest:.2g} nats{alarms}"


def _median_and_max(seconds: Sequence[float]) -> str:
    return f"{format_seconds(median(seconds))} ({format_seconds(max(seconds))})" if seconds else "-"


def phase_sheet(progress: Progress) -> Sheet:
    """Return the median time from optimizer step to serving by phase: a column a region."""
    updates = {name: updates_of(progress, name) for name in progress.regions}
    rows = [
        (
            phase,
            *(
                format_seconds(median(applied.phases[phase] for applied in region)) if region else "-"
                for region in updates.values()
            ),
        )
        for phase in PHASES
    ]
    return Sheet(
        title="From optimizer step to serving",
        headings=("median of", *updates),
        rows=rows,
        note="publish: encode, store, commit. stage: scatter into the mirror, prepare the patch. stopped: the engine "
        "makes no token; it generates through all other phases. other: updates before this one, retries.",
    )


def wan_sheet(progress: Progress) -> Sheet:
    """Return bytes over the WAN by region and service against shipping every version full."""
    per_region = progress.full_bytes / max(1, len(progress.regions))
    rows: list[Sequence[str]] = []
    for name in progress.regions:
        links = {service: progress.links.get((name, service)) for service in ("weights", "trajectories")}
        weights = links["weights"]
        moved = weights.down_bytes + weights.up_bytes if weights else 0
        home = links["trajectories"]
        rows.append(
            (
                name,
                format_bytes(weights.down_bytes) if weights else "-",
                format_bytes(weights.up_bytes) if weights else "-",
                format_bytes(per_region),
                format_share(moved, per_region) if weights else "-",
                format_bytes(home.up_bytes + home.down_bytes) if home else "-",
            )
        )
    rows.append(
        (
            "all",
            format_bytes(sum(link.down_bytes for (_, service), link in progress.links.items() if service == "weights")),
            format_bytes(sum(link.up_bytes for (_, service), link in progress.links.items() if service == "weights")),
            format_bytes(progress.full_bytes),
            format_share(progress.weight_bytes, progress.full_bytes),
            format_bytes(
                sum(
                    k.down_bytes + k.up_bytes for (_, service), k in progress.links.items() if service == "trajectories"
                )
            ),
        )
    )
    return Sheet(
        title="Bytes over the WAN",
        headings=("region", "weights down", "weights up", "every version full", "share", "trajectories"),
        rows=rows,
        note="Counted at the emulated links, protocol included. Full: all versions after the starting weights, "
        "uncompressed, once per region.",
    )


def ledger_sheet(progress: Progress) -> Sheet:
    """Return the account of trajectories with its invariant."""
    ledger = progress.ledger
    rows: list[Sequence[str]] = []
    for name, value in ledger.items():
        if isinstance(value, Mapping):
            rows.extend((f"{name.replace('_', ' ')}: {reason}", f"{count:,}") for reason, count in value.items())
        elif isinstance(value, int):
            rows.append((name.removeprefix("num_").replace("_", " "), f"{value:,}"))
    note = ""
    if {"num_received", "num_trained", "num_pending", "dropped"} <= ledger.keys():
        received, trained, pending = (int(ledger[f"num_{name}"]) for name in ("received", "trained", "pending"))
        dropped = sum(int(count) for count in ledger["dropped"].values())
        holds = "holds" if received == trained + pending + dropped else "DOES NOT HOLD"
        note = f"received {received:,} = trained {trained:,} + pending {pending:,} + dropped {dropped:,}: {holds}"
    return Sheet(title="Trajectory ledger", headings=("count", "trajectories"), rows=rows, note=note)


def key_numbers(progress: Progress) -> list[tuple[str, str, str]]:
    """Return the numbers at the head of the report: value, name, and what it is measured against."""
    numbers = []
    rewards = first_and_last_reward(progress)
    if rewards is not None:
        numbers.append(
            (f"{rewards[1]:.2f}", "mean reward, last three steps", f"from {rewards[0]:.2f} in the first three")
        )
    if progress.full_bytes:
        numbers.append(
            (
                format_share(progress.weight_bytes, progress.full_bytes),
                "of the bytes of full checkpoints",
                f"{format_bytes(progress.weight_bytes)} over the WAN instead of {format_bytes(progress.full_bytes)}",
            )
        )
    updates = [applied for name in progress.regions for applied in updates_of(progress, name)]
    if updates:
        pauses = [applied.stopped_seconds for applied in updates]
        totals = [applied.step_to_serving_seconds for applied in updates]
        numbers.append(
            (
                format_seconds(median(pauses)),
                "engine stopped per update, median",
                f"longest {format_seconds(max(pauses))}",
            )
        )
        numbers.append(
            (
                format_seconds(median(totals)),
                "from optimizer step to serving",
                f"median of {len(totals)} updates, encode to resume",
            )
        )
    densities = [published.density for version, published in progress.published.items() if version > 0]
    if densities:
        numbers.append(
            (
                f"{median(densities):.2%}",
                "of elements change per version",
                f"between {min(densities):.2%} and {max(densities):.2%}",
            )
        )
    return numbers


def print_summary(progress: Progress, console: Console) -> None:
    """Print the outcome of a run as tables."""
    rewards = first_and_last_reward(progress)
    proved, sentence = verdict(progress)
    console.print()
    console.print(f"[bold]run {progress.run}[/bold]: {progress.end_reason or 'not ended'}, {len(progress.steps)} steps")
    if rewards is not None:
        console.print(f"reward: {rewards[0]:.3f} (first three steps) → [bold]{rewards[1]:.3f}[/bold] (last three)")
    console.print(f"{'✓' if proved else '✗'} {sentence}", style="green" if proved else "red", highlight=False)
    densities = [published.density for version, published in progress.published.items() if version > 0]
    if densities:
        console.print(
            f"density: median {median(densities):.3%} of elements changed per version "
            f"(min {min(densities):.3%}, max {max(densities):.3%}), {len(densities)} versions"
        )
    for sheet in (region_sheet(progress), phase_sheet(progress), wan_sheet(progress), ledger_sheet(progress)):
        table = Table(title=sheet.title, title_justify="left", title_style="bold", border_style="dim")
        for number, heading in enumerate(sheet.headings):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for row in sheet.rows:
            table.add_row(*row)
        console.print()
        console.print(table)
        if sheet.note:
            console.print(sheet.note, style="dim", highlight=False)


def write_report(progress: Progress, path: Path) -> None:
    """Write the page; it replaces an older one only when it is complete.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(render_report(progress), encoding="utf-8")
    scratch.replace(path)


def render_report(progress: Progress) -> str:
    """Return the page as HTML."""
    proved, sentence = verdict(progress)
    started = progress.started_unix_seconds
    when = "" if started is None else f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC"
    took = format_seconds((progress.last_unix_seconds or 0) - started) if started is not None else ""
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(against)}</small></div>'
        for value, name, against in key_numbers(progress)
    )
    figures = "".join(
        (
            _figure(
                "Reward",
                "Mean over a step's trajectories; the line is the mean of three steps.",
                reward_figure(progress),
            ),
            _figure(
                "Bytes per version",
                "What one region fetches, against the whole view. Logarithmic.",
                bytes_figure(progress),
            ),
            _figure(
                "From optimizer step to serving",
                "One bar a version, by phase. The engine generates through all phases but stopped.",
                serving_figure(progress),
                wide=True,
            ),
            _figure(
                "Staleness",
                "Trajectories by how many versions older than the learner they were.",
                staleness_figure(progress),
            ),
            _figure("Density", "Elements whose bits changed, per version.", density_figure(progress)),
        )
    )
    notes = "".join(
        f"<li><time>{format_seconds(max(0.0, at - (started or at)))}</time> {escape(message)}</li>"
        for at, message in progress.notes
    )
    return PAGE.substitute(
        run=escape(progress.run or "unnamed"),
        when=escape(" · ".join(part for part in (when, took, progress.end_reason or "not ended") if part)),
        verdict=escape(sentence),
        verdict_class="good" if proved else "bad",
        tiles=tiles,
        figures=figures,
        sheets="".join(_table(sheet) for sheet in (region_sheet(progress), phase_sheet(progress), wan_sheet(progress))),
        ledger=_table(ledger_sheet(progress)),
        configuration=_table(
            Sheet(title="Configuration", headings=("key", "value"), rows=list(_flat(progress.configuration)))
        ),
        notes=f'<section class="card"><h2>What happened</h2><ol class="notes">{notes}</ol></section>' if notes else "",
    )


def _flat(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if key == "regions" and isinstance(value, Mapping):
            yield "round trips", ", ".join(f"{name} {milliseconds:g} ms" for name, milliseconds in value.items())
        else:
            yield key.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value)


def _figure(title: str, caption: str, svg: str, *, wide: bool = False) -> str:
    kind = "card figure wide" if wide else "card figure"
    return f'<figure class="{kind}"><figcaption><h2>{escape(title)}</h2><p>{escape(caption)}</p></figcaption>{svg}</figure>'


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in sheet.headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in sheet.rows)
    note = f"<p>{escape(sheet.note)}</p>" if sheet.note else ""
    return (
        f'<section class="card"><h2>{escape(sheet.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}</section>"
    )
