"""The history of one run in a store: which objects there are, under which keys, and the rules for writing them.

Called by the publisher (which writes), by the store source and the weight service (which read), from any thread. Keys:

    RUN/epoch.json                         who may commit (compare-and-set)
    RUN/schemas/SHA256                     names, dtypes, shapes
    RUN/versions/VERSION.manifest          the commit of a version: its delta, or version 0 whole
    RUN/anchors/VERSION.manifest           a committed version again, complete
    RUN/squashed/BASE-VERSION.manifest     a committed version again, as one delta from an older one
    RUN/packs/VERSION/EPOCH-NONCE-RANK.pack
    RUN/readers/ID.json                    versions in use, kept from pruning

Manifests are immutable once written, so they are cached; what exists is always listed afresh.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass

from sparsewire.sync.chain import Link, LinkKind
from sparsewire.sync.errors import (
    AlreadyExistsError,
    ConfigError,
    DamagedError,
    FencedError,
    NotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from sparsewire.sync.manifest import Manifest, open_manifest
from sparsewire.sync.store.base import Store
from sparsewire.sync.types import Schema

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION_KEY = re.compile(r"(versions|anchors)/([0-9]{12})\.manifest")
_SQUASHED_KEY = re.compile(r"squashed/([0-9]{12})-([0-9]{12})\.manifest")
_PACK_VERSION = re.compile(r"packs/([0-9]{12})/")
_CACHED_MANIFESTS = 256
_CLAIM_ATTEMPTS = 20


def check_run(run: str) -> str:
    """Return `run` if it can name a run.

    Raises:
        ConfigError: it cannot; says what can.
    """
    if not _RUN.fullmatch(run) or ".." in run:
        raise ConfigError(
            f"run {run[:80]!r} is not a run id: use up to 128 letters, digits, '.', '_', '-', the first a letter or digit"
        )
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to commit, until somebody claims a higher epoch."""

    epoch: int
    incarnation: str
    """Random name of the process that claimed."""

    def to_bytes(self) -> bytes:
        """Serialise as JSON."""
        return json.dumps({"epoch": self.epoch, "incarnation": self.incarnation}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Claim:
        """Parse what `to_bytes` wrote.

        Raises:
            DamagedError: it is something else.
        """
        try:
            fields = json.loads(data)
            return Claim(epoch=int(fields["epoch"]), incarnation=str(fields["incarnation"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"a claim of the run is damaged: {error}") from error


class History:
    """Reads and writes one run's objects; holds no state but a bounded cache of immutable manifests."""

    def __init__(self, *, store: Store, run: str) -> None:
        self.store = store
        self.run = check_run(run)
        self._cache: OrderedDict[str, Manifest] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, relative: str) -> str:
        """Return the store key of an object named relative to the run."""
        return f"{self.run}/{relative}"

    # What exists.

    def versions(self, *, after: int | None = None) -> list[int]:
        """Return committed versions above `after`, ascending, as far as their commits are still kept."""
        start = "" if after is None else self.key(f"versions/{after:012d}.manifest")
        return [version for kind, _, version in self._listed("versions/", start) if kind == "versions"]

    def head(self, *, after: int | None = None) -> int | None:
        """Return the newest committed version, or None; `after` is a version known to be committed."""
        newer = self.versions(after=after)
        return newer[-1] if newer else after

    def links(self, *, after: int | None = None) -> list[Link]:
        """Return every step that leads to a version above `after`, read from the manifests themselves.

        A commit that is damaged is listed all the same, so that whoever takes it learns of the damage; a damaged
        extra anchor or squashed delta is left out, since other ways lead to its version.
        """
        names: list[tuple[LinkKind, int | None, int]] = []
        names += [(LinkKind.ANCHOR, None, version) for _, _, version in self._listed("anchors/", "")]
        names += [(LinkKind.DELTA, base, version) for _, base, version in self._listed("squashed/", "")]
        links = [
            manifest.link
            for kind, base, version in names
            if (after is None or version > after) and (manifest := self._manifest_or_none(_name(kind, base, version)))
        ]
        for version in self.versions(after=after):
            if manifest := self._manifest_or_none(_version_name(version)):
                links.append(manifest.link)
            else:
                links.append(Link.delta(version - 1, version, num_bytes=1) if version else Link.anchor(0, num_bytes=1))
        return links

    def _listed(self, folder: str, start_after: str) -> list[tuple[str, int | None, int]]:
        found: list[tuple[str, int | None, int]] = []
        for info in self.store.list(self.key(folder), start_after=start_after):
            relative = info.key[len(self.run) + 1 :]
            if match := _VERSION_KEY.fullmatch(relative):
                found.append((match[1], None, int(match[2])))
            elif match := _SQUASHED_KEY.fullmatch(relative):
                found.append(("squashed", int(match[1]), int(match[2])))
        return found

    # Reading.

    def sealed(self, link: Link) -> bytes:
        """Return the sealed manifest of a link byte for byte.

        Raises:
            NotFoundError: it does not exist (any more).
        """
        return self.store.get(self.key(self._place(link))).data

    def _place(self, link: Link) -> str:
        """Return the relative key of a link: the commit of its version where that is what it is, else the extra object."""
        if link.kind is LinkKind.ANCHOR:
            return _version_name(0) if link.version == 0 else _name(LinkKind.ANCHOR, None, link.version)
        if link.base_version == link.version - 1:
            return _version_name(link.version)
        return _name(LinkKind.DELTA, link.base_version, link.version)

    def commit(self, version: int) -> Manifest:
        """Return the manifest that committed `version`.

        Raises:
            NotFoundError: never committed, or pruned.
            DamagedError: its bytes are damaged.
        """
        return self._manifest(_version_name(version))

    def manifest(self, link: Link) -> Manifest:
        """Return the manifest of a link.

        Raises:
            NotFoundError, DamagedError, UnsupportedFormatError.
        """
        return self._manifest(self._place(link))

    def _manifest_or_none(self, relative: str) -> Manifest | None:
        try:
            return self._manifest(relative)
        except (NotFoundError, DamagedError):
            return None

    def _manifest(self, relative: str) -> Manifest:
        with self._lock:
            if relative in self._cache:
                self._cache.move_to_end(relative)
                return self._cache[relative]
        where = f"{self.store.url}: {self.key(relative)}"
        manifest = open_manifest(self.store.get(self.key(relative)).data, where=where)
        check_identity(manifest, run=self.run, where=where)
        if relative != self._place(manifest.link):
            raise DamagedError(f"{where}: this is the manifest of {_describe(manifest)}; objects were mixed up")
        with self._lock:
            self._cache[relative] = manifest
            while len(self._cache) > _CACHED_MANIFESTS:
                self._cache.popitem(last=False)
        return manifest

    def schema(self, sha256: bytes) -> bytes:
        """Return a schema object's bytes, unchecked."""
        return self.store.get(self.key(f"schemas/{sha256.hex()}")).data

    def read_pack(self, pack_key: str, offset: int, num_bytes: int) -> bytes:
        """Return a byte range of a pack; the key must be one that a manifest can name."""
        return self.store.get_range(self.key(pack_key), offset, num_bytes)

    # Writing.

    def claim(self, incarnation: str) -> Claim:
        """Take the run over with the next epoch; every earlier claimant is fenced from now on.

        Raises:
            StoreUnavailableError: other claimants kept winning.
        """
        for _ in range(_CLAIM_ATTEMPTS):
            try:
                stored = self.store.get(self.key("epoch.json"))
            except NotFoundError:
                stored = None
            epoch = 1 if stored is None else self._parse_claim(stored.data).epoch + 1
            claim = Claim(epoch=epoch, incarnation=incarnation)
            data = claim.to_bytes()
            try:
                if stored is None:
                    self.store.put_if_absent(self.key("epoch.json"), data)
                else:
                    self.store.put_if_match(self.key("epoch.json"), data, stored.etag)
            except (AlreadyExistsError, PreconditionFailedError):
                continue
            return claim
        raise StoreUnavailableError(
            f"{self.store.url}: run {self.run} could not be claimed, other learners keep claiming it; stop them"
        )

    def check_claim(self, claim: Claim) -> None:
        """Refuse a claimant that has been fenced.

        Raises:
            FencedError: names both epochs.
        """
        current = self._parse_claim(self.store.get(self.key("epoch.json")).data)
        if current != claim:
            raise FencedError(
                f"run {self.run}: epoch {current.epoch} was claimed by {current.incarnation}, "
                f"this learner ({claim.incarnation}) holds epoch {claim.epoch} and must stop"
            )

    def _parse_claim(self, data: bytes) -> Claim:
        try:
            return Claim.from_bytes(data)
        except DamagedError as error:
            raise DamagedError(
                f"{self.store.url}: {self.key('epoch.json')}: {error}; restore it from another copy"
            ) from error

    def put_schema(self, schema: Schema) -> None:
        """Store a schema under its hash; storing it again is no error."""
        self.store.put(self.key(f"schemas/{schema.sha256.hex()}"), schema.to_bytes())

    def put_commit(self, manifest: Manifest, sealed: bytes) -> None:
        """Commit a version.

        Raises:
            AlreadyExistsError: that version was committed by somebody else.
        """
        self.store.put_if_absent(self.key(_version_name(manifest.version)), sealed)

    def put_anchor(self, manifest: Manifest) -> None:
        """Store a committed version complete.

        Raises:
            AlreadyExistsError: an anchor of that version is there already, and stays.
        """
        self.store.put_if_absent(self.key(_name(LinkKind.ANCHOR, None, manifest.version)), manifest.seal())

    def delete(self, link: Link) -> None:
        """Remove a link, its manifest first so that no manifest ever names absent packs.

        The packs of a damaged manifest stay until `sweep`, since nothing says which they are.
        """
        relative = self._place(link)
        manifest = self._manifest_or_none(relative)
        self.store.delete(self.key(relative))
        with self._lock:
            self._cache.pop(relative, None)
        for pack in manifest.packs if manifest else ():
            self.store.delete(self.key(pack.key))

    def sweep(self, *, up_to: int, older_than_unix_seconds: float) -> int:
        """Remove packs that no manifest names, left by publishers that were killed; returns how many.

        Only packs of versions committed already (at most `up_to`), and not written lately: nobody can still be about
        to name them.
        """
        named: set[str] = set()
        for link in self.links():
            manifest = self._manifest_or_none(self._place(link))
            if manifest is None:
                return 0
            named.update(self.key(pack.key) for pack in manifest.packs)
        stray = [
            info.key
            for info in self.store.list(self.key("packs/"))
            if info.key not in named
            and info.modified_unix_seconds < older_than_unix_seconds
            and (match := _PACK_VERSION.match(info.key[len(self.run) + 1 :]))
            and int(match[1]) <= up_to
        ]
        for key in stray:
            self.store.delete(key)
        return len(stray)

    # Readers.

    def put_reader(self, reader: str, *, version: int, expires_unix_seconds: float) -> None:
        """Note that `reader` stands at `version` and will want to go on from there."""
        fields = {"version": version, "expires_unix_seconds": expires_unix_seconds}
        self.store.put(self.key(f"readers/{reader}.json"), json.dumps(fields).encode())

    def delete_reader(self, reader: str) -> None:
        """Forget a reader."""
        self.store.delete(self.key(f"readers/{reader}.json"))

    def readers(self, *, now_unix_seconds: float) -> list[int]:
        """Return the versions that live readers stand at; notes that have expired are removed."""
        versions = []
        for info in list(self.store.list(self.key("readers/"))):
            try:
                fields = json.loads(self.store.get(info.key).data)
                version, expires = int(fields["version"]), float(fields["expires_unix_seconds"])
            except NotFoundError:
                continue
            except (ValueError, KeyError, TypeError, OverflowError):
                version, expires = 0, 0.0
            if expires > now_unix_seconds:
                versions.append(version)
            else:
                self.store.delete(info.key)
        return versions


def _version_name(version: int) -> str:
    return f"versions/{version:012d}.manifest"


def _name(kind: LinkKind, base: int | None, version: int) -> str:
    return (
        f"anchors/{version:012d}.manifest"
        if kind is LinkKind.ANCHOR
        else f"squashed/{base:012d}-{version:012d}.manifest"
    )


def check_identity(manifest: Manifest, *, run: str, where: str) -> None:
    """Refuse a manifest of another run.

    Raises:
        DamagedError: names both runs.
    """
    if manifest.run != run:
        raise DamagedError(
            f"{where}: manifest belongs to run {manifest.run!r}, not {run!r}; objects of two runs were mixed up"
        )


def _describe(manifest: Manifest) -> str:
    base = "" if manifest.base_version is None else f" from {manifest.base_version}"
    return f"the {manifest.kind} to version {manifest.version}{base}"


def pack_prefix(version: int) -> str:
    """Return the folder of a version's packs, relative to the run."""
    return f"packs/{version:012d}/"
