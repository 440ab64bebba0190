"""Learner checkpoints: whole or absent, verified on load, readable by another number of ranks.

Layout: `<directory>/step-00000008/` holds one data file a rank, written by torch.distributed.checkpoint, and
`checkpoint.json`, which names the step, the version published from these weights, and the size and SHA-256 of every
file. Files are written and synced in a hidden folder that is renamed when complete, so a folder with the plain name is
a complete checkpoint. `save` and `load` are collective; all ranks must see one file system.

A damaged checkpoint is passed over for the one before it, with a warning that names it; when all are damaged, loading
fails rather than starting over. Files come from this learner's own directory, and are trusted once their hashes match.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from sparsewire.sync.errors import DamagedError
from sparsewire.trainer.learner import Learner
from sparsewire.trainer.ranks import TorchRanks

logger = logging.getLogger(__name__)

FORMAT_NUMBER = 1
_SEAL = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What `checkpoint.json` says; its presence with matching files makes a checkpoint."""

    format: int
    step: int
    version: int
    """The version whose bits are these weights' view."""
    num_ranks: int
    files: Mapping[str, tuple[int, str]]
    """Size in bytes and SHA-256 in hex of every other file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one learner."""

    directory: Path
    ranks: TorchRanks
    keep: int
    """How many of the newest stay."""

    def save(self, learner: Learner, *, version: int) -> Path:
        """Write the learner's state as the newest checkpoint and prune old ones; collective.

        Raises:
            OSError: the disk is full or not writable; earlier checkpoints are intact.
        """
        started = time.monotonic()
        step = learner.step_number
        final = self.directory / f"step-{step:08d}"
        incoming = self.directory / f".incoming-{final.name}"
        if self.ranks.rank == 0:
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.mkdir(parents=True)
        self.ranks.all_gather(b"")
        tensors = {**learner.state(), f"rng.{self.ranks.rank}": torch.get_rng_state()}
        writer = FileSystemWriter(incoming, single_file_per_rank=True, sync_files=True)
        save(tensors, storage_writer=writer)
        own = {
            path.name: (path.stat().st_size, _sha256(path)) for path in incoming.glob(f"__{self.ranks.rank}_*.distcp")
        }
        if self.ranks.rank == 0:
            own |= {path.name: (path.stat().st_size, _sha256(path)) for path in incoming.glob(".metadata")}
        files: dict[str, tuple[int, str]] = {}
        for payload in self.ranks.all_gather(json.dumps(own).encode()):
            files |= json.loads(payload)
        if self.ranks.rank == 0:
            seal = Seal(format=FORMAT_NUMBER, step=step, version=version, num_ranks=self.ranks.size, files=files)
            _write_synced(incoming / _SEAL, json.dumps(asdict(seal), indent=1).encode())
            # Only a damaged checkpoint can be in the way: a sound one of this step would have been resumed from.
            shutil.rmtree(final, ignore_errors=True)
            incoming.rename(final)
            _sync_folder(self.directory)
            self._prune()
        self.ranks.all_gather(b"")
        num_bytes = sum(size for size, _ in files.values())
        logger.info("checkpoint %s: %d bytes in %.1f s", final, num_bytes, time.monotonic() - started)
        return final

    def load_newest(self, learner: Learner) -> Seal | None:
        """Put the newest sound checkpoint into `learner`; None when there was never one. Collective.

        Raises:
            DamagedError: there are checkpoints and none is sound.
        """
        found = self._newest_sound() if self.ranks.rank == 0 else None
        answer = json.loads(self.ranks.broadcast(json.dumps(found).encode() if self.ranks.rank == 0 else None))
        if answer is None:
            return None
        if "error" in answer:
            raise DamagedError(answer["error"])
        path = self.directory / answer["name"]
        seal = _read_seal(path)
        reader = FileSystemReader(path)
        tensors = dict(learner.state())
        rng = f"rng.{self.ranks.rank}"
        # A rank that the checkpoint did not know keeps the stream it was seeded with.
        if rng in reader.read_metadata().state_dict_metadata:
            tensors[rng] = torch.get_rng_state()
        load(tensors, storage_reader=reader)
        if rng in tensors:
            torch.set_rng_state(tensors[rng])
        learner.step_number = seal.step
        logger.info("resumed from %s: step %d, version %d", path, seal.step, seal.version)
        return seal

    def kept_steps(self) -> list[int]:
        """Return the steps of all checkpoints there are, sound or not, newest first."""
        return [int(path.name.removeprefix("step-")) for path in self._newest_first()]

    def _newest_sound(self) -> dict[str, str] | None:
        problems = []
        for path in self._newest_first():
            try:
                _verify(path)
            except DamagedError as error:
                problems.append(str(error))
                logger.warning("checkpoint passed over: %s", error)
            else:
                return {"name": path.name}
        if problems:
            return {
                "error": f"no sound checkpoint in {self.directory}: {'; '.join(problems)}; restore one, or remove the "
                "folder to start again from the starting weights"
            }
        return None

    def _newest_first(self) -> Iterator[Path]:
        if self.directory.is_dir():
            yield from sorted((path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)), reverse=True)

    def _prune(self) -> None:
        for path in list(self._newest_first())[self.keep :]:
            shutil.rmtree(path)
        for path in self.directory.glob(".incoming-*"):
            shutil.rmtree(path)


def _read_seal(path: Path) -> Seal:
    try:
        fields = json.loads((path / _SEAL).read_bytes())
        seal = Seal(
            **{**fields, "files": {name: (int(size), str(sha)) for name, (size, sha) in fields["files"].items()}}
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"checkpoint {path}: {_SEAL} is missing or damaged: {error}") from error
    if seal.format != FORMAT_NUMBER:
        raise DamagedError(f"checkpoint {path} has format {seal.format}, this build reads {FORMAT_NUMBER}")
    return seal


def _verify(path: Path) -> None:
    """Check every file of a checkpoint against its seal.

    Raises:
        DamagedError: naming the first file that differs.
    """
    seal = _read_seal(path)
    for name, (size, sha) in seal.files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or _sha256(file) != sha:
            raise DamagedError(f"checkpoint {path}: file {name} is missing or damaged")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
