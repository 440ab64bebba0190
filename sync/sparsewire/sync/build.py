"""Which build this is and which protocol it speaks; peers compare both at handshake."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PROTOCOL_NUMBER = 1
"""Raised whenever two builds could misunderstand each other on the wire."""

FORMAT_NUMBER = 1
"""Raised whenever stored bytes change meaning."""


def build_name() -> str:
    """Return the build as `sparsewire/<version>`."""
    try:
        return f"sparsewire/{version('sparsewire')}"
    except PackageNotFoundError:
        return "sparsewire/unknown"
