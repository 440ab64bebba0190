from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsewire.sync.errors import ConfigError, DamagedError, SchemaMismatchError
from sparsewire.trainer.config import ComputeDtype
from sparsewire.trainer.extract import local_view, to_bfloat16
from sparsewire.trainer.model import canonical_name, canonical_parameters, load_model, local_shard, vocabulary_size
from sparsewire.trainer.ranks import ProcessGroup


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "_orig_mod.model.layers.0.mlp.up_proj.weight",
        "model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "_fsdp_wrapped_module.model._orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.mlp.up_proj.weight",
    ],
)
def test_wrapper_prefixes_are_stripped_in_any_nesting(name: str) -> None:
    assert canonical_name(name) == "model.layers.0.mlp.up_proj.weight"


def test_loaded_weights_are_the_stored_ones_in_float32_with_ties_once(group: ProcessGroup, tiny_model: Path) -> None:
    model = load_model(tiny_model, mesh=group.mesh, device=group.device)
    stored = load_file(tiny_model / "model.safetensors")
    parameters = canonical_parameters(model)
    assert list(parameters) == sorted(stored)
    assert "lm_head.weight" not in parameters
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float32
        local, row = local_shard(parameter)
        assert row == 0
        assert torch.equal(local, stored[name].float())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    assert vocabulary_size(model) == stored["model.embed_tokens.weight"].shape[0]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_the_model_loaded_by_transformers(
    group: ProcessGroup, tmp_path: Path, tiny_model_writer: Callable[..., None], tied: bool
) -> None:
    tiny_model_writer(tmp_path, tie_word_embeddings=tied)
    ours = load_model(tmp_path, mesh=group.mesh, device=group.device, compute_dtype=ComputeDtype.FLOAT32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 40).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_activation_checkpointing_changes_neither_names_nor_gradients(group: ProcessGroup, tiny_model: Path) -> None:
    ids = torch.arange(3, 40).reshape(1, -1)
    gradients = []
    for activation_checkpointing in (False, True):
        model = load_model(
            tiny_model,
            mesh=group.mesh,
            device=group.device,
            compute_dtype=ComputeDtype.FLOAT32,
            activation_checkpointing=activation_checkpointing,
        )
        torch.autograd.backward(model(input_ids=ids).logits.square().mean())
        gradients.append({name: p.grad.full_tensor() for name, p in canonical_parameters(model).items()})  # type: ignore[union-attr]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_a_directory_without_a_model_is_refused(group: ProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, mesh=group.mesh, device=group.device)


def test_missing_tensors_are_named(group: ProcessGroup, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(tiny_model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SchemaMismatchError, match=r"model\.norm\.weight"):
        load_model(tmp_path / "model", mesh=group.mesh, device=group.device)


def test_weights_of_another_size_are_refused(group: ProcessGroup, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tiny_model / "config.json").read_text())
    config["intermediate_size"] = 96
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(SchemaMismatchError, match=r"shape .* the architecture wants"):
        load_model(tmp_path / "model", mesh=group.mesh, device=group.device)


def test_a_truncated_weights_file_is_named(group: ProcessGroup, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path / "model", mesh=group.mesh, device=group.device)


def test_the_view_rounds_to_nearest_even_bit_for_bit() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    # A NaN stays one, but which one is the converter's choice.
    values = values[~np.isnan(values)]
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, ties[~np.isnan(ties)], np.asarray([0.0, -0.0, np.inf, -np.inf], np.float32)])
    ours = to_bfloat16(torch.from_numpy(values.copy()))
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ours.view(np.uint16), expected.view(np.uint16))


def test_the_view_is_a_copy_that_later_steps_do_not_change(group: ProcessGroup, tiny_model: Path) -> None:
    model = load_model(tiny_model, mesh=group.mesh, device=group.device)
    view = local_view(model)
    before = {name: shard.array.copy() for name, shard in view.items()}
    with torch.no_grad():
        for parameter in canonical_parameters(model).values():
            parameter.mul_(2.0)
    for name, shard in view.items():
        np.testing.assert_array_equal(shard.array.view(np.uint16), before[name].view(np.uint16))
