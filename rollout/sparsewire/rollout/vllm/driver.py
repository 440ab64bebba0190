"""Drives the ranks of one vLLM engine through changes of weights, however they are reached.

Runs outside vLLM: in the worker process for an engine of its own, in the agent for an existing server. `RankCalls` is
the way to the ranks (in process, AsyncLLM, HTTP); requests and answers are those of `exchange.py`. Every call waits for
all ranks and raises what the first of them answered; which weights they hold afterwards is for the caller to prove.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from sparsewire.rollout.change import Change
from sparsewire.rollout.engine import EngineTensor, Placement
from sparsewire.rollout.handshake import Binding, handshake
from sparsewire.rollout.vllm.exchange import (
    Action,
    RankTensor,
    read_reports,
    sum_digests,
    tensor_from_json,
    write_json,
    write_locations,
)
from sparsewire.sync.digest import ZERO, TensorDigest
from sparsewire.sync.errors import DamagedError, EngineError, SchemaMismatchError
from sparsewire.sync.patch_file import PatchWriter
from sparsewire.sync.types import Schema

logger = logging.getLogger(__name__)

CALL_TIMEOUT = timedelta(seconds=60)
"""Bound on a request that only computes."""

LOAD_TIMEOUT = timedelta(minutes=30)
"""Bound on finding out the layout of, or loading, a whole model."""

GRACE = timedelta(seconds=1)
"""Added to a deadline that ranks keep themselves, so that their answer still arrives."""

_HASH_BYTES = 32


class RankCalls(Protocol):
    """vLLM's weight-update calls to all ranks of one engine; each returns when every rank has done it.

    Raises EngineError when the engine failed or did not answer in time.
    """

    @property
    def num_ranks(self) -> int:
        """How many ranks answer a request."""
        ...

    def initialize(self, init_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        """Call `init_weight_transfer_engine`."""
        ...

    def start_update(self, *, timeout: timedelta) -> None:
        """Call `start_weight_update`."""
        ...

    def update(self, update_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        """Call `update_weights`."""
        ...

    def finish_update(self, version: str, *, timeout: timedelta) -> None:
        """Call `finish_weight_update` with the version that tokens are labelled with from now on."""
        ...

    def check_alive(self) -> None:
        """Raise EngineError when the engine is gone for good."""
        ...


class RankDriver:
    """One engine's weights, seen from outside; see the module."""

    def __init__(self, *, calls: RankCalls, directory: Path) -> None:
        """Take an exchange directory of mode 0700 on this host, best in shared memory."""
        self._calls = calls
        self._directory = directory
        self._tensors: tuple[EngineTensor, ...] = ()
        self._opaque: dict[str, str] = {}
        self._schema: Schema | None = None
        self._names: tuple[str, ...] = ()
        self._in_update = False
        self._staged: dict[str, Any] | None = None
        self._staged_key: str | None = None
        self._read_back: Sequence[Mapping[str, Any]] | None = None
        self._locations = directory / "locations.json"
        self.held_version: int | None = None
        """What the ranks say that they hold, as of the last answer."""

    # What there is.

    def describe(self) -> Sequence[EngineTensor]:
        """List the checkpoint's tensors, found out from the ranks at the first call.

        Raises:
            EngineError: ranks disagree or the engine cannot be taken over.
        """
        if not self._tensors:
            answers = self._initialize({}, timeout=LOAD_TIMEOUT)
            self._note_version(answers)
            ranks = [[tensor_from_json(fields) for fields in answer["tensors"]] for answer in answers]
            self._tensors = tuple(self._merge(ranks))
        return self._tensors

    @property
    def opaque(self) -> Mapping[str, str]:
        """Tensors that are loaded whole whenever they change and cannot be read back, each with the reason."""
        return self._opaque

    def _merge(self, ranks: Sequence[Sequence[RankTensor]]) -> Iterable[EngineTensor]:
        by_name: dict[str, list[RankTensor]] = {}
        for rank in ranks:
            for tensor in rank:
                by_name.setdefault(tensor.spec.name, []).append(tensor)
        for name, tensors in by_name.items():
            spec = tensors[0].spec
            if any(tensor.spec != spec for tensor in tensors):
                raise EngineError(f"ranks disagree about tensor {name}: {[str(tensor.spec) for tensor in tensors]}")
            reasons = [tensor.opaque for tensor in tensors if tensor.opaque is not None]
            if reasons:
                self._opaque[name] = reasons[0]
            held = sum(math.prod(box[1]) for box in {box for tensor in tensors for box in tensor.boxes})
            owner = tensors[0].shares_with
            if owner is not None:
                placement = Placement.TIED
            elif held == spec.num_elements:
                placement = Placement.MAPPED
            else:
                # No loader puts (all of) it anywhere: the engine does without it, or makes its own.
                placement = Placement.DERIVED
            yield EngineTensor(spec=spec, placement=placement, shares_with=owner)
            for alias in tensors[0].aliases:
                shared = type(spec)(name=alias, dtype=spec.dtype, shape=spec.shape)
                yield EngineTensor(spec=shared, placement=Placement.TIED, shares_with=name)

    def bind(self, schema: Schema) -> Binding:
        """Tell all ranks which of their tensors the numbers in patches mean.

        Raises:
            HandshakeError: a tensor has no place.
        """
        binding = handshake(schema, self.describe())
        names = self._directory / "names.json"
        write_json(names, binding.places)
        self._initialize({"names": str(names)}, timeout=CALL_TIMEOUT)
        self._schema, self._names = schema, binding.places
        return binding

    # Changes.

    def stage(self, change: Change) -> None:
        """Have every rank check a change and make it ready, while it generates."""
        if change.key == self._staged_key:
            return
        self._drop_staged()
        path = change.path
        if path is None:
            path = self._directory / f"{change.key}.patch"
            self._write_patch(path, change)
        try:
            with path.open("rb") as file:
                file.seek(-_HASH_BYTES, 2)
                sha256 = file.read().hex()
        except OSError as error:
            raise DamagedError(f"patch file {path} cannot be read: {error}") from error
        staged = {
            "path": str(path),
            "sha256": sha256,
            "base_version": change.base_version,
            "target_version": change.version,
        }
        if self._opaque and self._locations.exists():
            staged["locations"] = str(self._locations)
        self._request(Action.STAGE, staged, timeout=CALL_TIMEOUT)
        self._staged, self._staged_key = staged, change.key

    def _write_patch(self, path: Path, change: Change) -> None:
        forward = change if not change.inverse else change.inverted()
        with PatchWriter(path) as writer:
            for patch in forward.patches:
                if patch.undo is None:
                    raise EngineError(
                        f"the change to version {change.version} does not say what it replaces, so it could not be taken "
                        "back: load the version whole"
                    )
                writer.append(patch)

    def _drop_staged(self) -> None:
        if self._staged_key is not None:
            (self._directory / f"{self._staged_key}.patch").unlink(missing_ok=True)
        self._staged = self._staged_key = self._read_back = None

    def apply(self, change: Change) -> None:
        """Write a change, or its inverse, into all ranks; staged first where that was not done."""
        self.stage(change)
        assert self._staged is not None
        timeout = _left(change)
        self._read_back = None
        if change.inverse:
            answers = self._request(Action.UNDO, {"base_version": change.base_version}, timeout=timeout + GRACE)
        else:
            limit = {"timeout_seconds": timeout.total_seconds()}
            answers = self._request(Action.APPLY, self._staged | limit, timeout=timeout + GRACE)
        self._note_version(answers)
        self._read_back = answers

    def load(self, tensors: Mapping[str, npt.NDArray[Any]], *, version: int) -> None:
        """Replace all weights by the run's tensors, which ranks map from the files that hold them.

        Raises:
            SchemaMismatchError: a tensor is missing or has another size; nothing was written.
        """
        schema = self._bound()
        for spec in schema:
            array = tensors.get(spec.name)
            if array is None:
                raise SchemaMismatchError(f"tensor {spec.name} is missing from what should be loaded as {version}")
            if tuple(array.shape) != spec.shape or array.dtype.itemsize != spec.dtype.width:
                raise SchemaMismatchError(
                    f"tensor {spec.name} is {array.dtype}{list(array.shape)}, the run has {spec.dtype}{list(spec.shape)}"
                )
        self._drop_staged()
        spill = self._directory / "weights.bin"
        placed = {place: tensors[spec.name] for place, spec in zip(self._names, schema, strict=True)}
        write_locations(self._locations, placed, spill=spill)
        fields = {"path": str(self._locations), "target_version": version}
        self._note_version(self._request(Action.LOAD, fields, timeout=LOAD_TIMEOUT))
        if not self._opaque:
            spill.unlink(missing_ok=True)

    def label(self, version: int) -> None:
        """Have all ranks take over a version whose bits are those they hold."""
        self._note_version(self._request(Action.LABEL, {"target_version": version}, timeout=CALL_TIMEOUT))

    def withdraw(self) -> None:
        """Have all ranks hold no version."""
        self.held_version = None
        self._drop_staged()
        self._note_version(self._request(Action.WITHDRAW, {}, timeout=CALL_TIMEOUT))

    def finish(self, version: int, *, timeout: timedelta = CALL_TIMEOUT) -> None:
        """End the update in progress, or an empty one, and label tokens with `version` from now on."""
        self._begin(timeout=timeout)
        self._in_update = False
        self._calls.finish_update(str(version), timeout=timeout)

    # Proof.

    def digest(self, names: Iterable[str]) -> Mapping[str, TensorDigest]:
        """Digest live tensors, by the run's names."""
        schema = self._bound()
        wanted: dict[str, str] = {}
        for name in names:
            if name not in schema.index:
                raise SchemaMismatchError(f"tensor {name} is not part of the run, so it has no digest here")
            wanted[name] = self._names[schema.index[name]]
        if not wanted:
            return {}
        answers = self._request(Action.DIGEST, {"names": sorted(set(wanted.values()))}, timeout=LOAD_TIMEOUT)
        found = sum_digests(answers)
        return {name: found[place] for name, place in wanted.items()}

    def digest_at(self, change: Change) -> Mapping[str, TensorDigest]:
        """Digest the live elements that a change writes, by the run's names.

        Right after an apply of the change or its inverse that is what the ranks read back as they wrote, while it was
        cheap; asked again, they read again.
        """
        self.stage(change)
        schema = self._bound()
        answers, self._read_back = self._read_back, None
        found = sum_digests(answers or self._request(Action.DIGEST, {}, timeout=_left(change) + GRACE))
        touched = {patch.tensor for patch in change.patches}
        return {schema[number].name: found.get(self._names[number], ZERO) for number in sorted(touched)}

    # Requests.

    def _initialize(self, fields: Mapping[str, Any], *, timeout: timedelta) -> list[Mapping[str, Any]]:
        report = self._report()
        deadline = time.monotonic() + timeout.total_seconds()
        self._calls.initialize({**fields, "report": str(report)}, timeout=timeout)
        return self._read(report, deadline=deadline)

    def _begin(self, *, timeout: timedelta) -> None:
        if self._in_update:
            return
        try:
            self._calls.start_update(timeout=timeout)
        except EngineError as error:
            # A call that timed out on this side may have gone through on the other.
            if "already active" not in str(error):
                raise
        self._in_update = True

    def _request(self, action: Action, fields: Mapping[str, Any], *, timeout: timedelta) -> list[Mapping[str, Any]]:
        report = self._report()
        deadline = time.monotonic() + timeout.total_seconds()
        self._begin(timeout=timeout)
        try:
            self._calls.update({**fields, "action": str(action), "report": str(report)}, timeout=timeout)
        except EngineError:
            # vLLM ends its update when a call fails.
            self._in_update = False
            raise
        return self._read(report, deadline=deadline)

    def _report(self) -> Path:
        return self._directory / f"report-{uuid.uuid4().hex[:12]}"

    def _read(self, report: Path, *, deadline: float) -> list[Mapping[str, Any]]:
        return read_reports(report, num_ranks=self._calls.num_ranks, deadline=deadline, alive=self._calls.check_alive)

    def _note_version(self, answers: Sequence[Mapping[str, Any]]) -> None:
        versions = {answer["version"] for answer in answers}
        self.held_version = versions.pop() if len(versions) == 1 else None

    def _bound(self) -> Schema:
        if self._schema is None:
            raise EngineError("the engine has no schema: bind it after the handshake")
        return self._schema


def _left(change: Change) -> timedelta:
    if change.deadline is None:
        return CALL_TIMEOUT
    return timedelta(seconds=max(0.0, change.deadline - time.monotonic()))
