"""What an object may be called, checked before any key reaches a file system or a server.

Pure. Keys arrive from configuration and from manifests of other machines, so they are hostile until checked: only
relative paths of [A-Za-z0-9._-] segments pass, and never `.` or `..`. Names outside that alphabet are therefore free
for a store's own files, which no key can reach and no listing shows.
"""

from __future__ import annotations

import re

from sparsewire.sync.errors import ConfigError

MAX_KEY_LENGTH = 768
"""Leaves room for a prefix below the 1024 bytes that S3 allows."""

MAX_GET_BYTES = 256 << 20
"""Bound of `Store.get`, which reads whole objects: manifests and heads are far below, packs are read by range."""

_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,255}")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")


def is_key(text: str) -> bool:
    """Tell whether `text` can be the key of an object."""
    return len(text) <= MAX_KEY_LENGTH and all(
        _SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in text.split("/")
    )


def check_key(key: str) -> None:
    """Refuse what cannot be a key.

    Raises:
        ConfigError: with the key as a literal, so that NUL and line breaks are visible.
    """
    if not is_key(key):
        raise ConfigError(
            f"object key {key[:200]!r} is refused: a key is 1..{MAX_KEY_LENGTH} characters of [A-Za-z0-9._-] segments "
            "joined by single slashes, without '.' or '..' segments; check the run id and where the key came from"
        )


def check_prefix(prefix: str) -> None:
    """Refuse what cannot be the beginning of a key; the empty prefix is every key's beginning.

    Raises:
        ConfigError: with the prefix as a literal.
    """
    head, _, _ = prefix.rpartition("/")
    if len(prefix) > MAX_KEY_LENGTH or not _PREFIX.fullmatch(prefix) or (prefix and "/" in prefix and not is_key(head)):
        raise ConfigError(
            f"key prefix {prefix[:200]!r} is refused: it must begin a key of [A-Za-z0-9._-] segments joined by single "
            "slashes, without '.' or '..' segments"
        )


def check_range(key: str, offset: int, length: int) -> None:
    """Refuse a range that is not one.

    Raises:
        ConfigError: offset or length is negative.
    """
    if offset < 0 or length < 0:
        raise ConfigError(f"object {key}: range of {length} bytes from {offset} is refused: both must be 0 or more")
