"""Writing a large object to S3 in parts, several at a time, with bounded memory.

One writer belongs to one `with store.write(key)` block and one thread. An object that fits one part is written by one
request. Nothing is visible before `finish`, and `abort` leaves nothing behind.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import TYPE_CHECKING

from prometheus_client import Counter

from sparsewire.sync.errors import LimitExceededError, NotFoundError, SparsewireError
from sparsewire.sync.store.retry import RetryBudget
from sparsewire.sync.store.s3_client import TOKEN, S3Bucket

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

logger = logging.getLogger(__name__)

MAX_PARTS = 10_000
"""S3's own limit."""

ABORT_WAIT = timedelta(seconds=30)
"""How long an aborted writer waits for parts in flight, which would otherwise be stored after the abort."""

sent_bytes = Counter("sparsewire_s3_sent_bytes_total", "Payload bytes written to the S3 server.")


class PartWriter:
    """Collects bytes into parts and uploads them in the pool's threads."""

    def __init__(
        self, *, bucket: S3Bucket, key: str, pool: ThreadPoolExecutor, part_bytes: int, num_parallel: int
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._pool = pool
        self._part_bytes = part_bytes
        self._num_parallel = num_parallel
        self._token = uuid.uuid4().hex
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._pending: deque[Future[CompletedPartTypeDef]] = deque()
        self._parts: list[CompletedPartTypeDef] = []

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes; blocks while as many parts are in flight as allowed, and raises what a part has failed with."""
        with memoryview(data) as whole, whole.cast("B") as view:
            taken = 0
            while taken < len(view):
                if len(self._buffer) == self._part_bytes:
                    self._send_part()
                room = self._part_bytes - len(self._buffer)
                self._buffer += view[taken : taken + room]
                taken += min(room, len(view) - taken)

    def finish(self) -> None:
        """Make the object visible."""
        if self._upload_id is None:
            self._put_whole()
            return
        self._send_part()
        while self._pending:
            self._parts.append(self._pending.popleft().result())
        self._complete(self._upload_id)

    def abort(self) -> None:
        """Drop what was uploaded; when the server cannot be reached, its lifecycle rule has to do it."""
        for future in self._pending:
            future.cancel()
        wait_for(self._pending, timeout=ABORT_WAIT.total_seconds())
        if self._upload_id is None:
            return
        upload_id = self._upload_id
        try:
            self._bucket.call(
                "abort_upload",
                self._key,
                lambda _: self._bucket.client.abort_multipart_upload(
                    Bucket=self._bucket.bucket, Key=self._bucket.full(self._key), UploadId=upload_id
                ),
            )
        except NotFoundError:
            return
        except SparsewireError as error:
            # The block's own exception is on its way to the caller and matters more.
            logger.warning("upload %s of %s was not aborted: %s", upload_id, self._bucket.name(self._key), error)

    def _put_whole(self) -> None:
        self._bucket.call(
            "put",
            self._key,
            lambda _: self._bucket.client.put_object(
                Bucket=self._bucket.bucket, Key=self._bucket.full(self._key), Body=bytes(self._buffer)
            ),
            num_bytes=len(self._buffer),
        )
        sent_bytes.inc(len(self._buffer))

    def _send_part(self) -> None:
        upload_id = self._upload_id = self._upload_id or self._create()
        number = len(self._parts) + len(self._pending) + 1
        if number > MAX_PARTS:
            raise LimitExceededError(
                f"{self._bucket.name(self._key)} needs more than {MAX_PARTS} parts of {self._part_bytes} bytes: write smaller packs"
            )
        if len(self._pending) == self._num_parallel:
            self._parts.append(self._pending.popleft().result())
        self._pending.append(self._pool.submit(self._upload, upload_id, number, bytes(self._buffer)))
        self._buffer.clear()

    def _create(self) -> str:
        reply = self._bucket.call(
            "create_upload",
            self._key,
            lambda _: self._bucket.client.create_multipart_upload(
                Bucket=self._bucket.bucket, Key=self._bucket.full(self._key), Metadata={TOKEN: self._token}
            ),
        )
        return reply["UploadId"]

    def _upload(self, upload_id: str, number: int, part: bytes) -> CompletedPartTypeDef:
        reply = self._bucket.call(
            "upload_part",
            self._key,
            lambda _: self._bucket.client.upload_part(
                Bucket=self._bucket.bucket,
                Key=self._bucket.full(self._key),
                UploadId=upload_id,
                PartNumber=number,
                Body=part,
            ),
            num_bytes=len(part),
        )
        sent_bytes.inc(len(part))
        return {"PartNumber": number, "ETag": reply["ETag"]}

    def _complete(self, upload_id: str) -> None:
        num_failed = 0

        def request(budget: RetryBudget) -> None:
            nonlocal num_failed
            num_failed = budget.num_failed
            self._bucket.client.complete_multipart_upload(
                Bucket=self._bucket.bucket,
                Key=self._bucket.full(self._key),
                UploadId=upload_id,
                MultipartUpload={"Parts": self._parts},
            )

        try:
            self._bucket.call("complete_upload", self._key, request)
        except NotFoundError:
            # A lost reply looks the same as an upload that somebody aborted: the token tells them apart.
            if num_failed == 0 or not self._is_own():
                raise

    def _is_own(self) -> bool:
        try:
            reply = self._bucket.call(
                "head",
                self._key,
                lambda _: self._bucket.client.head_object(Bucket=self._bucket.bucket, Key=self._bucket.full(self._key)),
            )
        except NotFoundError:
            return False
        return reply["Metadata"].get(TOKEN) == self._token
