"""What only a server behind the S3 API can get wrong, against a real one and against one that misbehaves."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import boto3
import pytest

from sparsewire.sync.errors import (
    AlreadyExistsError,
    ConfigError,
    DamagedError,
    NotFoundError,
    PreconditionFailedError,
    StoreAccessError,
    StoreUnavailableError,
    UnsafeStoreError,
)
from sparsewire.sync.store import open_store
from sparsewire.sync.store.location import S3Location, parse_store_url
from sparsewire.sync.store.retry import RetryPolicy
from sparsewire.sync.store.s3 import S3Store, connect_s3
from sparsewire.sync.store.s3_client import S3Settings

if TYPE_CHECKING:
    from tests.conftest import S3Server
    from tests.sync.store.conftest import FaultyS3

MIB = 1 << 20
QUICK = S3Settings(
    retry=RetryPolicy(
        max_attempts=4,
        deadline=timedelta(seconds=10),
        first_pause=timedelta(milliseconds=5),
        max_pause=timedelta(milliseconds=20),
    ),
    connect_timeout=timedelta(seconds=2),
    read_timeout=timedelta(seconds=5),
    part_bytes=5 * MIB,
)


def connect(url: str) -> S3Store:
    """Open an S3 store with short pauses and without the probe."""
    location = parse_store_url(url)
    assert isinstance(location, S3Location)
    return connect_s3(location, settings=QUICK)


@pytest.fixture
def faulty_store(faulty_s3: FaultyS3) -> Iterator[S3Store]:
    """A store on the misbehaving server."""
    store = connect(faulty_s3.url())
    yield store
    store.close()


# A real server.


def test_a_large_object_is_uploaded_in_parts(s3_url: str) -> None:
    store = open_store(s3_url, writable=True)
    with store.write("pack") as writer:
        writer.append(bytes(17 * MIB))
    assert store.get("pack").etag.strip('"').endswith("-3")
    store.close()


def test_a_failed_upload_is_aborted(s3_url: str, s3_server: S3Server) -> None:
    def fail() -> None:
        with store.write("pack") as writer:
            writer.append(bytes(12 * MIB))
            raise RuntimeError("encoder failed")

    store = connect(s3_url)
    with pytest.raises(RuntimeError, match="encoder failed"):
        fail()
    store.close()
    client = boto3.client("s3", endpoint_url=s3_server.endpoint_url)
    prefix = s3_url.split("/")[3].partition("?")[0]
    assert client.list_multipart_uploads(Bucket=s3_server.bucket, Prefix=prefix).get("Uploads", []) == []
    client.close()


def test_a_listing_longer_than_a_page_is_complete_and_in_order(s3_url: str) -> None:
    store = open_store(s3_url)
    keys = [f"versions/{number:06d}.manifest" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    assert [info.key for info in store.list("versions/")] == keys
    assert [info.key for info in store.list("versions/", start_after=keys[-3])] == keys[-2:]
    store.close()


def test_a_wrong_secret_key_is_named_without_being_shown(
    s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    with pytest.raises(StoreAccessError, match=r"AWS_SECRET_ACCESS_KEY.*SignatureDoesNotMatch") as caught:
        open_store(s3_url, writable=True)
    assert "wrong-secret-value" not in str(caught.value)
    assert s3_server.access_key not in str(caught.value)
    assert s3_server.bucket in str(caught.value)


def test_a_wrong_access_key_is_named(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StoreAccessError, match="AWS_ACCESS_KEY_ID"):
        open_store(s3_url, writable=True)


def test_missing_credentials_are_named(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = connect(s3_url)
    with pytest.raises(StoreAccessError, match="set AWS_ACCESS_KEY_ID"):
        store.get("x")
    store.close()


def test_a_missing_bucket_is_named_by_every_call(s3_environment: S3Server) -> None:
    url = s3_environment.url("p").replace(s3_environment.bucket, "no-such-bucket")
    store = connect(url)
    calls: list[Callable[[], object]] = [
        lambda: store.get("x"),
        lambda: store.get_range("x", 0, 1),
        lambda: store.put("x", b""),
        lambda: store.put_if_absent("x", b""),
        lambda: list(store.list("")),
        lambda: store.delete("x"),
    ]
    for call in calls:
        with pytest.raises(StoreAccessError, match=r"no-such-bucket.*create it"):
            call()
    with pytest.raises(StoreAccessError, match=r"no-such-bucket.*create it"), store.write("x") as writer:
        writer.append(bytes(6 * MIB))
    store.close()
    with pytest.raises(StoreAccessError, match="no-such-bucket"):
        open_store(url, writable=True)


def test_the_endpoint_may_come_from_the_environment(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint_url)
    store = open_store(f"s3://{s3_environment.bucket}/from-environment", writable=True)
    store.put("x", b"1")
    assert [info.key for info in store.list("")] == ["x"]
    store.close()


# Transport.


def test_an_unreachable_endpoint_fails_within_its_budget_and_is_named(
    s3_environment: S3Server,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        store = connect(f"s3://bucket/p?endpoint_url=http://{address}")
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=rf"{address}.*gave up after 4 tries"):
            store.get("x")
        assert time.monotonic() - started < 10
        store.close()


def test_a_server_that_never_answers_fails_within_its_deadline(s3_environment: S3Server) -> None:
    settings = S3Settings(
        retry=RetryPolicy(max_attempts=50, deadline=timedelta(seconds=1)), read_timeout=timedelta(seconds=0.4)
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = parse_store_url(f"s3://bucket/p?endpoint_url=http://127.0.0.1:{silent.getsockname()[1]}")
        assert isinstance(location, S3Location)
        store = connect_s3(location, settings=settings)
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="ReadTimeoutError"):
            store.get("x")
        assert time.monotonic() - started < 5
        store.close()


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
def test_a_passing_failure_is_repeated(faulty_s3: FaultyS3, faulty_store: S3Store, status: int, code: str) -> None:
    for method, act in (
        ("PUT", lambda: faulty_store.put("x", b"1")),
        ("GET", lambda: faulty_store.get("x")),
        ("GET", lambda: list(faulty_store.list(""))),
        ("DELETE", lambda: faulty_store.delete("x")),
    ):
        faulty_s3.fail(method, "refuse", status=status, code=code, times=2)
        faulty_s3.requests.clear()
        act()
        assert [name for name, _ in faulty_s3.requests] == [method] * 3


def test_a_lasting_failure_is_given_up_within_the_budget(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    faulty_s3.fail("GET", "refuse", times=100)
    with pytest.raises(StoreUnavailableError, match=r"run/x.*SlowDown, HTTP 503.*gave up after 4 tries"):
        faulty_store.get("x")
    assert len(faulty_s3.requests) == 4


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (403, "AccessDenied", StoreAccessError, "s3:PutObject"),
        (403, "RequestTimeTooSkewed", StoreAccessError, "clock of this machine"),
        (400, "ExpiredToken", StoreAccessError, "renew the credentials"),
        (301, "PermanentRedirect", StoreAccessError, "region"),
        (400, "AuthorizationHeaderMalformed", StoreAccessError, "region"),
        (501, "NotImplemented", StoreAccessError, "use a server with conditional writes"),
        (400, "SomethingNew", StoreAccessError, "SomethingNew"),
        (403, "SomethingNew", StoreAccessError, "check credentials"),
    ],
)
def test_a_final_refusal_is_not_repeated_and_says_what_to_do(
    faulty_s3: FaultyS3, faulty_store: S3Store, status: int, code: str, error: type[Exception], words: str
) -> None:
    faulty_s3.fail("PUT", "refuse", status=status, code=code)
    with pytest.raises(error, match=words) as caught:
        faulty_store.put("x", b"1")
    assert "s3://faulty/run/x" in str(caught.value)
    assert [method for method, _ in faulty_s3.requests].count("PUT") == 1


def test_a_missing_object_is_asked_for_once(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    with pytest.raises(NotFoundError):
        faulty_store.get("x")
    assert len(faulty_s3.requests) == 1


def test_a_body_that_breaks_off_is_resumed_where_it_ended(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    data = bytes(range(256)) * 20_000
    faulty_store.put("pack", data)
    faulty_s3.fail("GET", "truncate", times=2)
    assert faulty_store.get_range("pack", 100, 4_000_000) == data[100:4_000_100]
    faulty_s3.fail("GET", "truncate")
    assert faulty_store.get("pack").data == data


def test_bodies_that_always_break_off_are_given_up(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    faulty_store.put("pack", b"0123456789")
    faulty_s3.fail("GET", "truncate", times=100)
    with pytest.raises(StoreUnavailableError, match="no complete reply"):
        faulty_store.get_range("pack", 0, 10)
    with pytest.raises(StoreUnavailableError, match="no complete reply"):
        faulty_store.get("pack")


def test_an_object_replaced_in_mid_read_is_damage_not_a_mixture(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    faulty_store.put("other", b"b" * 4_000_000)
    faulty_store.put("pack", b"a" * 4_000_000)

    def replace() -> None:
        faulty_s3.objects["run/pack"] = faulty_s3.objects["run/other"]

    faulty_s3.fail("GET", "truncate")
    faulty_s3.before_next_answer = replace
    with pytest.raises(DamagedError, match="replaced while it was being read"):
        faulty_store.get_range("pack", 0, 4_000_000)


# Conditional writes and lost replies.


def test_a_server_that_ignores_conditions_is_refused_for_writing(faulty_s3: FaultyS3) -> None:
    faulty_s3.ignores_conditions = True
    with pytest.raises(UnsafeStoreError, match="two learners could both commit a version"):
        open_store(faulty_s3.url(), writable=True)
    assert faulty_s3.objects == {}
    store = open_store(faulty_s3.url())
    assert list(store.list("")) == []
    store.close()


def test_a_server_that_honours_conditions_is_accepted_and_left_clean(faulty_s3: FaultyS3) -> None:
    open_store(faulty_s3.url(), writable=True).close()
    assert faulty_s3.objects == {}


@pytest.mark.parametrize("drops_metadata", [False, True])
def test_a_creation_whose_reply_was_lost_counts_as_success(
    faulty_s3: FaultyS3, faulty_store: S3Store, drops_metadata: bool
) -> None:
    faulty_s3.drops_metadata = drops_metadata
    faulty_s3.fail("PUT", "lose_reply")
    etag = faulty_store.put_if_absent("v/1", b"mine")
    assert faulty_store.get("v/1").etag == etag
    assert faulty_s3.requests[:3] == [("PUT", "run/v/1"), ("PUT", "run/v/1"), ("GET", "run/v/1")]


def test_a_compare_and_set_whose_reply_was_lost_counts_as_success(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    etag = faulty_store.put("epoch", b"1")
    faulty_s3.fail("PUT", "lose_reply")
    new = faulty_store.put_if_match("epoch", b"2", etag)
    assert (faulty_store.get("epoch").data, faulty_store.get("epoch").etag) == (b"2", new)


def test_a_retry_that_meets_an_equal_object_of_somebody_else_has_lost(
    faulty_s3: FaultyS3, faulty_store: S3Store
) -> None:
    rival = connect(faulty_s3.url())
    rival.put_if_absent("v/1", b"same bytes")
    faulty_s3.fail("PUT", "refuse")
    with pytest.raises(AlreadyExistsError, match="v/1"):
        faulty_store.put_if_absent("v/1", b"same bytes")
    rival.close()


def test_a_retry_that_meets_another_claim_has_lost(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    rival = connect(faulty_s3.url())
    etag = rival.put("epoch", b"1")
    rival.put_if_match("epoch", b"rival", etag)
    faulty_s3.fail("PUT", "refuse", status=500, code="InternalError")
    with pytest.raises(PreconditionFailedError, match="epoch"):
        faulty_store.put_if_match("epoch", b"mine", etag)
    assert rival.get("epoch").data == b"rival"
    rival.close()


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_is_tried_again_until_it_is_decided(faulty_s3: FaultyS3, faulty_store: S3Store, code: str) -> None:
    faulty_s3.fail("PUT", "refuse", status=409, code=code)
    faulty_store.put_if_absent("v/1", b"mine")
    faulty_s3.fail("PUT", "refuse", status=409, code=code)
    with pytest.raises(AlreadyExistsError):
        faulty_store.put_if_absent("v/1", b"mine")


def test_a_completed_upload_whose_reply_was_lost_counts_as_success(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    data = bytes(range(256)) * (11 * MIB // 256)
    with faulty_store.write("pack") as writer:
        writer.append(data)
        faulty_s3.fail("PUT", "refuse")
        faulty_s3.fail("POST", "lose_reply")
    assert faulty_store.get("pack").data == data
    assert faulty_s3.uploads == {}


def test_an_upload_that_somebody_aborted_is_an_error(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    def write() -> None:
        with faulty_store.write("pack") as writer:
            writer.append(bytes(6 * MIB))
            faulty_s3.fail("POST", "refuse", status=404, code="NoSuchUpload")

    with pytest.raises(NotFoundError, match="the upload is gone"):
        write()
    assert (faulty_s3.objects, faulty_s3.uploads) == ({}, {})


def test_a_part_that_cannot_be_stored_fails_the_write_and_leaves_nothing(
    faulty_s3: FaultyS3, faulty_store: S3Store
) -> None:
    def write() -> None:
        with faulty_store.write("pack") as writer:
            faulty_s3.fail("PUT", "refuse", times=100)
            for _ in range(40):
                writer.append(bytes(MIB))

    with pytest.raises(StoreUnavailableError, match="gave up after 4 tries"):
        write()
    assert (faulty_s3.objects, faulty_s3.uploads) == ({}, {})


# Configuration.


def test_an_unknown_profile_is_a_configuration_error(faulty_s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        open_store(faulty_s3.url())


def test_a_listing_in_small_pages_is_complete_and_in_order(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    keys = sorted(["a/x", "a-b", "a.c", "a0", "b", *(f"v/{number:03d}.manifest" for number in range(10))])
    for key in keys:
        faulty_store.put(key, b"")
    assert [info.key for info in faulty_store.list("")] == keys
    for start_after in ("a-b", "a.c", "a/x", "v/004.manifest"):
        wanted = [key for key in keys if key > start_after]
        assert [info.key for info in faulty_store.list("", start_after=start_after)] == wanted
    assert [info.key for info in faulty_store.list("v/", start_after="v/004.manifest")] == keys[-5:]


def test_objects_of_others_are_passed_over(faulty_s3: FaultyS3, faulty_store: S3Store) -> None:
    faulty_store.put("a", b"")
    faulty_s3.objects["run/folder marker/"] = faulty_s3.objects["run/a"]
    assert [info.key for info in faulty_store.list("")] == ["a"]
