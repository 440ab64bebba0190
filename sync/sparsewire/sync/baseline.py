"""The last committed version as one rank holds it: what the next publish is compared with.

Moves only when told of a commit. On a run that has versions already it is cut from the committed head, rebuilt from
the store exactly as a late worker would.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from sparsewire.sync.delta import LastChange, apply_patch
from sparsewire.sync.digest import ZERO, TensorDigest
from sparsewire.sync.errors import SchemaMismatchError
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.merge import merge_digests
from sparsewire.sync.pack import Part
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.types import Schema, describe_difference
from sparsewire.sync.view import LocalView


class Baseline:
    """This rank's shards at `head`, and the digests of all tensors there."""

    def __init__(self, *, url: str, run: str) -> None:
        self._url = url
        self._run = run
        self._caught_up: Subscriber | None = None
        self._stack = ExitStack()
        self._local: LocalView | None = None
        self.head: Manifest | None = None
        """The committed version held; None for a run without versions."""
        self.digests: tuple[TensorDigest, ...] = ()
        """One a tensor, in schema order."""
        self.last_change: LastChange | None = None
        """What the delta to `head` replaced in this rank's shards, about 6 bytes a changed bf16 element; None if that is
        not known, or the next delta has to do without because readers may arrive at `head` by an anchor."""

    def catch_up(self, head: Manifest | None) -> None:
        """Rebuild the weights of `head` from the store; which shards of them are this rank's is learned at `shards_of`.

        Needs the full view in a temporary mirror on local disk until then.

        Raises:
            SparsewireError: what `Subscriber.sync` raises; nothing is held then.
        """
        self.close()
        self.head, self._local, self.digests, self.last_change = None, None, (), None
        if head is None:
            return
        with ExitStack() as stack:
            caught_up = stack.enter_context(Subscriber.open(self._url, run=self._run))
            caught_up.sync(head.version)
            self._caught_up, self._stack = caught_up, stack.pop_all()
        self.digests = tuple(caught_up.digests().values())
        self.head = head

    def shards_of(self, view: LocalView) -> LocalView | None:
        """Return the committed bits of the ranges that `view` covers, None for a run without versions.

        Until a publish has been committed the ranges may still change: they are cut anew from the rebuilt head.

        Raises:
            SchemaMismatchError: the view is of another model, or its shards moved since the last call.
        """
        if self.head is None:
            return None
        if self._caught_up is not None:
            self._check_schema(view, self._caught_up.schema)
            held = LocalView.of(self._caught_up.tensors())
            parts = zip(held.bits, view.starts, view.bits, strict=True)
            self._local = LocalView(
                view.schema,
                view.starts,
                tuple(whole[start : start + len(bits)].copy() for whole, start, bits in parts),
            )
        local = self.local
        self._check_schema(view, local.schema)
        if local.extents != view.extents:
            raise SchemaMismatchError(
                f"run {self._run}: this rank's shards moved between two publishes; open the publisher anew"
            )
        return local

    @property
    def local(self) -> LocalView:
        """This rank's shards; only after a publish."""
        assert self._local is not None
        return self._local

    def _check_schema(self, view: LocalView, held: Schema) -> None:
        if view.schema.sha256 != held.sha256:
            difference = describe_difference(view.schema, held)
            raise SchemaMismatchError(
                f"run {self._run} at {self._url} is of another model: {difference}; use another run id"
            )

    def move(self, view: LocalView, part: Part, parts: Sequence[Part], manifest: Manifest) -> None:
        """Take over a committed version: what this rank published of `view` as `part`, and all ranks as `parts`."""
        self.close()
        # Before the patches are applied: those of dense segments hold views of what they replace.
        self.last_change = None if self.head is None else LastChange.of(part.patches)
        if self.head is None:
            self._local = LocalView(view.schema, view.starts, tuple(np.array(bits) for bits in view.bits))
            self.digests = (ZERO,) * len(view.schema)
        for patch in part.patches:
            start = self.local.starts[patch.tensor]
            indices = None if patch.indices is None else patch.indices - start
            apply_patch(self.local.bits[patch.tensor], replace(patch, start=patch.start - start, indices=indices))
        self.digests = merge_digests(parts, base=self.digests)
        self.head = manifest

    def close(self) -> None:
        """Drop the temporary mirror, if there is one."""
        self._caught_up = None
        self._stack.close()
