"""Listings in key order from servers that do not agree on what key order is.

Pure. Amazon sorts whole keys by bytes; servers with real folders (SeaweedFS) sort segment by segment, so that `a/x`
comes before `a-b` and `a.b`, although `-` and `.` are smaller than `/`. In the alphabet of our keys only these two
characters are smaller than `/`. So keys whose first segment has the same stem (what precedes its first `-` or `.`)
stand together in both orders, and the stems themselves stand in the same order in both. Sorting inside each such
group therefore gives key order from either server, with one group in memory: a few objects in a folder of versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from sparsewire.sync.store.base import ObjectInfo

_STEM = re.compile(r"[^./-]*")


def in_key_order(infos: Iterable[ObjectInfo], *, folder: str) -> Iterator[ObjectInfo]:
    """Yield `infos`, as either kind of server lists the keys below `folder` ('' or ending in a slash), in key order."""
    for _, group in groupby(infos, key=lambda info: _stem(info.key, folder)):
        yield from sorted(group, key=lambda info: info.key)


def start_position(start_after: str, *, folder: str) -> str | None:
    """Return where a server must start so that every key of `folder` above `start_after` follows, in either order.

    It lies just before the group of `start_after`, whose members the caller filters. '' is the beginning; None means
    that nothing can follow.
    """
    if not start_after.startswith(folder):
        return "" if start_after < folder else None
    stem = _stem(start_after, folder)
    if not stem:
        return ""
    # '~' is above every character of a key, so this is above all groups before the stem's.
    return folder + stem[:-1] + chr(ord(stem[-1]) - 1) + "~"


def _stem(key: str, folder: str) -> str:
    found = _STEM.match(key, len(folder))
    return found[0] if found else ""
