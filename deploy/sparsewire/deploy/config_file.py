"""One TOML file per process into its checked configuration, with every problem in one list before anything loads.

Called by the command line. The order is: parse, lay command-line values over it, validate every key, then the
start-up checks (does the model exist, does the store answer and does the bucket exist, are the ports free, can the
directory be written, is the task known). Only then is a packaged model resolved. Checks also run for keys beside
broken ones, so a user sees the whole list at once. Each problem names its key, what is wrong and the remedy.

Secrets never belong into these files; should one be there all the same, it is not repeated: values of unknown keys,
user names in URLs and credentials from the environment are blotted out of every message.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sparsewire.deploy.models import describe_missing_model, resolve_model
from sparsewire.rollout.config import WorkerConfig
from sparsewire.rollout.tasks import open_task
from sparsewire.sync.errors import ConfigError, SparsewireError
from sparsewire.sync.rpc import check_address
from sparsewire.sync.store import check_store_url, open_store
from sparsewire.sync.telemetry import redact, secret_values
from sparsewire.trainer.config import LearnerConfig

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_EXAMPLES: Mapping[str, str] = {
    "run": "r1",
    "model": "smollm2",
    "store": "file:///var/lib/sparsewire/store",
    "directory": "state",
    "trajectories_address": "127.0.0.1:7071",
    "weights_address": "127.0.0.1:7070",
    "task": "addition",
    "num_steps": "24",
    "weights": "grpc://127.0.0.1:7070",
    "trajectories": "127.0.0.1:7071",
    "region": "eu",
    "worker_id": "worker-eu",
}
"""A good value for each required key: shown as the remedy, and standing in for a broken one while the rest is checked."""

_URL_USER = re.compile(r"[^\s/@'\"]+@")
_URL_SECRET = re.compile(r"([?&][^=&\s]*(?:secret|token|password|key)[^=&\s]*=)[^&\s\"']+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to fix."""

    key: str
    """Path of the key in the file; empty when it concerns the file as a whole."""
    text: str
    """What is wrong, and the remedy."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def problems_error(problems: list[Problem], *, where: str, secrets: frozenset[str] = frozenset()) -> ConfigError:
    """Return one error that lists all problems, with secrets blotted out."""
    distinct = list(dict.fromkeys(str(problem) for problem in problems))
    head = f"{where} has a problem:" if len(distinct) == 1 else f"{where} has {len(distinct)} problems:"
    text = "\n".join([head, *(f"  {number}. {line}" for number, line in enumerate(distinct, start=1))])
    text = redact(text, secret_values(os.environ) | secrets)
    return ConfigError(_URL_SECRET.sub(r"\1***", _URL_USER.sub("***@", text)))


def load_learner_config(path: Path | None, overrides: Mapping[str, object], *, serving: bool = True) -> LearnerConfig:
    """Return a learner's configuration from a file and the values laid over it, checked against this machine.

    Args:
        serving: this process will open the ports and write the store (rank 0); another rank leaves both alone.

    Raises:
        ConfigError: lists every problem.
    """

    def checks(good: Mapping[str, Any]) -> Iterator[Problem]:
        yield from _check_model(good)
        yield from _check_directory(good)
        yield from _check_task(good)
        if serving:
            yield from _check_ports(good, ("weights_address", "trajectories_address"))
            yield from _check_store(good, "store", writable=True)

    return _load(LearnerConfig, path, overrides, checks)


def load_worker_config(path: Path | None, overrides: Mapping[str, object]) -> WorkerConfig:
    """Return a worker's configuration from a file and the values laid over it, checked against this machine.

    A learner that is not up yet is no problem: the worker waits for it.

    Raises:
        ConfigError: lists every problem.
    """

    def checks(good: Mapping[str, Any]) -> Iterator[Problem]:
        yield from _check_model(good)
        yield from _check_directory(good)
        yield from _check_ports(good, ())
        yield from _check_address(good, "trajectories")
        weights = str(good.get("weights", ""))
        if weights.startswith("grpc://"):
            yield from _check_address({"weights": weights.removeprefix("grpc://").rstrip("/")}, "weights")
        else:
            yield from _check_store(good, "weights", writable=False)

    return _load(WorkerConfig, path, overrides, checks)


def value_problems(kind: type[BaseModel], values: Mapping[str, object]) -> list[Problem]:
    """Return what is wrong with some keys of a configuration, whatever the others will be."""
    examples = {key: _EXAMPLES[key] for key, field in kind.model_fields.items() if field.is_required()}
    return [problem for problem in _validate(kind, {**examples, **values})[0] if problem.key.split(".")[0] in values]


def parse_setting(text: str) -> tuple[str, object]:
    """Return key and value of `KEY=VALUE`; the value is TOML, or plain text where it is not.

    Raises:
        ConfigError: there is no key or no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip().isidentifier():
        raise ConfigError(
            f"setting {key[:40]!r}: wants KEY=VALUE with a key of the configuration, for example num_threads=2"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _load(
    kind: type[ConfigT],
    path: Path | None,
    overrides: Mapping[str, object],
    checks: Callable[[Mapping[str, Any]], Iterator[Problem]],
) -> ConfigT:
    where = str(path) if path is not None else "the configuration"
    raw = {**_read(path), **{key: value for key, value in overrides.items() if value is not None}}
    unknown = frozenset(str(raw[key]) for key in raw.keys() - kind.model_fields.keys() if len(str(raw[key])) > 3)
    problems, broken = _validate(kind, raw)
    good = {key: field.get_default() for key, field in kind.model_fields.items() if not field.is_required()}
    good = {key: value for key, value in {**good, **raw}.items() if key not in broken and key in kind.model_fields}
    problems.extend(checks(good))
    if problems:
        raise problems_error(problems, where=where, secrets=unknown)
    return kind.model_validate({**raw, "model": resolve_model(str(raw["model"]))})


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {path}; `sparsewire sim` writes some to start from"
        ) from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"\(at .*\)$", str(error))
        raise ConfigError(
            f"configuration file {path} is not TOML {position[0] if position else ''}: write `key = value` lines, "
            "text in double quotes"
        ) from None


