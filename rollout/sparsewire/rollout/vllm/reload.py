"""vLLM's loaded model in the form its loaders know, for a trace, and its own reload, for what cannot be written in place.

vLLM remembers every layer's parameters as they were before kernels processed them (class, attributes, shape). For a
trace these stand in, on the meta device, for the live ones. Importing this needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors


@contextmanager
def loadable(model: torch.nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Put stand-ins for all parameters and buffers into `model`, and yield the live ones by name; undone at the end."""
    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    held = {
        layer: (*get_layer_params_buffers(layer), set(layer._non_persistent_buffers_set)) for layer in model.modules()
    }
    try:
        for layer in held:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
        yield live
    finally:
        for layer, (parameters, buffers, non_persistent) in held.items():
            for name in get_layer_tensors(layer):
                delattr(layer, name)
            for name, parameter in parameters.items():
                layer.register_parameter(name, cast("torch.nn.Parameter", parameter))
            for name, buffer in buffers.items():
                layer.register_buffer(name, buffer, persistent=name not in non_persistent)


def reload_layers(
    model: Any, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], *, modules: Iterable[str]
) -> None:
    """Load whole checkpoint tensors through vLLM's loaders and kernels, into the given modules only.

    `tensors` must cover all that these modules hold.
    """
    wanted = set(modules)
    for name, module in model.named_modules():
        if name in wanted:
            initialize_layerwise_reload(module)
    model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
