"""An existing `vllm serve` takes versions over HTTP, in flight, and ends as a fresh engine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from sparsewire.rollout.change import Change
from sparsewire.rollout.vllm.driver import RankDriver
from sparsewire.rollout.vllm.server import PauseMode, ServerCalls
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import ConfigError, EngineError
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.subscriber import Subscriber

Weights = dict[str, npt.NDArray[Any]]

SOON = timedelta(seconds=30)
START_SECONDS = 120


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000", "http://example.com:80", "https://127.0.0.1:1", "127.0.0.1:8000"]
)
def test_server_on_another_host_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        ServerCalls(url=url)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path], ServerCalls]]:
    """Starts servers as a user would, with one more argument, and ends them after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(directory: Path) -> ServerCalls:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(directory), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(16 << 20), "--block-size", "32", "--generation-config", "vllm"),
            *("--weight-transfer-config", '{"backend":"sparsewire"}'),
        ]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
        log = tmp_path / f"server-{port}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=tmp_path)
        processes.append(process)
        calls = ServerCalls(url=f"http://127.0.0.1:{port}")
        until = time.monotonic() + START_SECONDS
        waiting = threading.Event()
        while True:
            try:
                calls.check_alive()
                return calls
            except EngineError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                waiting.wait(0.2)

    yield start
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def complete(calls: ServerCalls, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Complete a prompt over HTTP with the likeliest tokens."""
    host, _, port = calls.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.slow
def test_chain_over_http_ends_as_a_fresh_engine_and_a_request_in_flight_survives(
    model_of: Callable[[str], Path],
    weights_of: Callable[[Path], Weights],
    nudge_weights: Callable[..., Weights],
    write_checkpoint: Callable[[Path, Path, Weights], None],
    serve: Callable[[Path], ServerCalls],
    open_llm: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = model_of("qwen3")
    weights = weights_of(base)
    calls = serve(base)
    exchange = tmp_path / "exchange"
    exchange.mkdir(mode=0o700)
    driver = RankDriver(calls=calls, directory=exchange)
    prompt = list(range(70, 90))
    url = f"file://{tmp_path}/store"
    with (
        ThreadPoolExecutor(1) as pool,
        Publisher.open(url, run="r1") as publisher,
        Subscriber.open(url, run="r1", mirror=tmp_path / "mirror", stage=True) as subscriber,
    ):
        publisher.publish(weights)
        subscriber.sync()
        driver.bind(subscriber.schema)
        driver.load(subscriber.tensors(), version=0)
        driver.finish(0)
        subscriber.release(0)
        for version in range(1, 21):
            weights = nudge_weights(weights, version)
            publisher.publish(weights)
            subscriber.sync()
            update = subscriber.staged()
            assert update is not None
            change = Change(
                patches=list(update.patches()), base_version=version - 1, version=version, path=update.paths[0]
            )
            in_flight = pool.submit(complete, calls, prompt, 300) if version == 20 else None
            driver.stage(change)
            calls.pause(PauseMode.KEEP, clear_cache=True, timeout=SOON)
            driver.apply(change)
            driver.digest_at(change)
            driver.finish(version)
            calls.resume(timeout=SOON)
            subscriber.release(version)
            if in_flight is not None:
                assert len(in_flight.result(timeout=120)[0]) == 300
    assert calls.weight_version() == "20"
    assert driver.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}
    made = complete(calls, prompt, 30)

    # Another driver finds the server as the first one left it.
    again = tmp_path / "again"
    again.mkdir(mode=0o700)
    second = RankDriver(calls=calls, directory=again)
    second.describe()
    assert second.held_version == 20

    write_checkpoint(tmp_path / "last", base, weights)
    fresh = open_llm(tmp_path / "last")
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=30, logprobs=0, ignore_eos=True)
    (result,) = fresh.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    output = result.outputs[0]
    logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert made == (list(output.token_ids), logprobs)
