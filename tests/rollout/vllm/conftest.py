"""What the tests of the vLLM engine share: tiny random models of several architectures, and changes of their weights."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsewire.rollout.vllm.driver import RankDriver
from sparsewire.rollout.vllm.engine import VllmEngine, VllmOptions
from sparsewire.sync.errors import EngineError

# One thread and no compilation give bitwise reproducible results; the engine core in this process starts in a second.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
)

Weights = dict[str, npt.NDArray[Any]]

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NUM_TOKENS = 320
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE = {
    "vocab_size": _NUM_TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS = ("qwen3", "qwen3-tied", "llama", "qwen3-moe", "qwen3-fp8")


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Special tokens fill the vocabulary, so that every id that is sampled has a text.
    special = [*_SPECIAL, *(f"<|{number}|>" for number in range(_NUM_TOKENS - len(alphabet) - len(_SPECIAL)))]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast_type: Any = PreTrainedTokenizerFast
    fast = fast_type(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:],
        chat_template=_CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


def write_model(directory: Path, kind: str, *, seed: int = 0) -> None:
    """Write a random model of one of `KINDS` (0.4 to 1 million parameters) with a byte-level tokenizer."""
    import transformers

    transformers_any: Any = transformers
    tied = {"tie_word_embeddings": kind == "qwen3-tied"}
    match kind:
        case "llama":
            config = transformers_any.LlamaConfig(**_SHAPE, **tied)
            model = transformers_any.LlamaForCausalLM(config)
        case "qwen3-moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            config = transformers_any.Qwen3MoeConfig(**_SHAPE, **tied, **experts, norm_topk_prob=True)
            model = transformers_any.Qwen3MoeForCausalLM(config)
        case _:
            config = transformers_any.Qwen3Config(**_SHAPE, **tied)
            model = transformers_any.Qwen3ForCausalLM(config)
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
        # A logit of zero among logits that spread by several units: completions run to their limit.
        model.get_output_embeddings().weight[_SHAPE["eos_token_id"]] = 0.0
    model.to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)
    if kind == "qwen3-fp8":
        _quantize(directory)


def _quantize(directory: Path) -> None:
    """Turn linear weights into float8 with one float32 scale for each 128 x 128 block."""
    tensors = load_file(directory / "model.safetensors")
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "proj" not in name:
            quantized[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().reshape(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448.0
        values = (blocks / scale[:, None, :, None]).reshape(rows, columns)
        quantized[name] = values.to(torch.float8_e4m3fn)
        quantized[name + "_scale_inv"] = scale
    save_file(quantized, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (directory / "config.json").write_text(json.dumps(config))


def read_weights(directory: Path) -> Weights:
    """Read a checkpoint as NumPy arrays."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    dtypes: Mapping[torch.dtype, Any] = {
        torch.bfloat16: ml_dtypes.bfloat16,
        torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
        torch.float32: np.float32,
    }
    return {
        name: tensor.view(integers[tensor.element_size()]).numpy().view(dtypes[tensor.dtype])
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


def write_weights(directory: Path, base: Path, weights: Weights) -> None:
    """Write a checkpoint with the files of `base` and other weights."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    dtypes = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float32": torch.float32}
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array).view(f"<i{array.itemsize}")).view(dtypes[array.dtype.name])
        for name, array in weights.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def nudge(weights: Weights, seed: int, *, share: float = 0.02) -> Weights:
    """Return weights of which a share moved by some units in the last place, and a few became odd values."""
    generator = np.random.default_rng(seed)
    changed: Weights = {}
    for name, array in weights.items():
        bits = array.reshape(-1).view(f"<u{array.itemsize}").copy()
        where = generator.random(bits.size) < share
        # Small enough steps never reach a float8's NaN from below its largest values often; skip those outright.
        steps = generator.integers(1, 4, bits.size).astype(bits.dtype)
        if array.itemsize == 1:
            where &= (bits & 0x7F) < 0x78
        bits[where] += steps[where]
        if array.itemsize == 2 and bits.size > 64:
            odd = generator.integers(0, bits.size, 2)
            bits[odd] = (0x8000, 0x0001)  # -0.0 and the smallest subnormal
        changed[name] = bits.view(array.dtype).reshape(array.shape)
    return changed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM warn about itself; our own code warns nowhere in these tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a model of a kind, written once a session."""
    root = tmp_path_factory.mktemp("vllm-models")

    def get(kind: str) -> Path:
        directory = root / kind
        if not directory.exists():
            directory.mkdir()
            write_model(directory, kind)
        return directory

    return get


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], Weights]:
    """The function `read_weights(directory)`."""
    return read_weights


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[[Path, Path, Weights], None]:
    """The function `write_weights(directory, base, weights)`."""
    return write_weights


