"""Loads a causal language model as float32 shards, ready to train under FSDP2.

`load_model` is collective over the mesh. Parameters are never whole in one process: the module is built without
storage, each decoder layer gets storage only while `fully_shard` cuts it, and every rank then reads just its own rows
from the safetensors files. Afterwards parameters are float32 DTensors, `Shard(0)`, with tied weights sharing one;
forward and backward run in the compute dtype and gradients are reduced in float32.

The model stays in eval mode: learner and rollouts must score tokens under the same distribution, so no dropout.

Known limit: tensors must be stored under the names the module has, as in all dense Hugging Face models;
architectures whose checkpoint is rearranged on loading (some mixtures of experts) are refused with the names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from sparsewire.sync.errors import ConfigError, DamagedError, SchemaMismatchError
from sparsewire.trainer.config import ComputeDtype
from sparsewire.trainer.dither import dither

logger = logging.getLogger(__name__)

CausalLM: TypeAlias = nn.Module
"""A Hugging Face causal language model, after `load_model` an FSDPModule."""

_WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_MISSING_SHOWN = 5


def canonical_name(name: str) -> str:
    """Return a parameter's checkpoint name: without the prefixes that torch's wrappers add, in any nesting."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def canonical_parameters(model: CausalLM) -> Mapping[str, nn.Parameter]:
    """Return all parameters by canonical name in name order; a tied weight appears once, under its first name."""
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=True)}
    return dict(sorted(named.items()))


def load_model(
    directory: Path,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    compute_dtype: ComputeDtype = ComputeDtype.BFLOAT16,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    dither_seed: int | None = None,
) -> CausalLM:
    """Return the model of `directory`, sharded over `mesh`, with its weights; collective.

    With a `dither_seed`, weights stored in bfloat16 get random low bits in float32 that leave their bfloat16 value as
    it is; see `dither.py` for why. The same seed gives the same weights on any number of ranks.

    Raises:
        ConfigError: no model is there, or its architecture cannot be sharded by layers.
        SchemaMismatchError: stored tensors do not fit the architecture; the message names them.
        DamagedError: a weights file cannot be read.
    """
    files = _tensor_files(directory)
    model = _build_without_storage(directory)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    materialise = _Materialiser(device)
    layers = _decoder_layers(model, directory)
    # With one rank there is nothing to save by dropping the gathered copy between forward and backward.
    reshard_after_forward = mesh.size() > 1
    for number, layer in enumerate(layers):
        materialise(layer)
        if activation_checkpointing:
            layer = checkpoint_wrapper(layer)
            layers[number] = layer
        if compile_layers:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    materialise(model)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.eval()
    parameters = canonical_parameters(model)
    _read_shards(parameters, files, directory, dither_seed=dither_seed)
    logger.info(
        "loaded %s: %d parameter tensors, %d elements, rank %d of %d on %s",
        directory,
        len(parameters),
        sum(parameter.numel() for parameter in parameters.values()),
        mesh.get_rank(),
        mesh.size(),
        device,
    )
    return model


def vocabulary_size(model: CausalLM) -> int:
    """Return how many token ids the model knows."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return int(embeddings.num_embeddings)


def _build_without_storage(directory: Path) -> CausalLM:
    """Return the architecture with parameters on the meta device and buffers computed for real."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with _parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {directory}: not a causal language model that transformers can build: {error}"
        ) from error
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Give parameters that modules register inside the block no storage; buffers stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is on meta already may be a tied one: replacing it would break the tie.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Materialiser:
    """Gives meta parameters of a module storage, uninitialised, keeping ties."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        self._kept_alive: list[nn.Parameter] = []

    def __call__(self, root: nn.Module) -> None:
        for module in root.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta or isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in self._made:
                    empty = torch.empty(parameter.shape, dtype=torch.float32, device=self._device)
                    self._made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    self._kept_alive.append(parameter)
                module._parameters[name] = self._made[id(parameter)]


def _decoder_layers(model: CausalLM, directory: Path) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ConfigError(f"model {directory}: {type(model).__name__} has no list of layers to shard by")
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def _tensor_files(directory: Path) -> Mapping[str, Path]:
    """Return which safetensors file holds each stored tensor."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model {directory}: no config.json there; give the directory of a Hugging Face model")
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    if not single.is_file():
        raise ConfigError(f"model {directory}: no model.safetensors there; save it with save_pretrained first")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise DamagedError(f"weights file {path} cannot be read: {error}; fetch the model again") from error


def _read_shards(
    parameters: Mapping[str, nn.Parameter], files: Mapping[str, Path], directory: Path, *, dither_seed: int | None
) -> None:
    """Copy this rank's rows of every stored tensor into its parameter, upcasting to float32."""
    missing = [name for name in parameters if name not in files]
    if missing:
        shown = ", ".join(missing[:_MISSING_SHOWN])
        raise SchemaMismatchError(
            f"model {directory}: {len(missing)} parameters have no stored tensor of their name ({shown}...); "
            "use weights saved by save_pretrained of this architecture"
        )
    by_file: dict[Path, list[str]] = {}
    for name in parameters:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with _open(path) as file, torch.no_grad():
            for name in names:
                _read_shard(name, parameters[name], file.get_slice(name), path, dither_seed=dither_seed)


def _read_shard(name: str, parameter: nn.Parameter, stored: Any, path: Path, *, dither_seed: int | None) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(parameter.shape):
        raise SchemaMismatchError(
            f"tensor {name} in {path} has shape {list(shape)}, the architecture wants {list(parameter.shape)}: "
            "config.json and weights are of different models"
        )
    local, row = local_shard(parameter)
    if not local.numel():
        return
    rows: torch.Tensor = stored[row : row + local.shape[0]]
    values = rows.float()
    if dither_seed is not None and rows.dtype == torch.bfloat16:
        dither(values.numpy(), start=row * prod(shape[1:]), seed=dither_seed, name=name)
    local.copy_(values)


def local_shard(parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
    """Return this rank's part of a parameter and its first row in the full tensor; the part may be empty.

    The tensor shares the parameter's storage.
    """
    if not isinstance(parameter, DTensor):
        return parameter.data, 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), offset[0]
