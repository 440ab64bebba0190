"""Reaches the ranks of an existing `vllm serve` through its development routes, on this host only.

vLLM shows these routes when it runs with `VLLM_SERVER_DEV_MODE=1`, and asks nobody for a password there: whoever
reaches them can stop the server or load anything into it. So the address must be a loopback one, and the exchange
directory is shared by path, never by payload. Blocking calls, each with a deadline, one connection each.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any
from urllib.parse import urlencode, urlsplit

from sparsewire.sync.errors import ConfigError, EngineError

_PROBE_TIMEOUT = timedelta(seconds=10)


class PauseMode(StrEnum):
    """What happens to requests in flight."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


class ServerCalls:
    """`RankCalls` over HTTP, with pause and resume beside them."""

    def __init__(self, *, url: str) -> None:
        """Take `http://127.0.0.1:PORT`.

        Raises:
            ConfigError: another scheme or a host that is not this one.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.port is None or parts.path.strip("/"):
            raise ConfigError(f"{url!r} is no address of a vLLM server: write http://127.0.0.1:PORT")
        if parts.hostname != "localhost" and not _is_loopback(parts.hostname):
            raise ConfigError(
                f"{url!r} is not on this host: vLLM's development routes ask for no password, so run the agent beside the "
                "server and keep them on 127.0.0.1"
            )
        self.url = url
        self._host, self._port = parts.hostname, parts.port
        self._num_ranks: int | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the model, asked for once."""
        if self._num_ranks is None:
            answer = self._request("GET", "/get_world_size?include_dp=false", None, timeout=_PROBE_TIMEOUT)
            self._num_ranks = int(answer["world_size"])
        return self._num_ranks

    def initialize(self, init_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        """Call `/init_weight_transfer_engine`."""
        self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)}, timeout)

    def start_update(self, *, timeout: timedelta) -> None:
        """Call `/start_weight_update`."""
        self._post("/start_weight_update", {}, timeout)

    def update(self, update_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        """Call `/update_weights`."""
        self._post("/update_weights", {"update_info": dict(update_info)}, timeout)

    def finish_update(self, version: str, *, timeout: timedelta) -> None:
        """Call `/finish_weight_update`."""
        self._post("/finish_weight_update", {"weight_version": version}, timeout)

    def check_alive(self) -> None:
        """Raise EngineError when the server does not answer or its engine has died."""
        self._request("GET", "/health", None, timeout=_PROBE_TIMEOUT)

    def pause(self, mode: PauseMode, *, clear_cache: bool, timeout: timedelta) -> None:
        """Call `/pause`; returns once no step runs."""
        query = urlencode({"mode": str(mode), "clear_cache": str(clear_cache).lower()})
        self._post(f"/pause?{query}", None, timeout)

    def resume(self, *, timeout: timedelta) -> None:
        """Call `/resume`."""
        self._post("/resume", None, timeout)

    def weight_version(self) -> str:
        """Return the label that the server puts on tokens."""
        return str(self._request("GET", "/weight_info", None, timeout=_PROBE_TIMEOUT)["weight_version"])

    def _post(self, path: str, body: Mapping[str, Any] | None, timeout: timedelta) -> None:
        self._request("POST", path, body, timeout=timeout)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout: timedelta) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=max(0.01, timeout.total_seconds()))
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.url}{path}: the server did not answer: {error!r}") from error
        finally:
            connection.close()
        if response.status == http.client.NOT_FOUND:
            raise ConfigError(f"{self.url} has no {path}: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if response.status != http.client.OK:
            raise EngineError(f"{self.url}{path} answered {response.status}: {text[:500].decode(errors='replace')}")
        return json.loads(text) if text.strip() else {}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
