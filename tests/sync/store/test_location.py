"""URLs: what they mean, and that no secret passes through them or through their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsewire.sync.errors import ConfigError
from sparsewire.sync.store import check_store_url
from sparsewire.sync.store.location import DirectoryLocation, MemoryLocation, S3Location, parse_store_url


def test_memory_urls_name_contents_and_prefix() -> None:
    assert parse_store_url("memory://name") == MemoryLocation(name="name", prefix="")
    assert parse_store_url("memory://name/a/b/") == MemoryLocation(name="name", prefix="a/b")


def test_paths_and_file_urls_name_directories() -> None:
    assert parse_store_url("/data/store") == DirectoryLocation(path=Path("/data/store"))
    assert parse_store_url("file:///data/my%20store") == DirectoryLocation(path=Path("/data/my store"))
    assert parse_store_url("file://localhost/data") == DirectoryLocation(path=Path("/data"))
    assert parse_store_url("runs/store") == DirectoryLocation(path=Path.cwd() / "runs" / "store")


def test_s3_urls_name_bucket_prefix_and_server() -> None:
    assert parse_store_url("s3://my-bucket") == S3Location(
        bucket="my-bucket", prefix="", endpoint_url=None, region=None, addressing_style=None
    )
    assert parse_store_url(
        "s3://my-bucket/runs/7/?endpoint_url=http://127.0.0.1:8333&region=eu-central-1&addressing_style=virtual"
    ) == S3Location(
        bucket="my-bucket",
        prefix="runs/7",
        endpoint_url="http://127.0.0.1:8333",
        region="eu-central-1",
        addressing_style="virtual",
    )


@pytest.mark.parametrize(
    "url",
    [
        "memory://name/prefix",
        "/data/my store",
        "s3://bucket/p",
        "s3://bucket/p?endpoint_url=https://host:9000&region=us-east-1",
    ],
)
def test_the_canonical_url_means_the_same_place(url: str) -> None:
    location = parse_store_url(url)
    assert parse_store_url(location.url) == location


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "supported are memory://"),
        ("a\0b", "control characters"),
        ("ftp://host/dir", "'ftp' is unknown; supported are memory://.*file:///.*s3://"),
        ("grpc://host:7070", "only subscribers"),
        ("s3:bucket", "lacks '//'"),
        ("memory://", "needs a name"),
        ("memory://a b", "needs a name"),
        ("memory://a?x=1", "no options"),
        ("file://data/store", "three slashes"),
        ("file:///a?x=1", "no options"),
        ("s3://", "no bucket can be called"),
        ("s3://b/p", "no bucket can be called"),
        ("s3://bad_bucket!/p", "no bucket can be called"),
        ("s3://bucket/../p", "prefix"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/p?endpoint=http://h", "supported are endpoint_url"),
        ("s3://bucket/p?endpoint_url=h:9000", "must be https://host"),
        ("s3://bucket/p?endpoint_url=ftp://h", "must be https://host"),
        ("s3://bucket/p?endpoint_url=http://h:99999", "cannot be parsed"),
        ("s3://bucket/p?endpoint_url=", "must be https://host"),
        ("s3://bucket/p?region=no where", "region"),
        ("s3://bucket/p?region=a&region=b", "twice"),
        ("s3://bucket/p?addressing_style=odd", "auto, path, virtual"),
        ("s3://bucket/p#x", "'#'"),
        ("s3://[bucket/p", "cannot be parsed"),
    ],
)
def test_a_wrong_url_is_refused_with_the_remedy(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_store_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE:planted-secret@bucket/p",
        "s3://planted-secret@bucket/p",
        "s3://bucket/p?aws_secret_access_key=planted-secret",
        "s3://bucket/p?secret=planted-secret",
        "s3://bucket/p?AWS_SESSION_TOKEN=planted-secret",
        "s3://bucket/p?endpoint_url=http://user:planted-secret@host:9000",
        "s3://bucket/p?endpoint_url=http://host:9000/?key=planted-secret",
        "s3://bucket/p?access_key=planted-secret&region=x",
        "https://user:planted-secret@host/bucket",
        "memory://user:planted-secret@name",
        "s3://[planted-secret",
        "s3://bucket/p#planted-secret",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_store_url(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert "planted-secret" not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
