"""What the driver of an engine and the ranks inside vLLM tell each other: small JSON requests, answers in files.

A request is vLLM's `update_info` (or `init_info`): paths and numbers, never weights. Every rank writes its answer to
`<report>.<rank>` in the exchange directory, complete once it carries that name. Weights are named by file and offset,
so that each rank maps what is there already. The directory must belong to the user of both sides and be closed to
others, because vLLM's development routes, by which requests may come, know no authentication.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.rollout.vllm.layout import BoxKey
from sparsewire.sync import errors
from sparsewire.sync.digest import ZERO, TensorDigest
from sparsewire.sync.errors import (
    DamagedError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    SparsewireError,
)
from sparsewire.sync.types import Bits, Dtype, TensorSpec, bits_of

_POLL_SECONDS = 0.0005


class Action(StrEnum):
    """What a rank is asked to do."""

    STAGE = "stage"
    """Check a patch file and make ready to apply it, in a thread of its own, while the engine generates."""
    APPLY = "apply"
    """Write what is staged; stage it first where that was not done."""
    UNDO = "undo"
    """Write back what `apply` replaced; right also where nothing was applied."""
    DIGEST = "digest"
    """Digest live tensors: those named, or the elements that are staged."""
    LOAD = "load"
    """Replace all weights."""
    LABEL = "label"
    """Take over a version whose bits are those already held."""
    WITHDRAW = "withdraw"
    """Hold no version any more, until a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """One checkpoint tensor as one rank describes it."""

    spec: TensorSpec
    boxes: tuple[BoxKey, ...]
    """The parts that the rank holds."""
    opaque: str | None
    shares_with: str | None
    aliases: tuple[str, ...]
    """Other names for its memory."""


def write_json(path: Path, value: object) -> None:
    """Write a file that is complete once it carries its name."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


# Answers.


def write_report(path: str, *, rank: int, answer: Mapping[str, Any]) -> None:
    """Put a rank's answer where the driver waits for it.

    Raises:
        EngineError: the directory is not private to this user.
    """
    final = Path(f"{path}.{rank}")
    status = final.parent.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise EngineError(f"{final.parent} is open to other users, so nothing is written there: make it mode 0700")
    write_json(final, answer)


def failure(error: Exception) -> Mapping[str, Any]:
    """Return the answer that stands for an error."""
    return {"error": type(error).__name__, "message": str(error)}


def read_reports(path: Path, *, num_ranks: int, deadline: float, alive: Callable[[], None]) -> list[Mapping[str, Any]]:
    """Wait for the answers of all ranks and return them in order; the files are deleted.

    Args:
        path: what the request named.
        num_ranks: how many ranks answer.
        deadline: monotonic seconds.
        alive: called while waiting; raises when no answer can come any more.

    Raises:
        DeadlineExceededError: a rank did not answer in time.
        SparsewireError: what a rank answered; the first by number.
    """
    answers: list[Mapping[str, Any]] = []
    for rank in range(num_ranks):
        file = Path(f"{path}.{rank}")
        while not file.exists():
            alive()
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"rank {rank} of {num_ranks} did not answer in time: {file} is missing")
            time.sleep(_POLL_SECONDS)
        answers.append(json.loads(file.read_text()))
        file.unlink()
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise _error(answer, rank)
    return answers


def _error(answer: Mapping[str, Any], rank: int) -> SparsewireError:
    kind = getattr(errors, str(answer["error"]), EngineError)
    if not (isinstance(kind, type) and issubclass(kind, SparsewireError)):
        kind = EngineError
    return kind(f"rank {rank}: {answer['message']}")


# Descriptions and digests.


def tensor_to_json(tensor: RankTensor) -> Mapping[str, Any]:
    """Return a rank's description of a tensor as JSON values."""
    return {
        "name": tensor.spec.name,
        "dtype": str(tensor.spec.dtype),
        "shape": tensor.spec.shape,
        "boxes": tensor.boxes,
        "opaque": tensor.opaque,
        "shares_with": tensor.shares_with,
        "aliases": tensor.aliases,
    }


