"""What failures of an S3 server mean: this package's error, with object and remedy, and whether to try again.

Pure. The one place that knows S3's error codes and botocore's exceptions. Messages hold the server's code and its first
words, never credentials.
"""

from __future__ import annotations

from dataclasses import dataclass

from botocore import exceptions as botocore_errors
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    NotFoundError,
    PreconditionFailedError,
    SparsewireError,
    StoreAccessError,
    StoreUnavailableError,
)

_THROTTLED = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "BandwidthLimitExceeded",
    }
)
_PASSING = frozenset(
    {
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "OperationAborted",
        "ConditionalRequestConflict",
        "XMinioServerNotInitialized",
    }
)
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504, 509})

_ACCESS: dict[str, str] = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the bucket in the URL",
    "InvalidBucketName": "no bucket can have this name: correct the bucket in the URL",
    "AccessDenied": (
        "the credentials lack the permission: grant s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and "
        "s3:ListBucket on this bucket (without ListBucket a missing object looks like this, too)"
    ),
    "AllAccessDisabled": "the bucket is disabled: ask its owner",
    "AccountProblem": "the account is suspended: ask its owner",
    "InvalidAccessKeyId": "the access key id is unknown there: check AWS_ACCESS_KEY_ID and that the endpoint is the right one",
    "SignatureDoesNotMatch": (
        "the secret key does not belong to the access key id: check AWS_SECRET_ACCESS_KEY (a proxy that changes the Host "
        "header has the same effect)"
    ),
    "ExpiredToken": "the session token has expired: renew the credentials",
    "ExpiredTokenException": "the session token has expired: renew the credentials",
    "TokenRefreshRequired": "the session token must be refreshed: renew the credentials",
    "InvalidToken": "the session token is not valid: renew the credentials, or unset AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "the clock of this machine differs too much from the server's: set it, for example by NTP",
    "RequestExpired": "the clock of this machine differs too much from the server's: set it, for example by NTP",
    "PermanentRedirect": "the bucket lives in another region: add ?region=... to the URL",
    "TemporaryRedirect": "the bucket lives in another region: add ?region=... to the URL",
    "IllegalLocationConstraintException": "the bucket lives in another region: add ?region=... to the URL",
    "AuthorizationHeaderMalformed": "the request was signed for another region: add the bucket's ?region=... to the URL",
    "QuotaExceeded": "the bucket's quota is used up: raise it, or delete old runs",
    "XMinioStorageFull": "the server's disks are full: free space",
    "InvalidObjectState": "the object was moved to an archive class: restore it, and keep lifecycle rules off the run",
    "KMS.DisabledException": "the bucket's encryption key is disabled: ask its owner",
}
_MISSING = frozenset({"NoSuchKey", "NotFound", "404"})
_CONDITION = frozenset({"PreconditionFailed", "412"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a failed request means."""

    error: SparsewireError
    is_passing: bool
    """The same request may succeed a moment later."""


def judge(
    error: ClientError | BotoCoreError | ResponseParserError, *, what: str, bucket: str, endpoint: str
) -> Verdict:
    """Return the verdict on `error`; `what` is the operation with its object, such as `get s3://bucket/key`."""
    if isinstance(error, ClientError):
        return _judge_reply(error, what=f"{what} at {endpoint}", bucket=bucket)
    return _judge_transport(error, what=f"{what} at {endpoint}", endpoint=endpoint)


def _judge_reply(error: ClientError, *, what: str, bucket: str) -> Verdict:
    code = str(error.response.get("Error", {}).get("Code", "Unknown"))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    words = " ".join(str(error.response.get("Error", {}).get("Message", "")).split())[:200]
    said = f"{code}, HTTP {status}" + (f": {words}" if words else "")
    if code in _ACCESS:
        return Verdict(
            error=StoreAccessError(f"{what} refused, bucket {bucket}: {_ACCESS[code]} ({said})"), is_passing=False
        )
    if code == "NoSuchUpload":
        return Verdict(
            error=NotFoundError(
                f"{what}: the upload is gone: a lifecycle rule or another process aborted it; write again"
            ),
            is_passing=False,
        )
    if code == "InvalidRange" or status == 416:
        return Verdict(
            error=DamagedError(
                f"{what}: the object ends before the wanted range: fetch it again; if it stays short, it is damaged"
            ),
            is_passing=False,
        )
    if code in _MISSING or status == 404:
        return Verdict(
            error=NotFoundError(f"{what}: the object does not exist: it was never written, or retention removed it"),
            is_passing=False,
        )
    if code == "NotImplemented" or status == 501:
        return Verdict(
            error=StoreAccessError(
                f"{what}: the server does not implement this request ({said}): use a server with conditional writes and "
                "multipart uploads"
            ),
            is_passing=False,
        )
    if code in _THROTTLED or code in _PASSING or status in _PASSING_STATUS:
        why = "is throttling" if code in _THROTTLED or status == 429 else "failed"
        return Verdict(error=StoreUnavailableError(f"{what}: the server {why} ({said})"), is_passing=True)
    if code in _CONDITION or status in (409, 412):
        return Verdict(error=PreconditionFailedError(f"{what}: the condition does not hold ({said})"), is_passing=False)
    if status in (401, 403):
        return Verdict(
            error=StoreAccessError(f"{what} refused, bucket {bucket} ({said}): check credentials and permissions"),
            is_passing=False,
        )
    return Verdict(
        error=StoreAccessError(f"{what} refused, bucket {bucket} ({said}): the server does not accept this request"),
        is_passing=False,
    )


def _judge_transport(error: BotoCoreError | ResponseParserError, *, what: str, endpoint: str) -> Verdict:
    match error:
        case botocore_errors.NoCredentialsError() | botocore_errors.PartialCredentialsError():
            return Verdict(
                error=StoreAccessError(
                    f"{what}: no complete credentials were found ({error}): set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                ),
                is_passing=False,
            )
        case (
            botocore_errors.CredentialRetrievalError()
            | botocore_errors.TokenRetrievalError()
            | botocore_errors.UnauthorizedSSOTokenError()
            | botocore_errors.SSOTokenLoadError()
            | botocore_errors.MetadataRetrievalError()
        ):
            return Verdict(
                error=StoreAccessError(
                    f"{what}: credentials could not be obtained ({error}): log in again, or set them"
                ),
                is_passing=False,
            )
        case (
            botocore_errors.ProfileNotFound()
            | botocore_errors.ConfigParseError()
            | botocore_errors.InvalidConfigError()
        ):
            return Verdict(
                error=ConfigError(f"{what}: the AWS configuration is wrong ({error}): check AWS_PROFILE and its files"),
                is_passing=False,
            )
        case botocore_errors.SSLError():
            return Verdict(
                error=StoreAccessError(
                    f"{what}: the TLS certificate was not accepted ({error}): use http:// for a plain server, or set AWS_CA_BUNDLE"
                ),
                is_passing=False,
            )
        case (
            botocore_errors.HTTPClientError()
            | botocore_errors.ConnectionError()
            | botocore_errors.IncompleteReadError()
            | ResponseParserError()
        ):
            return Verdict(
                error=StoreUnavailableError(
                    f"{what}: no complete reply ({type(error).__name__}): check that {endpoint} is right and reachable"
                ),
                is_passing=True,
            )
        case _:
            return Verdict(
                error=StoreAccessError(f"{what} could not be sent ({type(error).__name__}: {error})"), is_passing=False
            )
