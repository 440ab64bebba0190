"""One bucket as a place to send requests to: the client, and the budget within which every call is tried.

Used by the store and its writer. botocore's own retries are off, so that `RetryPolicy` is the only budget; what fails
is judged by `s3_errors`. Thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from prometheus_client import Counter, Histogram

from sparsewire.sync.errors import ConfigError, SparsewireError, StoreUnavailableError
from sparsewire.sync.store.location import AddressingStyle, S3Location
from sparsewire.sync.store.retry import RetryBudget, RetryPolicy, jitter
from sparsewire.sync.store.s3_errors import judge

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOKEN = "sparsewire-write"
"""Metadata key of the token by which a writer knows its own object again."""

_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")

_request_seconds = Histogram(
    "sparsewire_s3_request_seconds",
    "Time of calls to the S3 server, retries included.",
    ["operation", "outcome"],
    buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60),
)
_retries = Counter("sparsewire_s3_retries_total", "Tries that failed and were repeated.", ["operation"])


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """How the server is used."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    connect_timeout: timedelta = timedelta(seconds=5)
    read_timeout: timedelta = timedelta(seconds=20)
    """Longest silence of the server inside a request."""
    part_bytes: int = 8 << 20
    """Objects up to this size are written by one request; S3 refuses parts below 5 MiB."""
    num_upload_threads: int = 4
    """Parts in flight of all writers together; one writer holds at most this number plus one parts in memory."""
    max_connections: int = 32


class S3Bucket:
    """A client bound to a bucket and a prefix."""

    def __init__(
        self,
        *,
        location: S3Location,
        client: S3Client,
        retry: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = jitter,
    ) -> None:
        self.location = location
        self.client = client
        self.bucket = location.bucket
        self._base = f"{location.prefix}/" if location.prefix else ""
        self._endpoint = client.meta.endpoint_url
        self._retry = retry
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform

    def full(self, key: str) -> str:
        """Return the name in the bucket of the object `key`, or of a prefix of keys."""
        return self._base + key

    def key(self, full: str) -> str:
        """Return the key of an object from its name in the bucket."""
        return full.removeprefix(self._base)

    def name(self, key: str) -> str:
        """Return the object's address for messages."""
        return f"s3://{self.bucket}/{self._base}{key}"

    def call(self, operation: str, key: str, request: Callable[[RetryBudget], T], *, num_bytes: int = 0) -> T:
        """Run `request` until it succeeds, fails for good, or the budget is spent.

        `operation` must come from a small closed set, because it labels metrics. `num_bytes` is the payload, which
        extends the deadline. A request that has several answers to give may look at the budget it is passed.

        Raises:
            StoreUnavailableError: the budget is spent.
            SparsewireError: what `s3_errors` makes of a failure that no retry can heal.
        """
        budget = RetryBudget(self._retry, num_bytes=num_bytes, clock=self._clock, uniform=self._uniform)
        outcome = "error"
        try:
            while True:
                try:
                    result = request(budget)
                except (ClientError, BotoCoreError, ResponseParserError) as error:
                    self._pause_or_raise(error, budget, operation, key)
                else:
                    outcome = "ok"
                    return result
        finally:
            _request_seconds.labels(operation=operation, outcome=outcome).observe(budget.elapsed_seconds)

    def _pause_or_raise(
        self, error: ClientError | BotoCoreError | ResponseParserError, budget: RetryBudget, operation: str, key: str
    ) -> None:
        what = f"{operation} {self.name(key)}"
        verdict = judge(error, what=what, bucket=self.bucket, endpoint=self._endpoint)
        if not verdict.is_passing:
            raise verdict.error from error
        pause_seconds = budget.next_pause_seconds()
        if pause_seconds is None:
            raise StoreUnavailableError(
                f"{verdict.error}; gave up after {budget.num_failed} tries in {budget.elapsed_seconds:.1f} s"
            ) from error
        _retries.labels(operation=operation).inc()
        logger.info("%s; try %d follows in %.2f s", verdict.error, budget.num_failed + 1, pause_seconds)
        self._sleep(pause_seconds)


def make_client(location: S3Location, settings: S3Settings) -> S3Client:
    """Return a client with credentials from boto3's usual chain; sends no request.

    Raises:
        ConfigError: the AWS configuration of this machine is wrong.
    """
    try:
        session = boto3.Session(region_name=location.region)
        client = _client(session, location, settings, location.addressing_style)
        if location.addressing_style is None and not client.meta.endpoint_url.endswith(_AMAZON):
            client.close()
            client = _client(session, location, settings, "path")
    except ValueError as error:
        raise ConfigError(f"{location.url}: {error}; check endpoint_url and AWS_ENDPOINT_URL") from error
    except BotoCoreError as error:
        raise _configuration_error(error, location) from error
    return client


def _client(
    session: boto3.Session, location: S3Location, settings: S3Settings, addressing_style: AddressingStyle | None
) -> S3Client:
    config = Config(
        connect_timeout=settings.connect_timeout.total_seconds(),
        read_timeout=settings.read_timeout.total_seconds(),
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=settings.max_connections,
        # Checksums that Amazon does not demand are refused or mangled by some S3-compatible servers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": addressing_style} if addressing_style else None,
        tcp_keepalive=True,
    )
    return session.client("s3", endpoint_url=location.endpoint_url, config=config)


def _configuration_error(error: BotoCoreError, location: S3Location) -> SparsewireError:
    return judge(error, what=f"open {location.url}", bucket=location.bucket, endpoint="this machine").error