@pytest.fixture(scope="session")
def nudge_weights() -> Callable[..., Weights]:
    """The function `nudge(weights, seed, *, share=0.02)`."""
    return nudge


class InProcessEngine:
    """vLLM's `LLM` with the engine core in this process, and a driver of its one rank."""

    num_ranks = 1

    def __init__(self, directory: Path, exchange: Path, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM

        exchange.mkdir(mode=0o700, parents=True)
        defaults: dict[str, Any] = {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 16 << 20,
            "block_size": 32,
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": "sparsewire"},
        }
        self.llm: Any = LLM(str(directory), **(defaults | dict(arguments)))
        self.driver = RankDriver(calls=self, directory=exchange)

    def initialize(self, init_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        self._call("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start_update(self, *, timeout: timedelta) -> None:
        self._call("start_weight_update")

    def update(self, update_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        self._call("update_weights", {"update_info": dict(update_info)})

    def finish_update(self, version: str, *, timeout: timedelta) -> None:
        self._call("finish_weight_update")

    def check_alive(self) -> None:
        pass

    def _call(self, method: str, kwargs: Mapping[str, Any] | None = None) -> None:
        try:
            self.llm.collective_rpc(method, kwargs=dict(kwargs or {}))
        except RuntimeError as error:
            raise EngineError(f"{method}: {error}") from error

    @property
    def rank(self) -> Any:
        """The rank's weights, inside the backend."""
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        return worker.weight_transfer_engine._weights

    @property
    def model(self) -> torch.nn.Module:
        """The model that generates."""
        model: torch.nn.Module = self.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        return model

    def parameter_bytes(self) -> dict[str, bytes]:
        """The bytes of all parameters as the kernels read them."""
        return {
            name: parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, parameter in self.model.named_parameters()
        }

    def greedy(self, prompts: Sequence[str], num_tokens: int = 12) -> list[tuple[list[int], list[float]]]:
        """The tokens that are most likely, with their log-probabilities; no cache survives from before."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        found = []
        for result in self.llm.generate(list(prompts), sampling, use_tqdm=False):
            output = result.outputs[0]
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            found.append((list(output.token_ids), [entry[token].logprob for token, entry in pairs]))
        return found


@pytest.fixture
def open_llm(tmp_path: Path) -> Iterator[Callable[..., InProcessEngine]]:
    """Opens engines in this process, and ends them after the test."""
    opened: list[InProcessEngine] = []

    def make(directory: Path, **arguments: Any) -> InProcessEngine:
        engine = InProcessEngine(directory, tmp_path / f"exchange-{len(opened)}", arguments)
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine.llm
    gc.collect()


@pytest.fixture(scope="session")
def open_vllm() -> Callable[..., VllmEngine]:
    """Returns a function that starts vLLM in processes of its own on a model directory."""

    def make(directory: Path, **arguments: Any) -> VllmEngine:
        options = VllmOptions(
            max_model_len=512,
            max_num_seqs=16,
            kv_cache_bytes=32 << 20,
            enforce_eager=True,
            extra={"block_size": 32},
            **arguments,
        )
        return VllmEngine.open(directory, options=options)

    return make
