"""A store in a bucket behind the S3 API, through boto3.

Every call is tried within one budget (`RetryPolicy`: attempts, jittered pauses, deadline). S3 is strongly consistent,
so a missing object is never asked for again. Thread-safe.

Conditional writes carry a token of their own in the object's metadata: when a reply is lost and the retry meets an
object, the token tells exactly whether the first try had made it. Integrity on the way is the signed payload hash,
and on disk the chunk hashes.

Known limits: an object written in pieces has at most 10,000 parts (78 GiB at 8 MiB a part). A writer that is killed
leaves an upload that no listing shows but that is stored: keep a lifecycle rule which aborts incomplete uploads.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from prometheus_client import Counter

from sparsewire.sync.errors import (
    AlreadyExistsError,
    DamagedError,
    LimitExceededError,
    NotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from sparsewire.sync.store.base import ObjectInfo, ObjectWriter, StoredObject
from sparsewire.sync.store.keys import MAX_GET_BYTES, check_key, check_prefix, check_range, is_key
from sparsewire.sync.store.location import S3Location
from sparsewire.sync.store.retry import RetryBudget
from sparsewire.sync.store.s3_client import TOKEN, S3Bucket, S3Settings, make_client
from sparsewire.sync.store.s3_listing import in_key_order, start_position
from sparsewire.sync.store.s3_upload import PartWriter, sent_bytes

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import (
        GetObjectOutputTypeDef,
        GetObjectRequestTypeDef,
        ListObjectsV2RequestTypeDef,
        PutObjectRequestTypeDef,
    )

_READ_BYTES = 1 << 20
_PAGE_KEYS = 1000
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

_received_bytes = Counter("sparsewire_s3_received_bytes_total", "Payload bytes read from the S3 server.")


def connect_s3(location: S3Location, *, settings: S3Settings | None = None) -> S3Store:
    """Return a store for `location` with credentials from boto3's usual chain; sends no request.

    Raises:
        ConfigError: the AWS configuration of this machine is wrong.
    """
    settings = settings or S3Settings()
    bucket = S3Bucket(location=location, client=make_client(location, settings), retry=settings.retry)
    return S3Store(bucket=bucket, settings=settings)


class S3Store:
    """The store seam over one bucket."""

    def __init__(self, *, bucket: S3Bucket, settings: S3Settings) -> None:
        self._bucket = bucket
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.num_upload_threads, thread_name_prefix="s3-upload")

    @property
    def url(self) -> str:
        """Where this is, for messages; carries no secret."""
        return self._bucket.location.url

    def get(self, key: str) -> StoredObject:
        """Return a small object whole."""
        check_key(key)
        stored, _ = self._get(key)
        return stored

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; a try that breaks off is resumed where it ended."""
        check_key(key)
        check_range(key, offset, length)
        if length == 0:
            return b""
        last = offset + length - 1
        pieces: list[bytes] = []
        first = offset
        etag = ""

        def request(budget: RetryBudget) -> None:
            nonlocal first, etag
            parameters: GetObjectRequestTypeDef = {
                "Bucket": self._bucket.bucket,
                "Key": self._bucket.full(key),
                "Range": f"bytes={first}-{last}",
            }
            if etag:
                parameters["IfMatch"] = etag
            reply = self._bucket.client.get_object(**parameters)
            with closing(reply["Body"]):
                self._check_range_reply(reply, key, first, last)
                etag = reply["ETag"]
                for piece in self._pieces(reply, key, budget):
                    pieces.append(piece)
                    first += len(piece)

        try:
            self._bucket.call("get_range", key, request, num_bytes=length)
        except PreconditionFailedError as error:
            raise DamagedError(
                f"{self._bucket.name(key)} was replaced while it was being read, which packs never are: look for another "
                "process that writes to this run, then read again"
            ) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def put(self, key: str, data: bytes) -> str:
        """Write an object unconditionally and return its etag."""
        check_key(key)
        return self._put({"Bucket": self._bucket.bucket, "Key": self._bucket.full(key), "Body": data}, key, data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create an object; of any number of racing callers exactly one succeeds."""
        check_key(key)
        try:
            return self._put_on_condition(
                {"Bucket": self._bucket.bucket, "Key": self._bucket.full(key), "Body": data, "IfNoneMatch": "*"},
                key,
                data,
            )
        except PreconditionFailedError as error:
            raise AlreadyExistsError(f"{self._bucket.name(key)} exists already: read what is there") from error

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace an object only if its etag is still `etag`; returns the new etag."""
        check_key(key)
        try:
            return self._put_on_condition(
                {"Bucket": self._bucket.bucket, "Key": self._bucket.full(key), "Body": data, "IfMatch": etag}, key, data
            )
        except (PreconditionFailedError, NotFoundError) as error:
            found = "is gone" if isinstance(error, NotFoundError) else "was changed by somebody else or is gone"
            raise PreconditionFailedError(
                f"{self._bucket.name(key)} {found} since it was read: read it again, then decide"
            ) from error

    @contextmanager
    def write(self, key: str) -> Iterator[ObjectWriter]:
        """Write a large object in pieces; it appears when the block ends, and not at all when the block raises."""
        check_key(key)
        writer = PartWriter(
            bucket=self._bucket,
            key=key,
            pool=self._pool,
            part_bytes=self._settings.part_bytes,
            num_parallel=self._settings.num_upload_threads,
        )
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects whose key starts with `prefix`, in key order, above `start_after`.

        Objects whose names cannot be keys were put there by somebody else and are passed over.
        """
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        start = start_position(start_after, folder=folder)
        if start is None:
            return iter(())
        listed = in_key_order(self._pages(prefix, start), folder=folder)
        return (info for info in listed if info.key > start_after)

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        check_key(key)
        try:
            self._bucket.call(
                "delete",
                key,
                lambda _: self._bucket.client.delete_object(Bucket=self._bucket.bucket, Key=self._bucket.full(key)),
            )
        except NotFoundError:
            return  # Amazon does not say so, some servers do

    def close(self) -> None:
        """Release connections and threads; further calls are undefined."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._bucket.client.close()

    def _get(self, key: str) -> tuple[StoredObject, str | None]:
        """Return an object and the token of the conditional write that made it, if one did."""

        def request(budget: RetryBudget) -> tuple[StoredObject, str | None]:
            reply = self._bucket.client.get_object(Bucket=self._bucket.bucket, Key=self._bucket.full(key))
            with closing(reply["Body"]):
                self._check_size(key, reply.get("ContentLength", 0))
                data = bytearray()
                for piece in self._pieces(reply, key, budget):
                    data += piece
                    self._check_size(key, len(data))
            return StoredObject(data=bytes(data), etag=reply["ETag"]), reply["Metadata"].get(TOKEN)

        return self._bucket.call("get", key, request)

    def _check_size(self, key: str, num_bytes: int) -> None:
        if num_bytes > MAX_GET_BYTES:
            raise LimitExceededError(
                f"{self._bucket.name(key)} has {num_bytes} bytes or more, at most {MAX_GET_BYTES} are read whole: read it by range"
            )

    def _put(self, parameters: PutObjectRequestTypeDef, key: str, data: bytes) -> str:
        reply = self._bucket.call(
            "put", key, lambda _: self._bucket.client.put_object(**parameters), num_bytes=len(data)
        )
        sent_bytes.inc(len(data))
        return reply["ETag"]

    def _put_on_condition(self, parameters: PutObjectRequestTypeDef, key: str, data: bytes) -> str:
        token = uuid.uuid4().hex
        parameters["Metadata"] = {TOKEN: token}
        num_failed = 0

        def request(budget: RetryBudget) -> str:
            nonlocal num_failed
            num_failed = budget.num_failed
            return self._bucket.client.put_object(**parameters)["ETag"]

        try:
            etag = self._bucket.call("put_if", key, request, num_bytes=len(data))
        except PreconditionFailedError:
            own = self._own_etag(key, token, data) if num_failed else None
            if own is None:
                raise
            etag = own
        sent_bytes.inc(len(data))
        return etag

    def _own_etag(self, key: str, token: str, data: bytes) -> str | None:
        """Return the etag of the stored object if a try of ours made it whose reply was lost."""
        try:
            stored, stored_token = self._get(key)
        except NotFoundError:
            return None
        # A server that drops metadata leaves only the bytes to go by.
        is_own = stored.data == data if stored_token is None else stored_token == token
        return stored.etag if is_own else None

    def _pieces(self, reply: GetObjectOutputTypeDef, key: str, budget: RetryBudget) -> Iterator[bytes]:
        body = reply["Body"]
        while piece := body.read(_READ_BYTES):
            _received_bytes.inc(len(piece))
            yield piece
            if budget.expired:
                raise StoreUnavailableError(
                    f"reading {self._bucket.name(key)} did not finish in {budget.elapsed_seconds:.0f} s: the link is too "
                    "slow or the server hangs; try again"
                )

    def _check_range_reply(self, reply: GetObjectOutputTypeDef, key: str, first: int, last: int) -> None:
        wanted = last - first + 1
        found = _CONTENT_RANGE.fullmatch(reply.get("ContentRange", ""))
        num_bytes = reply.get("ContentLength", -1)
        if found is None and (first > 0 or num_bytes != wanted):
            raise DamagedError(
                f"{self._bucket.name(key)}: the server answered {num_bytes} bytes where bytes {first} to {last} were asked "
                "for: it does not serve ranges, or the object is damaged"
            )
        if found and int(found[1]) == first and int(found[2]) < last:
            raise DamagedError(
                f"{self._bucket.name(key)} ends at byte {int(found[2]) + 1}, wanted {wanted} bytes from {first}: fetch it "
                "again; if it stays short, the object is damaged"
            )
        if found and (int(found[1]), int(found[2]), num_bytes) != (first, last, wanted):
            raise DamagedError(
                f"{self._bucket.name(key)}: asked for bytes {first} to {last}, the server answered {num_bytes} bytes "
                f"as {found[0]!r}: use another server"
            )

    def _pages(self, prefix: str, start: str) -> Iterator[ObjectInfo]:
        """Yield what the server lists, in its own order."""
        parameters: ListObjectsV2RequestTypeDef = {
            "Bucket": self._bucket.bucket,
            "Prefix": self._bucket.full(prefix),
            "MaxKeys": _PAGE_KEYS,
        }
        if start:
            parameters["StartAfter"] = self._bucket.full(start)
        while True:
            reply = self._bucket.call("list", prefix, lambda _: self._bucket.client.list_objects_v2(**parameters))
            for entry in reply.get("Contents", []):
                key = self._bucket.key(entry["Key"])
                if is_key(key):
                    yield ObjectInfo(
                        key=key, num_bytes=entry["Size"], modified_unix_seconds=entry["LastModified"].timestamp()
                    )
            token = reply.get("NextContinuationToken")
            if not reply["IsTruncated"] or not token or token == parameters.get("ContinuationToken"):
                return
            parameters["ContinuationToken"] = token