def _validate(kind: type[BaseModel], raw: Mapping[str, Any]) -> tuple[list[Problem], set[str]]:
    """Return the problems of single keys and of keys together, and the keys that are broken."""
    problems: list[Problem] = []
    broken: set[str] = set()
    candidate = dict(raw)
    with tempfile.TemporaryDirectory() as stand_in:
        (Path(stand_in) / "config.json").write_text("{}")
        if isinstance(raw.get("model"), str | Path):
            candidate["model"] = stand_in  # a packaged model is no directory yet; `_check_model` looks at the real one
        # Rules between keys only run once every key is good by itself: put good values in the place of broken ones.
        for _ in range(2):
            try:
                kind.model_validate(candidate)
                break
            except ValidationError as error:
                for item in error.errors(include_url=False, include_input=False):
                    problems.append(Problem(".".join(str(part) for part in item["loc"]), _sentence(item, kind)))
                    if item["loc"]:
                        top = str(item["loc"][0])
                        broken.add(top)
                        candidate.pop(top, None)
                        if top in kind.model_fields and kind.model_fields[top].is_required():
                            candidate[top] = stand_in if top == "model" else _EXAMPLES.get(top, "1")
    return problems, broken


def _sentence(item: Any, kind: type[BaseModel]) -> str:
    key = str(item["loc"][-1]) if item["loc"] else ""
    match item["type"]:
        case "missing":
            example = _EXAMPLES.get(key)
            return "is missing; add it" + (f', for example {key} = "{example}"' if example else "")
        case "extra_forbidden":
            close = get_close_matches(key, list(kind.model_fields), n=1)
            return f"unknown key; did you mean {close[0]}?" if close else "unknown key; remove it"
        case _:
            message = str(item["msg"]).removeprefix("Value error, ")
            return message if not key else message[:1].lower() + message[1:]


def _check_model(good: Mapping[str, Any]) -> Iterator[Problem]:
    if "model" in good:
        problem = describe_missing_model(str(good["model"]))
        if problem is not None:
            yield Problem("model", problem)


def _check_directory(good: Mapping[str, Any]) -> Iterator[Problem]:
    if "directory" in good:
        problem = describe_unwritable(Path(str(good["directory"])))
        if problem is not None:
            yield Problem("directory", problem)


def describe_unwritable(directory: Path) -> str | None:
    """Return why files cannot be written below `directory`, with the remedy; creates it where it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{directory} cannot be written ({error.strerror}); give a directory that this user may write"


def _check_task(good: Mapping[str, Any]) -> Iterator[Problem]:
    if "task" in good:
        try:
            open_task(str(good["task"]))
        except ConfigError as error:
            yield Problem("task", str(error))


def _check_store(good: Mapping[str, Any], key: str, *, writable: bool) -> Iterator[Problem]:
    if key in good:
        problem = describe_unusable_store(str(good[key]), writable=writable)
        if problem is not None:
            yield Problem(key, problem)


def describe_unusable_store(url: str, *, writable: bool) -> str | None:
    """Return why a store cannot be used, asking it within its own deadlines; None when it answers."""
    try:
        check_store_url(url)
        store = open_store(url, writable=writable)
        try:
            next(iter(store.list("")), None)
        finally:
            store.close()
    except SparsewireError as error:
        return str(error)
    return None


def _check_address(good: Mapping[str, Any], key: str) -> Iterator[Problem]:
    if key in good:
        try:
            check_address(str(good[key]))
        except ConfigError as error:
            yield Problem(key, str(error))


def _check_ports(good: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Problem]:
    """Find addresses that cannot be listened on, or that two keys claim."""
    claimed: dict[int, str] = {}
    for key in (*keys, "metrics_port"):
        value = good.get(key)
        if value is None:
            continue
        try:
            address = f"0.0.0.0:{int(value)}" if key == "metrics_port" else str(value)
            check_address(address)
        except (ConfigError, TypeError, ValueError) as error:
            yield Problem(key, str(error))
            continue
        host, _, text = address.rpartition(":")
        port = int(text)
        if port and port in claimed:
            yield Problem(key, f"port {port} is also that of {claimed[port]}; give each a port of its own")
            continue
        claimed[port] = key
        reason = _why_not_bindable(host.strip("[]"), port)
        if reason is not None:
            yield Problem(key, f"cannot listen on {address} ({reason}); is another run using it? choose another port")


def _why_not_bindable(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port whose last connections only linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None
