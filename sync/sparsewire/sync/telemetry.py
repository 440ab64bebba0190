"""What a process says about itself: log lines, JSON event lines, and the Prometheus endpoint.

Metrics are defined in the files that move them. Events are the raw record that the live view and the report are
drawn from: one JSON object a line with `event` and `time_unix_seconds`, listed in docs/events.md. Secrets never
pass: values of environment variables that hold credentials are blotted out of every log line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import prometheus_client

from sparsewire.sync.errors import ConfigError

_SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "PRIVATE_KEY", "ACCESS_KEY", "CREDENTIAL", "API_KEY")
_MIN_SECRET_LENGTH = 6


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the values of variables whose name says that they hold a credential."""
    return frozenset(
        value
        for name, value in environment.items()
        if any(word in name.upper() for word in _SECRET_WORDS) and len(value) >= _MIN_SECRET_LENGTH
    )


class RedactingFormatter(logging.Formatter):
    """Formats text or JSON lines and blots out secrets, also inside tracebacks."""

    def __init__(self, *, json_lines: bool, secrets: frozenset[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        self._json_lines = json_lines
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        if self._json_lines:
            fields = {
                "time_unix_seconds": record.created,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
            if record.exc_info:
                fields["traceback"] = self.formatException(record.exc_info)
            line = json.dumps(fields)
        else:
            line = super().format(record)
        return redact(line, self._secrets)


def redact(text: str, secrets: frozenset[str]) -> str:
    """Return `text` with every secret replaced by `***`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def configure_logging(*, json_lines: bool, level: int = logging.INFO) -> None:
    """Send this process's log lines to standard error, once, with secrets blotted out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter(json_lines=json_lines, secrets=secret_values(os.environ)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("botocore", "boto3", "urllib3", "s3transfer", "httpx", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class EventLog:
    """Appends events to a JSON-lines file; lines are whole even when the process is killed. Thread-safe."""

    def __init__(self, path: Path, **common: object) -> None:
        self._path = path
        self._common = common
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def emit(self, event: str, **fields: object) -> None:
        """Write one event; `fields` must be JSON values."""
        record = {"event": event, "time_unix_seconds": time.time(), **self._common, **fields}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        """Close the file; later events raise."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(port: int | None) -> None:
    """Expose this process's metrics at http://0.0.0.0:port/metrics; no port, no endpoint.

    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        return
    try:
        prometheus_client.start_http_server(port)
    except OSError as error:
        raise ConfigError(f"metrics port {port} cannot be bound: {error}; choose another --metrics-port") from error
