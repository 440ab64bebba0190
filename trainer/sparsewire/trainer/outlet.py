"""Where versions go: the publisher with at most one version in flight, and what to do when the store is away.

Collective where it says so, and for the thread that runs the steps. The view is extracted there and then; encoding,
upload and commit overlap whatever the learner does next. A store that cannot be reached costs nothing but lateness,
since the next publish covers the same change, up to a bound; any other failure ends the learner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from math import prod

from sparsewire.sync.block_fp8 import MODULES_TO_NOT_CONVERT
from sparsewire.sync.errors import DeadlineExceededError, StoreUnavailableError
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.probe import Probe
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.ranks import SOLO, Ranks
from sparsewire.sync.view import Shard
from sparsewire.trainer.config import ViewKind
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.model import CausalLM
from sparsewire.trainer.probe import Prober

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Publishes in a row that may find the store away before the learner gives up."""

IN_FLIGHT_TIMEOUT = timedelta(minutes=30)
"""Longest wait for the version in flight."""


class Outlet:
    """Publishes a model's weights, step after step."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        model: CausalLM,
        kind: ViewKind = ViewKind.BF16,
        ranks: Ranks = SOLO,
        prober: Prober | None = None,
        modules_to_not_convert: Sequence[str] = MODULES_TO_NOT_CONVERT,
    ) -> None:
        """Publish what `local_view` makes of the model, and what `prober` does; `ranks` are those of the steps' thread."""
        self._publisher = publisher
        self._model = model
        self._kind = kind
        self._ranks = ranks
        self._prober = prober
        self._modules_to_not_convert = modules_to_not_convert
        self.view_bytes = 0
        """Bytes of the whole view, all ranks together; known from the first publish on."""
        self._flight: Future[Manifest] | None = None
        self._flight_version = -1
        self._num_failures = 0

    @property
    def version(self) -> int:
        """The version of the newest weights handed over: committed, or about to be."""
        if self._flight is not None and not self._flight.done():
            return self._flight_version
        head = self._publisher.head
        return -1 if head is None else head.version

    def publish(self, *, step: int) -> Manifest:
        """Commit the weights as the next version and return its manifest. Collective; blocks.

        Raises:
            FencedError: another learner has taken over the run.
            StoreError: the store refused or is away.
        """
        return self._publisher.publish(self._view(), step=step, stepped_unix_seconds=time.time(), probe=self._probe())

    def start(self, *, step: int, stepped_unix_seconds: float) -> None:
        """Hand the weights over to be committed in the background. Collective; `settle` first."""
        assert self._flight is None, "a version is in flight"
        self._flight_version = self.version + 1
        self._flight = self._publisher.publish_in_background(
            self._view(), step=step, stepped_unix_seconds=stepped_unix_seconds, probe=self._probe()
        )

    def _view(self) -> dict[str, Shard]:
        view = local_view(
            self._model, kind=self._kind, ranks=self._ranks, modules_to_not_convert=self._modules_to_not_convert
        )
        self.view_bytes = sum(prod(shard.shape) * shard.array.itemsize for shard in view.values())
        return view

    def _probe(self) -> Probe | None:
        return None if self._prober is None else self._prober.score()

    def settle(self) -> bool:
        """Wait for the version in flight; return False when the store was away, so that it is not committed.

        Raises:
            FencedError: another learner has taken over the run.
            StoreUnavailableError: the store was away `MAX_FAILURES` times in a row.
            SparsewireError: any other failure of the publish.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return True
        try:
            flight.result(IN_FLIGHT_TIMEOUT.total_seconds())
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the version in flight was not committed within {IN_FLIGHT_TIMEOUT}"
            ) from error
        except (StoreUnavailableError, DeadlineExceededError) as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise
            logger.warning("version not published, the next one covers it (%d in a row): %s", self._num_failures, error)
            return False
        self._num_failures = 0
        return True
