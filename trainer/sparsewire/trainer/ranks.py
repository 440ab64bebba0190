"""The learner's processes: how they find each other, exchange bytes, and let the publisher talk in the background.

`open_process_group` is called once a process, before any model exists. Under torchrun it joins the launcher's group;
started plainly it makes a group of one that opens no port. Collectives of the model (NCCL on GPU, gloo on CPU), of the
step loop and of the publisher's thread run on three separate groups, because collectives of one group must be issued
in the same order by every rank and two threads cannot promise that. Every collective has a deadline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparsewire.sync.errors import ConfigError
from sparsewire.trainer.config import Device

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""After this a rank gives up on its peers; rank 0 sends sign of life far more often while it waits for data."""


class TorchRanks:
    """Implements `sparsewire.sync.ranks.Ranks` over one gloo group; use each instance from one thread only."""

    def __init__(self, *, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self._group.rank()

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._group.size()

    def all_gather(self, payload: bytes) -> Sequence[bytes]:
        """Return every rank's payload in rank order; blocks until all ranks have called.

        Raises:
            RuntimeError: a peer died or did not call within `COLLECTIVE_TIMEOUT`.
        """
        if self.size == 1:
            return [payload]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        if longest:
            dist.all_gather(parts, padded, group=self._group)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's payload on every rank; other ranks pass None.

        Raises:
            RuntimeError: a peer died or did not call within `COLLECTIVE_TIMEOUT`.
        """
        if self.size == 1:
            assert payload is not None
            return payload
        length = torch.tensor([len(payload or b"")], dtype=torch.int64)
        dist.broadcast(length, 0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        if payload:
            data.copy_(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()))
        if len(data):
            dist.broadcast(data, 0, group=self._group)
        return data.numpy().tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Everything a rank needs to act with its peers."""

    mesh: DeviceMesh
    """One dimension over all ranks; the model is sharded along it."""
    device: torch.device
    control: TorchRanks
    """For the step loop's thread."""
    publishing: TorchRanks
    """For the publisher's background thread."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self.control.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.control.size


@contextmanager
def open_process_group(device: Device = Device.AUTO) -> Iterator[ProcessGroup]:
    """Join torchrun's processes, or make a group of one; leave it when the block ends.

    Raises:
        ConfigError: CUDA is asked for and there is none, or this process already has a group.
    """
    if device is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError('device = "cuda", but torch finds no CUDA device here; set device = "cpu" or "auto"')
    if dist.is_initialized():
        raise ConfigError("torch.distributed is initialised already in this process; run one learner per process")
    use_cuda = device is not Device.CPU and torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    try:
        place = torch.device("cpu")
        if use_cuda:
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(place)
        yield ProcessGroup(
            mesh=init_device_mesh(place.type, (dist.get_world_size(),)),
            device=place,
            control=TorchRanks(group=_gloo_group()),
            publishing=TorchRanks(group=_gloo_group()),
        )
    finally:
        dist.destroy_process_group()


def _gloo_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group