def tensor_from_json(fields: Mapping[str, Any]) -> RankTensor:
    """Parse what `tensor_to_json` made."""
    return RankTensor(
        spec=TensorSpec(name=fields["name"], dtype=Dtype(fields["dtype"]), shape=tuple(fields["shape"])),
        boxes=tuple(_box(box) for box in fields["boxes"]),
        opaque=fields["opaque"],
        shares_with=fields["shares_with"],
        aliases=tuple(fields["aliases"]),
    )


def _box(fields: Sequence[Any]) -> BoxKey:
    offset, extents, strides = fields
    return int(offset), tuple(map(int, extents)), tuple(map(int, strides))


def digests_to_json(parts: Iterable[tuple[str, BoxKey, TensorDigest]]) -> Sequence[Any]:
    """Return digests of parts of tensors as JSON values."""
    return [[name, box, str(digest)] for name, box, digest in parts]


def sum_digests(answers: Iterable[Mapping[str, Any]]) -> dict[str, TensorDigest]:
    """Add up the digests of all ranks' parts by tensor, parts that several hold once.

    Raises:
        DigestMismatchError: two holders of the same part differ.
    """
    parts: dict[tuple[str, BoxKey], TensorDigest] = {}
    for answer in answers:
        for name, fields, text in answer["digests"]:
            key, digest = (name, _box(fields)), TensorDigest(int(text[:16], 16), int(text[16:], 16))
            if parts.setdefault(key, digest) != digest:
                raise DigestMismatchError(
                    f"tensor {name}: two copies of the part {fields} have digests {parts[key]} and {digest}"
                )
    totals: dict[str, TensorDigest] = {}
    for (name, _), digest in parts.items():
        totals[name] = totals.get(name, ZERO) + digest
    return totals


# Weights.


def write_locations(path: Path, tensors: Mapping[str, npt.NDArray[Any]], *, spill: Path) -> None:
    """Write where ranks find tensors by name; arrays that are not views of a file are copied to `spill` first."""
    places: dict[str, Any] = {}
    spilled = [(name, array) for name, array in tensors.items() if _file_of(array) is None]
    if spilled:
        with spill.open("wb") as file:
            for name, array in spilled:
                file.write(bytes(-file.tell() % 64))
                places[name] = [str(spill), file.tell(), str(Dtype.of(array.dtype)), array.shape]
                file.write(bits_of(array).data)
    for name, array in tensors.items():
        if name not in places:
            mapped = _file_of(array)
            assert mapped is not None
            places[name] = [*mapped, str(Dtype.of(array.dtype)), array.shape]
    write_json(path, places)


def read_locations(path: Path) -> dict[str, Bits]:
    """Map the tensors of a locations file, read-only and without reading them, as flat bits by name.

    Raises:
        DamagedError: it is missing, no locations file, or names bytes that are not there.
    """
    maps: dict[str, npt.NDArray[np.uint8]] = {}
    tensors: dict[str, Bits] = {}
    try:
        for name, (file, offset, dtype, shape) in json.loads(path.read_text()).items():
            if file not in maps:
                maps[file] = np.memmap(file, np.uint8, "r")
            spec = TensorSpec(name=name, dtype=Dtype(dtype), shape=tuple(shape))
            raw = np.asarray(maps[file][offset : offset + spec.num_bytes])
            if len(raw) != spec.num_bytes:
                raise ValueError(f"{file} ends before tensor {name}")
            tensors[name] = raw.view(spec.dtype.bits)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} does not say where weights are: {error}") from error
    return tensors


def _file_of(array: npt.NDArray[Any]) -> tuple[str, int] | None:
    """Return file and offset behind a contiguous view of a file map; None for arrays in memory."""
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    if base is None or base.filename is None or not array.flags.c_contiguous:
        return None
    # A memmap that is itself a view keeps the offset of the map it came from, so count from the map's own start.
    while isinstance(base.base, np.memmap):
        base = base.base
    address, start = (int(view.__array_interface__["data"][0]) for view in (array, base))
    return str(base.filename), base.offset + address - start
