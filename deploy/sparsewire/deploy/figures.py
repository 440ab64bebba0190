"""The plots of the report as inline SVG: a `Progress` in, markup out.

Every colour that matplotlib writes is replaced by a CSS variable, so that the page around decides about light and
dark; text stays text. Ids are prefixed by the figure's name, so that several figures live in one page. No figure
refers to anything outside itself. Needs matplotlib (extra `demo`).
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from sparsewire.deploy.progress import PHASES, Applied, Progress
from sparsewire.sync.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-ins that appear nowhere else; the right side is what the page defines.
_INK, _MUTED, _GRID, _PAPER = "#1b1f24", "#5f6774", "#e3e6eb", "#fdfdfe"
_OTHER = "#b9c0c9"
SERIES = ("#2f6fdb", "#d9702c", "#14937f", "#8a5cc7", "#c2476f", "#7a8b1f")
_VARIABLES: Mapping[str, str] = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    _PAPER: "var(--panel)",
    _OTHER: "var(--other)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, start=1)},
}
_PHASE_COLOURS = dict(zip(PHASES, (*SERIES, _OTHER), strict=True))
_STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsewire",
    "font.size": 10,
    "font.family": ["DejaVu Sans"],
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "figure.facecolor": "none",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "ytick.left": False,
    "xtick.bottom": False,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "lines.linewidth": 2,
}
_OUTLIER = 3.0
"""A bar this many times the median is cut off and labelled, so that one slow update does not flatten all others."""


def reward_figure(progress: Progress) -> str:
    """Return mean reward per step with its mean over three steps."""
    steps = progress.ordered_steps

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        numbers = [step.step for step in steps]
        rewards = [step.reward_mean for step in steps]
        smooth = [
            sum(rewards[max(0, at - 2) : at + 1]) / len(rewards[max(0, at - 2) : at + 1]) for at in range(len(rewards))
        ]
        axes.plot(numbers, rewards, color=SERIES[0], linewidth=0, marker="o", markersize=4.5, alpha=0.45)
        axes.plot(numbers, smooth, color=SERIES[0])
        if smooth:
            axes.annotate(
                f"{smooth[-1]:.2f}",
                (numbers[-1], smooth[-1]),
                xytext=(6, 0),
                textcoords="offset points",
                color=_INK,
                fontweight="bold",
                verticalalignment="center",
            )
        axes.set_ylim(bottom=min(0.0, *rewards, 0.0))
        axes.set_xlabel("optimizer step")
        _whole_numbers(axes)

    return _svg("reward", draw, height=2.9)


def bytes_figure(progress: Progress) -> str:
    """Return the bytes of each version as shipped against the full view, on a logarithmic scale."""
    rows = [published for version, published in sorted(progress.published.items()) if version > 0]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        versions = [row.version for row in rows]
        axes.vlines(versions, 1, [max(1, row.wire_bytes) for row in rows], color=SERIES[0], linewidth=1.2, alpha=0.35)
        axes.plot(
            versions, [max(1, row.wire_bytes) for row in rows], color=SERIES[0], linewidth=0, marker="o", markersize=6
        )
        axes.plot(versions, [row.full_bytes for row in rows], color=SERIES[1], linewidth=2)
        axes.set_yscale("log")
        if rows:
            smallest = min(max(1, row.wire_bytes) for row in rows)
            axes.set_ylim(smallest / 6, max(row.full_bytes for row in rows) * 5)
            axes.annotate(
                "every version full",
                (versions[0], rows[0].full_bytes),
                xytext=(0, 6),
                textcoords="offset points",
                color=SERIES[1],
            )
            axes.annotate(
                "shipped",
                (versions[0], max(1, rows[0].wire_bytes)),
                xytext=(0, 9),
                textcoords="offset points",
                color=SERIES[0],
            )
        axes.yaxis.set_major_formatter(_byte_ticks)
        axes.yaxis.set_minor_formatter("")
        axes.set_xlabel("version")
        _whole_numbers(axes)

    return _svg("bytes", draw, height=2.9)


def serving_figure(progress: Progress) -> str:
    """Return, for each region and version, the time from optimizer step to serving by phase."""
    regions = {name: updates_of(progress, name) for name in progress.regions}
    totals = [applied.step_to_serving_seconds for updates in regions.values() for applied in updates]

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("constrained", wspace=0.05)
        panels = figure.subplots(1, max(1, len(regions)), sharey=True, squeeze=False)[0]
        top = _top(totals)
        round_trips = progress.configuration.get("regions", {})
        for axes, (name, updates) in zip(panels, regions.items(), strict=False):
            bottom = [0.0] * len(updates)
            versions = [applied.version for applied in updates]
            for phase in PHASES:
                seconds = [applied.phases[phase] for applied in updates]
                axes.bar(versions, seconds, bottom=bottom, width=0.74, color=_PHASE_COLOURS[phase], label=phase)
                bottom = [before + more for before, more in zip(bottom, seconds, strict=True)]
            for version, total in zip(versions, bottom, strict=True):
                if total > top:
                    axes.annotate(
                        f"{total:.0f} s",
                        (version, top),
                        xytext=(0, 2),
                        textcoords="offset points",
                        color=_MUTED,
                        fontsize=7,
                        horizontalalignment="center",
                        annotation_clip=False,
                    )
            trip = f" · {round_trips[name]:g} ms" if name in round_trips else ""
            axes.set_title(f"{name}{trip}")
            axes.set_ylim(0, top)
            axes.set_xlabel("version")
            _whole_numbers(axes)
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g} s")
        handles, labels = panels[0].get_legend_handles_labels()
        if handles:
            figure.legend(
                handles, labels, loc="outside upper left", ncols=len(labels), handlelength=0.9, handleheight=0.9
            )

    return _svg("serving", draw, width=10.4, height=3.2)


def staleness_figure(progress: Progress) -> str:
    """Return how many trajectories were trained at which staleness, in versions."""
    counts = Counter(progress.staleness)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        values = list(range(max(counts, default=0) + 1))
        bars = axes.bar(values, [counts[value] for value in values], width=0.6, color=SERIES[2])
        axes.set_xticks(values)
        axes.bar_label(bars, [f"{counts[value]:,}" for value in values], color=_INK, padding=3, fontsize=9)
        axes.set_xlabel("versions between sampling and training")
        axes.margins(y=0.15)

    return _svg("staleness", draw, height=2.9)


def density_figure(progress: Progress) -> str:
    """Return the part of elements whose bits changed, per version, in percent."""
    rows = [published for version, published in sorted(progress.published.items()) if version > 0]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        versions = [row.version for row in rows]
        axes.plot(versions, [100 * row.density for row in rows], color=SERIES[3], marker="o", markersize=4.5)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.set_xlabel("version")
        _whole_numbers(axes)

    return _svg("density", draw, height=2.9)


def updates_of(progress: Progress, region: str) -> list[Applied]:
    """Return a region's updates from one version to a later one; loading the first weights is none."""
    return [
        applied
        for applied in progress.regions[region].applied
        if applied.from_version is not None and not applied.full and applied.stepped_unix_seconds > 0
    ]


def _top(totals: Sequence[float]) -> float:
    if not totals:
        return 1.0
    highest = max(totals)
    return min(highest * 1.08, max(_OUTLIER * median(totals), 1e-3))


def _byte_ticks(value: float, _: float | None) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:g} {unit}"
        value /= 1000
    return f"{value:g} TB"


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))


def _svg(name: str, draw: Callable[[Figure], None], *, width: float = 5.1, height: float) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the report needs matplotlib: pip install 'sparsewire[demo]'") from error
    with mpl.rc_context(cast(Any, _STYLE)):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(out.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """Turn a stand-alone SVG file into markup that shares a page with others."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r"font: (?:(\w+) )?(\d+(?:\.\d+)?px) [^;\"]*", _font, svg)
    svg = re.sub(
        r'<svg[^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{name}">', svg, count=1
    )
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _font(match: re.Match[str]) -> str:
    weight = f"font-weight: {match[1]}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}"
