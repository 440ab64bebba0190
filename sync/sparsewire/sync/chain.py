"""Which stored deltas and anchors lead from what is held to what is wanted, and which of them may be deleted.

Pure. A link is one manifest seen from afar: an anchor makes its version from nothing, a delta from its base. A predicted
delta also needs the change that made its base, so it can only be taken by who took the delta before it. Deltas only go
forward, so plans do too: a plan ends at the wanted version and passes through none above it. The subscriber asks
`plan`, the publisher asks `anchor_due` before it writes and `retained` before it deletes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sparsewire.sync.errors import VersionUnavailableError


class LinkKind(StrEnum):
    """What a link makes its version from."""

    ANCHOR = "anchor"
    """Nothing: the version is stored complete."""
    DELTA = "delta"
    """The base version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One way to arrive at a version."""

    kind: LinkKind
    base_version: int | None
    """Version that a delta applies to; None for an anchor."""
    version: int
    num_bytes: int
    """What following the link costs: bytes of all its packs."""
    predicted: bool = False
    """A delta coded against the change from `base_version - 1` to `base_version`."""

    def __post_init__(self) -> None:
        if self.version < 0 or self.num_bytes < 0:
            raise ValueError(f"link: version {self.version} and num_bytes {self.num_bytes} must not be negative")
        if (self.kind is LinkKind.ANCHOR) != (self.base_version is None):
            raise ValueError(f"link: {self.kind} of version {self.version} has base {self.base_version}")
        if self.base_version is not None and not 0 <= self.base_version < self.version:
            raise ValueError(f"link: delta to version {self.version} must come from below, not {self.base_version}")
        if self.predicted and not self.base_version:
            raise ValueError(
                f"link: {self.kind} of version {self.version} has no change before it to be predicted from"
            )

    @staticmethod
    def anchor(version: int, *, num_bytes: int) -> Link:
        """Return the link of a version stored complete."""
        return Link(kind=LinkKind.ANCHOR, base_version=None, version=version, num_bytes=num_bytes)

    @staticmethod
    def delta(base_version: int, version: int, *, num_bytes: int, predicted: bool = False) -> Link:
        """Return the link of the change from `base_version` to `version`."""
        return Link(
            kind=LinkKind.DELTA,
            base_version=base_version,
            version=version,
            num_bytes=num_bytes,
            predicted=predicted,
        )

    @property
    def tells_change(self) -> bool:
        """Whether who took it knows the last change of its version, and so can take a predicted delta next."""
        return self.base_version == self.version - 1

    def __str__(self) -> str:
        return f"anchor {self.version}" if self.base_version is None else f"delta {self.base_version}->{self.version}"


@dataclass(frozen=True, slots=True)
class _Path:
    """The best known way to a version; the last link and the path before it."""

    num_bytes: int
    num_links: int
    last: Link | None
    before: _Path | None

    def extend(self, link: Link) -> _Path:
        return _Path(self.num_bytes + link.num_bytes, self.num_links + 1, link, self)

    def links(self) -> tuple[Link, ...]:
        found: list[Link] = []
        path: _Path | None = self
        while path is not None and path.last is not None:
            found.append(path.last)
            path = path.before
        return tuple(reversed(found))


_NOTHING = _Path(0, 0, None, None)


def _order(link: Link) -> tuple[int, int, int]:
    return link.version, link.num_bytes, -1 if link.base_version is None else link.base_version


def _cheaper(one: _Path | None, other: _Path | None) -> _Path | None:
    """Return the path of fewer bytes, then links; None only without either."""
    if one is None or other is None:
        return one or other
    return other if (other.num_bytes, other.num_links) < (one.num_bytes, one.num_links) else one


def _cheapest(held: int | None, links: Iterable[Link], *, knows_change: bool) -> dict[int, _Path]:
    """Return the cheapest path to every version that can be reached; deltas only go forward, so one pass will do.

    A version is two places: with the change that made it known, from where predicted deltas lead on, and without.
    """
    paths: dict[tuple[int, bool], _Path] = {} if held is None else {(held, knows_change): _NOTHING}
    for link in sorted(links, key=_order):
        if link.base_version is None:
            before: _Path | None = _NOTHING
        else:
            before = paths.get((link.base_version, True))
            if not link.predicted:
                before = _cheaper(before, paths.get((link.base_version, False)))
        if before is None:
            continue
        place = link.version, link.tells_change
        cheaper = _cheaper(paths.get(place), before.extend(link))
        assert cheaper is not None
        paths[place] = cheaper
    best: dict[int, _Path] = {}
    for (version, _), path in paths.items():
        cheaper = _cheaper(best.get(version), path)
        assert cheaper is not None
        best[version] = cheaper
    return best


def plan(*, held: int | None, wanted: int, links: Iterable[Link], knows_change: bool = False) -> tuple[Link, ...]:
    """Return the links that lead from `held` (None: nothing) to `wanted` for the fewest bytes, then fewest links.

    Empty when `wanted` is held already, whatever links exist. A plan may begin with an anchor on either side of
    `held`; what was held is then of no use. `knows_change` says that the change from `held - 1` to `held` is at hand.

    Raises:
        VersionUnavailableError: no path exists; the message says whether the version never existed or what is gone.
    """
    if held == wanted:
        return ()
    known = tuple(links)
    settled = [link for link in known if link.version <= wanted]
    path = _cheapest(held, settled, knows_change=knows_change).get(wanted)
    if path is None:
        raise VersionUnavailableError(_why_unavailable(held, wanted, known))
    return path.links()


def _why_unavailable(held: int | None, wanted: int, links: Sequence[Link]) -> str:
    """Say what is missing between `held` and `wanted`; called when no path exists."""
    versions = {link.version for link in links}
    bases = {link.base_version for link in links if link.base_version is not None}
    if not versions:
        return f"version {wanted}: the run has no versions yet: start its learner, or check the run's name"
    if wanted not in versions:
        newest, oldest = max(versions), min(versions)
        if wanted > newest:
            return f"version {wanted} was never published: the newest is {newest}; wait for it or ask for an older one"
        reason = "was pruned" if wanted in bases or wanted < oldest else "was pruned or never published"
        return f"version {wanted} {reason}: versions {oldest}..{newest} remain; ask for one of those"
    have = "no weights are held" if held is None else f"version {held} is held"
    plain = [replace(link, predicted=False) for link in links if link.version <= wanted]
    if wanted in _cheapest(held, plain, knows_change=False):
        return (
            f"version {wanted}: {have}, but not the change that made it, against which the next delta is coded, and "
            "there is no anchor to start from: wait for the next one"
        )
    needed, frontier = {wanted}, [wanted]
    while frontier:
        version = frontier.pop()
        bases_of = {link.base_version for link in links if link.version == version and link.base_version is not None}
        frontier += bases_of - needed
        needed |= bases_of
    missing = ", ".join(str(version) for version in sorted(needed - versions)[:8])
    return (
        f"version {wanted}: {have}, and the links to version {missing} that its deltas stand on were pruned, "
        "with no anchor to start from: wait for the next anchor, or seed from a checkpoint of that version"
    )


def retained(*, links: Iterable[Link], head: int, window: int, readers: Collection[int]) -> frozenset[Link]:
    """Return the links that must be kept; all others may be deleted.

    Kept are: everything that makes one of the newest `window` versions up to `head`, and the cheapest path to each of
    them from nothing; the newest anchor and the deltas from it to head; for each version in `readers` (held by a live
    subscriber) its cheapest path to head, if there is one; and links beyond `head`, which are not for this call to
    judge. So nothing that could be reached within the window, or by a live reader, becomes unreachable or dearer.

    Raises:
        ValueError: `window` is below 1.
    """
    if window < 1:
        raise ValueError(f"retention window {window} must be at least 1: the head itself has to stay reachable")
    known = tuple(links)
    settled = [link for link in known if link.version <= head]
    kept = {link for link in known if link.version > head - window}
    from_nothing = _cheapest(None, settled, knows_change=False)
    for version in range(max(0, head - window + 1), head + 1):
        if version in from_nothing:
            kept.update(from_nothing[version].links())
    anchors = [link for link in settled if link.kind is LinkKind.ANCHOR]
    if anchors:
        newest = max(anchors, key=lambda link: (link.version, -link.num_bytes))
        kept.add(newest)
        kept.update(_deltas_to(head, newest.version, settled) or ())
    for reader in set(readers):
        for knows_change in (True, False):
            path = _cheapest(reader, settled, knows_change=knows_change).get(head)
            if path is not None:
                kept.update(path.links())
    return frozenset(kept)


def anchor_due(links: Iterable[Link], fraction: float) -> bool:
    """Return whether the deltas from the newest anchor to the newest version outweigh `fraction` of that anchor.

    True as well when there is no anchor, or none from which the newest version can be reached. A newest version that
    is itself an anchor is never due.

    Raises:
        ValueError: `fraction` is not above 0.
    """
    if not fraction > 0:
        raise ValueError(f"anchor fraction {fraction} must be above 0: it would write an anchor with every version")
    known = tuple(links)
    anchors = [link for link in known if link.kind is LinkKind.ANCHOR]
    if not anchors:
        return True
    newest = max(anchors, key=lambda link: (link.version, -link.num_bytes))
    deltas = _deltas_to(max(link.version for link in known), newest.version, known)
    return deltas is None or sum(link.num_bytes for link in deltas) > fraction * newest.num_bytes


def _deltas_to(head: int, start: int, links: Iterable[Link]) -> tuple[Link, ...] | None:
    """Return the cheapest path of deltas alone from `start` to `head`; None when there is none."""
    deltas = [link for link in links if link.kind is LinkKind.DELTA]
    path = _cheapest(start, deltas, knows_change=False).get(head)
    return None if path is None else path.links()
