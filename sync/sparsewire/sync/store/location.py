"""What a store URL means, decided without touching the store.

Pure, so that configuration checks can use it. Supported are

    memory://name[/prefix]                                   contents shared by everybody in this process
    file:///absolute/directory, or a plain path              a directory
    s3://bucket[/prefix][?endpoint_url=..&region=..&addressing_style=..]

A URL never carries a secret: user info and unknown query keys are refused, and no message repeats their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from sparsewire.sync.errors import ConfigError
from sparsewire.sync.store.keys import is_key

SUPPORTED = "memory://name, file:///directory, s3://bucket/prefix?endpoint_url=https://host&region=name"
"""What a message lists when a URL is not one of ours."""

AddressingStyle: TypeAlias = Literal["auto", "path", "virtual"]
"""How the bucket is put into the request's address; botocore's names."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9-]{1,40}")
_ADDRESSING_STYLES: Mapping[str, AddressingStyle] = {"auto": "auto", "path": "path", "virtual": "virtual"}
_S3_OPTIONS = ("endpoint_url", "region", "addressing_style")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLocation:
    """Contents in this process."""

    name: str
    prefix: str
    """Without a slash at either end; may be empty."""

    @property
    def url(self) -> str:
        """The canonical URL."""
        return f"memory://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLocation:
    """A directory of this machine or of a shared file system."""

    path: Path
    """Absolute."""

    @property
    def url(self) -> str:
        """The canonical URL."""
        return self.path.as_uri()


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A bucket behind the S3 API, and where below it."""

    bucket: str
    prefix: str
    """Without a slash at either end; may be empty."""
    endpoint_url: str | None
    """None leaves it to boto3: AWS_ENDPOINT_URL, the configuration file, then Amazon."""
    region: str | None
    addressing_style: AddressingStyle | None
    """None means path style for any endpoint but Amazon's, where host names per bucket seldom resolve."""

    @property
    def url(self) -> str:
        """The canonical URL; it opens the same place again."""
        options = {name: value for name in _S3_OPTIONS if (value := getattr(self, name)) is not None}
        query = f"?{urlencode(options, safe=':/', quote_via=quote)}" if options else ""
        return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "") + query


StoreLocation: TypeAlias = MemoryLocation | DirectoryLocation | S3Location


def parse_store_url(url: str) -> StoreLocation:
    """Return the place that `url` names.

    Raises:
        ConfigError: with what is wrong and what is supported; never with a value that could be a secret.
    """
    if not url or "\0" in url or "\n" in url:
        raise ConfigError(f"store URL is empty or holds control characters; supported are {SUPPORTED}")
    found = _SCHEME.match(url)
    if found is None:
        return DirectoryLocation(path=Path(url).absolute())
    scheme = found[1].lower()
    if not found[2]:
        raise ConfigError(
            f"store URL begins with {scheme!r} but lacks '//': write {scheme}://...; supported: {SUPPORTED}"
        )
    parts = _split(url, scheme)
    match scheme:
        case "memory":
            return _memory(parts)
        case "file":
            return _directory(parts)
        case "s3":
            return _s3(parts)
        case "grpc":
            raise ConfigError(
                "grpc:// names a learner's or relay's weight service, which only subscribers can read from: give a "
                f"store that can be written to; supported are {SUPPORTED}"
            )
        case _:
            raise ConfigError(f"store URL scheme {scheme!r} is unknown; supported are {SUPPORTED}")


def _split(url: str, scheme: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        # The parser's own message repeats the URL, which may hold a password.
        raise ConfigError(f"{scheme}:// URL cannot be parsed; supported are {SUPPORTED}") from None
    if "@" in parts.netloc:
        raise ConfigError(
            f"{scheme}:// URL holds a user name or password before '@': remove it; credentials come from the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or the AWS configuration files"
        )
    if parts.fragment or url.endswith("#"):
        raise ConfigError(f"{scheme}:// URL holds a '#' part, which means nothing here: remove it")
    return parts


def _memory(parts: SplitResult) -> MemoryLocation:
    if parts.query:
        raise ConfigError("memory:// URL takes no options after '?': remove them")
    if not parts.netloc or not is_key(parts.netloc):
        raise ConfigError(
            f"memory:// URL needs a name of [A-Za-z0-9._-], got {parts.netloc[:80]!r}: write memory://name"
        )
    return MemoryLocation(name=parts.netloc, prefix=_prefix(parts))


def _directory(parts: SplitResult) -> DirectoryLocation:
    if parts.query:
        raise ConfigError("file:// URL takes no options after '?': remove them")
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"file:// URL names the host {parts.netloc[:80]!r}; a directory needs three slashes: file:///{parts.netloc[:80]}..."
        )
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"file:// URL needs an absolute path, got {path[:200]!r}: write file:///directory")
    return DirectoryLocation(path=Path(path))


def _s3(parts: SplitResult) -> S3Location:
    if not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            f"s3:// URL names the bucket {parts.netloc[:80]!r}, which no bucket can be called: write s3://bucket"
        )
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _S3_OPTIONS:
            secret = any(word in name.lower() for word in ("secret", "key", "token", "password", "credential"))
            remedy = (
                "credentials never belong into a URL; they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                if secret
                else f"supported are {', '.join(_S3_OPTIONS)}"
            )
            raise ConfigError(f"s3://{parts.netloc} has the unknown option {name[:40]!r}: {remedy}")
        if name in options:
            raise ConfigError(f"s3://{parts.netloc} states the option {name!r} twice: keep one")
        options[name] = value
    endpoint_url = options.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url)
    region = options.get("region")
    if region is not None and not _REGION.fullmatch(region):
        raise ConfigError(f"s3://{parts.netloc}: region {region[:40]!r} is not a region name such as eu-central-1")
    style = options.get("addressing_style")
    if style is not None and style not in _ADDRESSING_STYLES:
        raise ConfigError(
            f"s3://{parts.netloc}: addressing_style {style[:40]!r} is unknown; supported are {', '.join(_ADDRESSING_STYLES)}"
        )
    return S3Location(
        bucket=parts.netloc,
        prefix=_prefix(parts),
        endpoint_url=endpoint_url,
        region=region,
        addressing_style=_ADDRESSING_STYLES[style] if style else None,
    )


def check_endpoint(endpoint_url: str) -> None:
    """Refuse what is not `http(s)://host[:port]`.

    Raises:
        ConfigError: with the remedy; the value is not repeated when it could hold a password.
    """
    try:
        parts = urlsplit(endpoint_url)
        port = parts.port
    except ValueError:
        raise ConfigError("S3 endpoint_url cannot be parsed: write https://host or http://host:port") from None
    if "@" in parts.netloc:
        raise ConfigError("S3 endpoint_url holds a user name or password before '@': remove it, use the environment")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError("S3 endpoint_url must be https://host or http://host:port, without options after it")


def _prefix(parts: SplitResult) -> str:
    prefix = unquote(parts.path).strip("/")
    if prefix and not is_key(prefix):
        raise ConfigError(
            f"{parts.scheme}://{parts.netloc} has the prefix {prefix[:200]!r}; a prefix is made of [A-Za-z0-9._-] segments "
            "joined by single slashes, without '.' or '..' segments"
        )
    return prefix
