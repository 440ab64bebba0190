"""What `inspect` found, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsewire.deploy.inspection import VersionDetail, VersionSummary
from sparsewire.deploy.live import format_bytes, format_share

_SHOWN_CHUNKS = 40
_WIDE = 120
"""Columns of a terminal from which on the list has room for everything."""


def print_run(summaries: Sequence[VersionSummary], console: Console) -> None:
    """Print one row per stored way to a version."""
    wide = console.width >= _WIDE
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ver", justify="right")
    table.add_column("kind", no_wrap=True)
    for heading in ("base", "bytes", "changed", "density", "ep", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sealed (UTC)", no_wrap=True)
    if wide:
        table.add_column("of full", justify="right")
        table.add_column("digest", no_wrap=True)
    for summary in summaries:
        row = [
            str(summary.version),
            f"{summary.kind}, predicted" if summary.predicted else summary.kind,
            "-" if summary.base_version is None else str(summary.base_version),
            format_bytes(summary.num_bytes),
            f"{summary.num_changed:,}",
            f"{summary.density:.2%}",
            str(summary.epoch),
            str(summary.step),
            f"{datetime.fromtimestamp(summary.created_unix_seconds, UTC):%m-%d %H:%M:%S}",
        ]
        if wide:
            row.append("-" if summary.full_bytes is None else format_share(summary.num_bytes, summary.full_bytes))
            row.append(summary.digest[:16])
        table.add_row(*row)
    console.print(table)


def print_version(detail: VersionDetail, console: Console) -> None:
    """Print one version: what it is, its chunks, and what it changed in each tensor."""
    summary = detail.summary
    kind = f"predicted {summary.kind}" if summary.predicted else summary.kind
    base = "" if summary.base_version is None else f" from {summary.base_version}"
    console.print(f"[bold]version {summary.version}[/bold]: {kind}{base}, step {summary.step}, epoch {summary.epoch}")
    console.print(
        f"{format_bytes(summary.num_bytes)} for {summary.num_changed:,} of {summary.num_elements:,} elements "
        f"({summary.density:.3%}), {summary.num_bytes / max(1, summary.num_changed):.2f} bytes a change",
        highlight=False,
    )
    console.print(f"digest {summary.digest}, by {summary.build}", highlight=False)
    packs = {key: number for number, key in enumerate(dict.fromkeys(chunk.pack for chunk in detail.chunks))}
    for key, number in packs.items():
        console.print(f"pack {number}: {key}", highlight=False, soft_wrap=True)
    chunks = Table(
        title=f"{len(detail.chunks)} chunks, hashes checked",
        title_justify="left",
        box=SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
    )
    for heading in ("pack", "offset", "bytes", "dtype", "ranges", "elements", "coded", "dense"):
        chunks.add_column(heading, justify="right")
    for chunk in detail.chunks[:_SHOWN_CHUNKS]:
        chunks.add_row(
            str(packs[chunk.pack]),
            f"{chunk.offset:,}",
            f"{chunk.num_bytes:,}",
            chunk.dtype,
            str(chunk.num_segments),
            f"{chunk.num_elements:,}",
            f"{chunk.num_coded:,}",
            f"{chunk.num_dense:,}",
        )
    console.print(chunks)
    if len(detail.chunks) > _SHOWN_CHUNKS:
        console.print(f"and {len(detail.chunks) - _SHOWN_CHUNKS} more; --json lists all", style="dim")
    tensors = Table(title=f"{len(detail.tensors)} tensors", title_justify="left", box=SIMPLE_HEAD, header_style="dim")
    tensors.add_column("tensor", overflow="fold")
    for heading in ("dtype", "shape", "changed", "density"):
        tensors.add_column(heading, justify="right")
    for tensor in detail.tensors:
        tensors.add_row(
            tensor.name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            "-" if tensor.num_changed is None else f"{tensor.num_changed:,}",
            "-" if tensor.density is None else f"{tensor.density:.3%}",
            style="dim" if tensor.num_changed == 0 else "",
        )
    console.print(tensors)
