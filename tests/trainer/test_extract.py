"""The views of the learner: each cast is the one it names, and any number of ranks publishes the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from sparsewire.sync import Publisher, Subscriber
from sparsewire.sync.errors import ConfigError
from sparsewire.sync.quantize import dequantize_blocks
from sparsewire.trainer.config import ViewKind
from sparsewire.trainer.extract import local_view
from sparsewire.trainer.model import CausalLM, canonical_parameters, load_model
from sparsewire.trainer.outlet import Outlet
from sparsewire.trainer.ranks import ProcessGroup

_PROGRAM = Path(__file__).with_name("view_program.py")


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose blocks end within tensors, and lie across the border between two ranks."""
    directory = tmp_path_factory.mktemp("odd-model")
    torch.manual_seed(0)
    make_model: Any = LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    make_model(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def float32_weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """Return the whole weights."""
    weights = {}
    for name, parameter in canonical_parameters(model).items():
        tensor = parameter.detach()
        assert isinstance(tensor, DTensor)
        weights[name] = tensor.full_tensor()
    return weights


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def quantized_by_torch(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 and scales of a whole float32 weight, computed with torch alone."""
    cast = weight.to(torch.bfloat16).float()
    rows, columns = cast.shape
    padded = torch.nn.functional.pad(cast, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scales = (blocks.abs().amax(dim=(1, 3)) / 448.0).clamp(min=2.0**-116)
    coded = (blocks / scales[:, None, :, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return coded.reshape(padded.shape)[:rows, :columns], scales


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(ViewKind.BF16, torch.bfloat16), (ViewKind.FP16, torch.float16), (ViewKind.FP32, torch.float32)],
)
def test_each_cast_is_the_one_it_names(
    group: ProcessGroup, odd_model: Path, kind: ViewKind, dtype: torch.dtype
) -> None:
    model = load_model(odd_model, mesh=group.mesh, device=group.device, dither_seed=1)
    view = local_view(model, kind=kind, ranks=group.control)
    weights = float32_weights(model)
    assert sorted(view) == sorted(weights)
    for name, weight in weights.items():
        expected = weight.to(dtype).contiguous().view(torch.int32 if dtype is torch.float32 else torch.int16)
        np.testing.assert_array_equal(bits(view[name].array).view(expected.numpy().dtype), expected.numpy())


def test_block_fp8_of_the_learner_has_the_bits_that_torch_computes(group: ProcessGroup, odd_model: Path) -> None:
    model = load_model(odd_model, mesh=group.mesh, device=group.device, dither_seed=1)
    view = local_view(model, kind=ViewKind.FP8_BLOCK, ranks=group.control)
    weights = float32_weights(model)
    linear = [name for name in weights if name.endswith("_proj.weight")]
    assert len(linear) == 7
    assert sorted(view) == sorted([*weights, *(f"{name}_scale_inv" for name in linear)])
    for name, weight in weights.items():
        if name in linear:
            coded, scales = quantized_by_torch(weight)
            np.testing.assert_array_equal(bits(view[name].array), coded.view(torch.uint8).numpy())
            np.testing.assert_array_equal(bits(view[f"{name}_scale_inv"].array), bits(scales.numpy()))
        else:
            np.testing.assert_array_equal(
                bits(view[name].array).view(np.int16), weight.to(torch.bfloat16).view(torch.int16).numpy()
            )


def test_modules_named_stay_bf16(group: ProcessGroup, odd_model: Path) -> None:
    model = load_model(odd_model, mesh=group.mesh, device=group.device)
    view = local_view(model, kind=ViewKind.FP8_BLOCK, modules_to_not_convert=["self_attn", "mlp.down_proj"])
    fp8 = [name for name, shard in view.items() if shard.array.dtype == ml_dtypes.float8_e4m3fn]
    assert fp8 == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]


def test_weights_that_are_not_finite_are_not_published_as_fp8(
    group: ProcessGroup, odd_model: Path, tmp_path: Path
) -> None:
    model = load_model(odd_model, mesh=group.mesh, device=group.device)
    with Publisher.open(f"file://{tmp_path}", run="r1") as publisher:
        outlet = Outlet(publisher=publisher, model=model, kind=ViewKind.FP8_BLOCK, ranks=group.control)
        outlet.publish(step=0)
        assert outlet.view_bytes == sum(spec.num_bytes for spec in _schema(f"file://{tmp_path}", "r1"))
        with torch.no_grad():
            canonical_parameters(model)["model.layers.0.mlp.up_proj.weight"].fill_(float("inf"))
        with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.weight.*infinite or NaN"):
            outlet.start(step=1, stepped_unix_seconds=0.0)
        assert publisher.head is not None
        assert publisher.head.version == 0


def _schema(store: str, run: str) -> Any:
    with Subscriber.open(store, run=run) as subscriber:
        subscriber.sync()
        return subscriber.schema


@pytest.mark.slow
def test_two_ranks_publish_the_bits_of_one(group: ProcessGroup, odd_model: Path, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
            str(_PROGRAM), str(odd_model), store,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    model = load_model(odd_model, mesh=group.mesh, device=group.device, dither_seed=1)
    for version in range(2):
        for kind in (ViewKind.FP8_BLOCK, ViewKind.FP16):
            expected = local_view(model, kind=kind)
            with Subscriber.open(store, run=kind) as subscriber:
                assert subscriber.sync(version=version) == version
                tensors = subscriber.tensors()
                assert sorted(tensors) == sorted(expected)
                for name, tensor in tensors.items():
                    assert tensor.dtype == expected[name].array.dtype
                    np.testing.assert_array_equal(bits(tensor), bits(expected[name].array), err_msg=name)
                    if kind is ViewKind.FP8_BLOCK and f"{name}_scale_inv" in tensors:
                        back = dequantize_blocks(tensor, tensors[f"{name}_scale_inv"])
                        true = float32_weights(model)[name].numpy()
                        assert np.abs(back - true).max() < np.abs(true).max() / 16
        with torch.no_grad():
            for parameter in canonical_parameters(model).values():
                parameter.mul_(1.003)
