"""The live view: one screen of what a run is doing, or plain lines where there is no terminal.

`LiveView` draws a `Progress`; it keeps no state of the run itself. `screen` is a pure function, so that it can be
tested and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sparsewire.deploy.progress import Progress

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_NOTES = 5
_SPARK_WIDTH = 48


def sparkline(values: Sequence[float], *, top: float | None = None, width: int = _SPARK_WIDTH) -> str:
    """Return one character a value, the last `width` of them, scaled from 0 to `top` (by default their maximum)."""
    shown = list(values)[-width:]
    highest = max(shown, default=0.0) if top is None else top
    if highest <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(value / highest * len(_BARS))))] for value in shown)


def format_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Return a duration with about three digits."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_share(part: float, whole: float) -> str:
    """Return a part of a whole in percent; a dash without a whole."""
    return f"{part / whole:.2%}" if whole else "-"


def screen(progress: Progress, *, now_unix_seconds: float) -> RenderableType:
    """Return the whole view of a run at a moment."""
    parts: list[RenderableType] = [_learner(progress, now_unix_seconds), _regions(progress, now_unix_seconds)]
    if progress.ledger:
        parts.append(_ledger_line(progress))
    if progress.notes:
        lines = [Text(message, style="yellow") for _, message in progress.notes[-_SHOWN_NOTES:]]
        parts.append(Panel(Group(*lines), title="events", title_align="left", border_style="dim"))
    return Group(*parts)


def _learner(progress: Progress, now_unix_seconds: float) -> RenderableType:
    steps = progress.ordered_steps
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    elapsed = now_unix_seconds - (progress.started_unix_seconds or now_unix_seconds)
    total = progress.num_steps
    grid.add_row("step", f"[bold]{progress.learner_step}[/bold] of {total}    elapsed {format_seconds(elapsed)}")
    rewards = [step.reward_mean for step in steps]
    if rewards:
        recent = sum(rewards[-3:]) / len(rewards[-3:])
        line = sparkline(rewards, top=max(1.0, *rewards))
        grid.add_row("reward", f"[green]{line}[/green]  last {rewards[-1]:.3f}   mean of 3 [bold]{recent:.3f}[/bold]")
        seconds = [step.seconds for step in steps]
        last = steps[-1]
        grid.add_row(
            "step time",
            f"[blue]{sparkline(seconds)}[/blue]  {format_seconds(last.seconds)}: "
            f"wait {format_seconds(last.wait_seconds)}, compute {format_seconds(last.compute_seconds)}, "
            f"publish {format_seconds(last.publish_wait_seconds)}",
        )
    newest = progress.version
    if newest is not None:
        published = progress.published[newest]
        kind = f"{published.kind}, {format_bytes(published.wire_bytes)}, {published.density:.3%} changed"
        grid.add_row("newest version", f"[bold]{newest}[/bold]  {kind}")
    if progress.full_bytes:
        share = format_share(progress.weight_bytes, progress.full_bytes)
        grid.add_row(
            "weights over WAN",
            f"[bold]{format_bytes(progress.weight_bytes)}[/bold] = {share} of {format_bytes(progress.full_bytes)} "
            "for every version full",
        )
    title = f"sparsewire · run {progress.run}"
    return Panel(grid, title=title, title_align="left", border_style="cyan")


def _regions(progress: Progress, now_unix_seconds: float) -> RenderableType:
    table = Table(expand=True, border_style="dim", header_style="dim")
    table.add_column("region")
    for heading in ("version", "lag", "step to serving", "stopped", "weights", "trajectories", "tokens", "samples"):
        table.add_column(heading, justify="right")
    round_trips = progress.configuration.get("regions", {})
    for region in progress.regions.values():
        behind = progress.lag_versions(region.name)
        seconds = progress.lag_seconds(region.name, now_unix_seconds)
        lag = "-" if behind is None or seconds is None else f"{behind} v, {format_seconds(seconds)}" if behind else "0"
        last = region.applied[-1] if region.applied else None
        weights, trajectories = (progress.links.get((region.name, service)) for service in ("weights", "trajectories"))
        name = region.name + (f" [dim]{round_trips[region.name]:g} ms[/dim]" if region.name in round_trips else "")
        table.add_row(
            name,
            "-" if region.version is None else f"[bold]{region.version}[/bold]",
            f"[yellow]{lag}[/yellow]" if behind else lag,
            format_seconds(last.step_to_serving_seconds) if last and last.stepped_unix_seconds else "-",
            format_seconds(last.stopped_seconds) if last else "-",
            format_bytes(weights.down_bytes + weights.up_bytes) if weights else "-",
            format_bytes(trajectories.down_bytes + trajectories.up_bytes) if trajectories else "-",
            f"{region.num_tokens:,}",
            f"{region.num_trajectories:,}",
        )
    return table


def _ledger_line(progress: Progress) -> RenderableType:
    parts: list[str] = []
    for name, value in progress.ledger.items():
        if isinstance(value, dict):
            parts.extend(f"{name} {reason} {count}" for reason, count in value.items() if count)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            parts.append(f"{name} {value}")
    return Text("trajectories: " + ", ".join(parts), style="dim")


class LiveView:
    """Shows a run while it goes on; use it as a context manager in one thread."""

    def __init__(self, *, console: Console, live: bool) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if live and console.is_terminal else None
        self._shown_step = 0
        self._shown_notes = 0

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress, *, now_unix_seconds: float) -> None:
        """Draw the state, or print the lines that are new since the last call."""
        if self._live is not None:
            self._live.update(screen(progress, now_unix_seconds=now_unix_seconds), refresh=True)
            return
        for _, message in progress.notes[self._shown_notes :]:
            self.say(message)
        self._shown_notes = len(progress.notes)
        for step in progress.ordered_steps:
            if step.step > self._shown_step:
                versions = ", ".join(
                    f"{region.name} v{'-' if region.version is None else region.version}"
                    for region in progress.regions.values()
                )
                share = format_share(progress.weight_bytes, progress.full_bytes)
                self.say(
                    f"step {step.step}/{progress.num_steps}: reward {step.reward_mean:.3f}, "
                    f"{format_seconds(step.seconds)}, {versions}, "
                    f"weights {format_bytes(progress.weight_bytes)} ({share} of full)"
                )
                self._shown_step = step.step

    def say(self, message: str) -> None:
        """Print one line above the view."""
        self._console.print(message, soft_wrap=True, highlight=False, markup=False)
