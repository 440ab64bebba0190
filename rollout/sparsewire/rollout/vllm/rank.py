"""The weights of one rank inside vLLM, changed as a whole or not at all.

    stage ──► thread: patch file = its hash? every tensor known, every position inside? translate, upload
      │                                              (the engine generates meanwhile)
    apply ──► join it ──► scatter ──► holds target_version           failed part-way: scatter the old bits back
    undo  ──► scatter the old bits ──► holds base_version            and that failed: holds no version at all

Everything that can be refused is refused before the first write. Tensors that are opaque to the layout map go through
the model's own loaders together with all others of their modules, from whole tensors that are prepared beforehand;
their digests are those of what was loaded, since memory cannot be read back, and `describe` says which they are.
Called by one thread; the thread of `stage` only reads.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from sparsewire.rollout.vllm.exchange import RankTensor, read_locations
from sparsewire.rollout.vllm.layout import BoxKey, LayoutMap, PreparedWrite
from sparsewire.sync.delta import TensorPatch, apply_patch, undo_patch
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits
from sparsewire.sync.errors import (
    DamagedError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    SchemaMismatchError,
    SparsewireError,
    WrongBaseError,
)
from sparsewire.sync.patch_file import read_patches
from sparsewire.sync.types import Bits, Indices

logger = logging.getLogger(__name__)

LoadDense = Callable[[Mapping[str, Bits], frozenset[str]], None]
"""Loads whole tensors, by name, through the model's loaders into the modules named."""

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Threads that write: one waits for memory most of the time."""

_THREADED_ELEMENTS = 1 << 17

Parts: TypeAlias = list[tuple[str, BoxKey, TensorDigest]]
"""Digests by tensor and part."""

_HASH_BYTES = 32


@dataclass(slots=True, kw_only=True)
class _DensePart:
    """Whole tensors of the modules that opaque tensors live in, before and after."""

    modules: frozenset[str]
    old: Mapping[str, Bits]
    new: Mapping[str, Bits]
    touched: Sequence[tuple[str, Indices]]
    """The opaque tensors' changed positions."""


@dataclass(slots=True, kw_only=True)
class _Staged:
    """A patch file on its way to being applied."""

    path: Path
    sha256: str
    base_version: int
    target_version: int
    writes: list[PreparedWrite] = field(default_factory=list)
    dense: _DensePart | None = None
    error: SparsewireError | None = None
    thread: threading.Thread | None = None

    @property
    def key(self) -> tuple[Path, str, int, int]:
        return self.path, self.sha256, self.base_version, self.target_version


class _Sums:
    """Adds up digests of writes by tensor and place; two places with the same part stay apart, to be compared."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, BoxKey, object], TensorDigest] = {}

    def add(self, write: PreparedWrite, digest: TensorDigest) -> None:
        place = (write.name, write.segment.key, write.segment.target_key)
        self._sums[place] = self._sums.get(place, ZERO) + digest

    def parts(self) -> Parts:
        return [(name, key, digest) for (name, key, _), digest in self._sums.items()]


class RankWeights:
    """What one rank holds, at which version; see the module."""

    def __init__(self, *, layout: LayoutMap, load_dense: LoadDense) -> None:
        self._layout = layout
        self._load_dense = load_dense
        self._names: Sequence[str] = ()
        self._staged: _Staged | None = None
        self._loaded: dict[str, Bits] = {}
        self.version: int | None = None
        """The version whose bits are here; None until a load or a label, and after a change that could not be undone."""

    def describe(self) -> list[RankTensor]:
        """List all tensors of the checkpoint with the parts that this rank holds."""
        return [
            RankTensor(
                spec=tensor.spec,
                boxes=tuple(segment.key for segment in tensor.segments)
                if tensor.opaque is None
                else (_whole(tensor.spec.num_elements),),
                opaque=tensor.opaque,
                shares_with=tensor.shares_with,
                aliases=tensor.aliases,
            )
            for tensor in self._layout.tensors.values()
        ]

    def bind(self, names: Sequence[str]) -> None:
        """Fix which checkpoint tensor each number in patches means.

        Raises:
            SchemaMismatchError: a name is unknown.
        """
        unknown = [name for name in names if name not in self._layout.tensors]
        if unknown:
            raise SchemaMismatchError(f"the engine's checkpoint has no tensors {', '.join(unknown[:10])}")
        self._names = tuple(names)

    # Changes.

    def stage(
        self,
        *,
        path: Path,
        sha256: str,
        base_version: int,
        target_version: int,
        locations: Path | None,
        done: Callable[[SparsewireError | None], None],
    ) -> None:
        """Begin to check and prepare a patch file; `done` is called, from another thread, with what went wrong or None."""
        self._join()
        staged = _Staged(path=path, sha256=sha256, base_version=base_version, target_version=target_version)

        def prepare() -> None:
            try:
                self._prepare(staged, locations)
            except SparsewireError as error:
                staged.error = error
            except Exception as error:  # the edge of this thread
                logger.exception("patch file %s cannot be prepared", path)
                staged.error = EngineError(f"patch file {path} cannot be prepared: {error!r}")
            done(staged.error)

        staged.thread = threading.Thread(target=prepare, name="stage", daemon=True)
        self._staged = staged
        staged.thread.start()

    def _join(self) -> None:
        if self._staged is not None and self._staged.thread is not None:
            self._staged.thread.join()

    def _prepare(self, staged: _Staged, locations: Path | None) -> None:
        try:
            with staged.path.open("rb") as file:
                file.seek(-_HASH_BYTES, 2)
                stated = file.read().hex()
        except OSError as error:
            raise DamagedError(f"patch file {staged.path} cannot be read: {error}") from error
        if stated != staged.sha256:
            raise DamagedError(f"patch file {staged.path} carries hash {stated}, {staged.sha256} was announced")
        dense: list[tuple[str, TensorPatch]] = []
        for patch in read_patches(staged.path):
            if patch.tensor >= len(self._names):
                raise SchemaMismatchError(
                    f"{staged.path} changes tensor number {patch.tensor}, the engine is bound to {len(self._names)}: bind it"
                )
            name = self._names[patch.tensor]
            if self._layout.tensors[name].opaque is not None:
                dense.append((name, patch))
            else:
                staged.writes += self._layout.prepare(name, patch)
        if self.version == staged.base_version:
            for write in staged.writes:
                if not write.finds_old():
                    raise DigestMismatchError(
                        f"live tensor {write.name} is not what {staged.path} replaces: version {self.version} is damaged"
                    )
        if dense:
            staged.dense = self._prepare_dense(staged, dense, locations)

    def _prepare_dense(
        self, staged: _Staged, patches: Sequence[tuple[str, TensorPatch]], locations: Path | None
    ) -> _DensePart:
        """Build the whole tensors of all modules that the patched opaque tensors live in."""
        if locations is None:
            raise EngineError(
                f"{staged.path} changes {patches[0][0]}, which can only be loaded whole "
                f"({self._layout.tensors[patches[0][0]].opaque}): name the file of locations with the request"
            )
        opaque = {name for name, _ in patches}
        modules = frozenset().union(*(self._layout.tensors[name].module_names for name in opaque))
        wanted = [name for name, tensor in self._layout.tensors.items() if tensor.module_names & modules]
        whole = read_locations(locations)
        if missing := [name for name in wanted if name not in whole]:
            raise EngineError(f"{locations} lacks {', '.join(missing[:10])}, so their layers cannot be loaded whole")
        new = {name: np.array(whole[name]) for name in wanted}
        old = {name: bits.copy() for name, bits in new.items()}
        touched = []
        for patch in read_patches(staged.path):
            name = self._names[patch.tensor]
            if name in new:
                apply_patch(new[name], patch)
                undo_patch(old[name], patch)
            if name in opaque:
                touched.append(
                    (
                        name,
                        patch.indices
                        if patch.indices is not None
                        else np.arange(patch.start, patch.start + patch.count),
                    )
                )
        if self.version == staged.base_version:
            for name, bits in old.items():
                self._check_is_live(name, bits, locations)
        return _DensePart(modules=modules, old=old, new=new, touched=touched)

    def _check_is_live(self, name: str, bits: Bits, locations: Path) -> None:
        """Refuse whole tensors that are not what is held: reloading a layer from them would mix versions."""
        layout = self._layout.tensors[name]
        if layout.opaque is None:
            fits = all(segment.digest() == segment.digest_of(bits) for segment in layout.segments)
        else:
            fits = name in self._loaded and np.array_equal(self._loaded[name], bits)
        if not fits:
            raise EngineError(
                f"{locations} does not hold tensor {name} as the engine has it, so its layer cannot be built from there: "
                "load the version whole"
            )

    def apply(self, *, path: Path, sha256: str, base_version: int, target_version: int, deadline: float) -> Parts:
        """Write what is staged and return digests of what is read back; only reads when its target is held already.

        Raises:
            WrongBaseError: neither its base nor its target is held; nothing was written.
            EngineError: it is not staged, or writing failed and was taken back.
        """
        staged = self._staged
        if staged is None or staged.key != (path, sha256, base_version, target_version):
            raise EngineError(f"patch file {path} is not what was staged: stage it first")
        self._join()
        if staged.error is not None:
            raise staged.error
        if self.version == target_version != base_version:
            return self.digest_staged()
        if self.version != base_version:
            raise WrongBaseError(
                f"the patch leads from version {base_version} to {target_version}, the engine holds {self.version}"
            )
        self.version = None
        try:
            found = self._write(staged, deadline=deadline)
        except BaseException:
            self._revert(staged)
            self.version = base_version
            raise
        self.version = target_version
        return found

    def _write(self, staged: _Staged, *, deadline: float) -> Parts:
        if staged.dense is not None:
            self._load(staged.dense.new, staged.dense.modules)

        def apply(write: PreparedWrite) -> TensorDigest:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    "the engine was paused for as long as it may be: raise pause_timeout_seconds"
                )
            return write.apply()

        return self._each(staged, apply)

    def _revert(self, staged: _Staged) -> Parts:
        if staged.dense is not None:
            self._load(staged.dense.old, staged.dense.modules)
        return self._each(staged, lambda write: write.revert())

    def _each(self, staged: _Staged, work: Callable[[PreparedWrite], TensorDigest]) -> Parts:
        """Do all writes, on a few threads where they are large; returns or raises when none runs any more."""
        sums = _Sums()
        many = sum(len(write.indices) for write in staged.writes) >= _THREADED_ELEMENTS
        with ThreadPoolExecutor(NUM_THREADS if many else 1, thread_name_prefix="write") as pool:
            for write, digest in zip(staged.writes, pool.map(work, staged.writes), strict=True):
                sums.add(write, digest)
        return sums.parts() + self._digest_dense(staged)

    def undo(self, *, base_version: int) -> Parts:
        """Write back what the staged patch replaced, whether or not it was applied; the base is held afterwards.

        Returns digests of what is read back.

        Raises:
            EngineError: nothing that leads from `base_version` is staged; nothing was written.
        """
        staged = self._staged
        if staged is None or staged.base_version != base_version:
            raise EngineError(
                f"nothing is staged that leads from version {base_version}, so there is nothing to take back"
            )
        self._join()
        if staged.error is not None:
            return []
        self.version = None
        found = self._revert(staged)
        self.version = base_version
        return found

    def load(self, *, locations: Path, version: int) -> None:
        """Replace all bound tensors.

        Raises:
            SchemaMismatchError: one is missing; nothing was written.
            EngineError: writing failed; no version is held.
        """
        tensors = read_locations(locations)
        if missing := [name for name in self._names if name not in tensors]:
            raise SchemaMismatchError(f"{locations} lacks {', '.join(missing[:10])}")
        self._join()
        self._staged = None
        self.version = None
        opaque = {name for name in self._names if self._layout.tensors[name].opaque is not None}
        modules: frozenset[str] = frozenset().union(*(self._layout.tensors[name].module_names for name in opaque))
        dense = {
            name: bits
            for name, bits in tensors.items()
            if name in self._layout.tensors and self._layout.tensors[name].module_names & modules
        }
        if dense:
            self._load({name: np.array(bits) for name, bits in dense.items()}, modules)
        for name in self._names:
            if name not in opaque:
                self._layout.write_all(name, tensors[name])
        self.version = version

    def _load(self, tensors: Mapping[str, Bits], modules: frozenset[str]) -> None:
        self._load_dense(tensors, modules)
        for name, bits in tensors.items():
            if self._layout.tensors[name].opaque is not None:
                self._loaded[name] = bits

    def label(self, version: int | None) -> None:
        """Say which version is held, on the word of whoever proved it; None for none."""
        self.version = version

    # Proof.

    def digest(self, names: Iterable[str]) -> Parts:
        """Digest this rank's parts of live tensors; of opaque ones, what was last loaded.

        Raises:
            EngineError: a tensor is unknown, or opaque and was never loaded.
        """
        parts: Parts = []
        for name in names:
            if name in self._layout.tensors and self._layout.tensors[name].opaque is not None:
                bits = self._last_loaded(name)
                parts.append((name, _whole(len(bits)), digest_bits(bits)))
            else:
                parts += [(name, key, digest) for key, digest in self._layout.digest(name)]
        return parts

    def digest_staged(self) -> Parts:
        """Digest the live elements at the positions of what is staged.

        Raises:
            EngineError: nothing is staged.
        """
        self._join()
        staged = self._staged
        if staged is None:
            raise EngineError("nothing is staged whose positions could be digested")
        sums = _Sums()
        for write in staged.writes:
            sums.add(write, write.digest())
        return sums.parts() + self._digest_dense(staged)

    def _digest_dense(self, staged: _Staged) -> Parts:
        if staged.dense is None:
            return []
        sums: dict[str, TensorDigest] = {}
        for name, indices in staged.dense.touched:
            sums[name] = sums.get(name, ZERO) + digest_at(indices, self._last_loaded(name)[indices])
        return [(name, _whole(len(self._loaded[name])), digest) for name, digest in sums.items()]

    def _last_loaded(self, name: str) -> Bits:
        bits = self._loaded.get(name)
        if bits is None:
            raise EngineError(f"tensor {name} cannot be read back and was never loaded: load all weights first")
        return bits


def _whole(num_elements: int) -> BoxKey:
    return 0, (num_elements,), (1,)
