"""The `sparsewire` weight-transfer backend in every rank of a vLLM engine, versions 0.25 to 0.33.

A user adds `--weight-transfer-config '{"backend":"sparsewire"}'` and nothing else. `init_weight_transfer_engine` traces
where the checkpoint's tensors live, proves that by reading them back, and reports it; `update_weights` then carries out
one request of `exchange.py` after another. Weights come by file, and each rank takes its own share.

A request that names a report never raises: its outcome, good or bad, is the report, so that all ranks stay in step and
the driver decides. Without a report errors raise, and vLLM answers with them. `path`, `sha256`, `base_version` and
`target_version` alone are enough to check, stage and apply a patch file in one go.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader

from sparsewire.rollout.storage import DTYPES
from sparsewire.rollout.vllm import cpu_layouts
from sparsewire.rollout.vllm.exchange import Action, digests_to_json, failure, tensor_to_json, write_report
from sparsewire.rollout.vllm.layout import LayoutMap
from sparsewire.rollout.vllm.rank import RankWeights
from sparsewire.rollout.vllm.reload import loadable, reload_layers
from sparsewire.rollout.vllm.trace import trace, verify
from sparsewire.sync.errors import ConfigError, SparsewireError
from sparsewire.sync.types import Bits, Dtype

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in DTYPES.items()}


@dataclass
class SparsewireInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What `init_weight_transfer_engine` may say."""

    report: str | None = None
    """Where ranks describe what they hold."""
    names: str | None = None
    """JSON file: for each tensor number of the run, the checkpoint tensor that it means."""


@dataclass
class SparsewireUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `update_weights` may say; which fields count depends on `action`."""

    action: str = Action.APPLY
    path: str | None = None
    """Patch file, or for `load` the file of locations."""
    sha256: str | None = None
    """The patch file's own hash, in hex."""
    base_version: int | None = None
    target_version: int | None = None
    locations: str | None = None
    """Where whole tensors are, for those that cannot be written in place."""
    names: list[str] = field(default_factory=list)
    """Tensors to digest; none means the elements that are staged."""
    timeout_seconds: float = 600.0
    report: str | None = None


class SparsewireTransferEngine(WeightTransferEngine[SparsewireInitInfo, SparsewireUpdateInfo]):  # type: ignore[misc]
    """One rank's end of the backend; see the module."""

    init_info_cls = SparsewireInitInfo
    update_info_cls = SparsewireUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = int(vllm_config.parallel_config.rank)
        self._weights: RankWeights | None = None

    # vLLM's lifecycle.

    def init_transfer_engine(self, init_info: SparsewireInitInfo) -> None:
        """Find out where the checkpoint's tensors live, once; bind their numbers when told; describe them."""

        def describe() -> Mapping[str, Any]:
            if self._weights is None:
                self._weights = self._attach()
            if init_info.names is not None:
                self._weights.bind(json.loads(Path(init_info.names).read_text()))
            tensors = self._weights.describe() if init_info.names is None else []
            return {"version": self._weights.version, "tensors": [tensor_to_json(tensor) for tensor in tensors]}

        self._answer(init_info.report, describe)

    def start_weight_update(self) -> None:
        """Nothing to do: requests carry all that they need."""

    def finish_weight_update(self) -> None:
        """Nothing to do: weights are written in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Carry out one request, and wait for the device where there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SparsewireUpdateInfo) -> None:
        """Carry out one request."""
        if update_info.action == Action.STAGE and update_info.report is not None:
            report = update_info.report

            def done(error: SparsewireError | None) -> None:
                write_report(report, rank=self._rank, answer={} if error is None else failure(error))

            try:
                self._stage(update_info, done)
            except SparsewireError as error:
                done(error)
            return
        self._answer(update_info.report, lambda: self._carry_out(update_info))

    def shutdown(self) -> None:
        """Keep everything: a driver that comes back finds the weights and their version as they are."""

    @staticmethod
    def trainer_send_weights(*_args: Any, **_kwargs: Any) -> None:
        """Refuse: versions up to 0.27 demand this method, but weights come from a publisher.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the sparsewire backend takes weights from a store or weight service: run `sparsewire agent`")

    # Requests.

    def _answer(self, report: str | None, work: Any) -> None:
        if report is None:
            work()
            return
        try:
            answer = work()
        except SparsewireError as error:
            logger.warning("rank %d: %s", self._rank, error)
            answer = failure(error)
        except Exception as error:  # the edge of a request: the driver must learn of it, and other ranks wait
            logger.exception("rank %d failed", self._rank)
            answer = failure(error)
        write_report(report, rank=self._rank, answer=answer)

    def _stage(self, info: SparsewireUpdateInfo, done: Any) -> None:
        path, sha256, base_version, target_version = _patch(info)
        self._attached.stage(
            path=path,
            sha256=sha256,
            base_version=base_version,
            target_version=target_version,
            locations=None if info.locations is None else Path(info.locations),
            done=done,
        )

    def _carry_out(self, info: SparsewireUpdateInfo) -> Mapping[str, Any]:
        weights = self._attached
        match Action(info.action):
            case Action.STAGE | Action.APPLY:
                path, sha256, base_version, target_version = _patch(info)
                if info.report is None:
                    self._stage(info, lambda _: None)
                parts = weights.apply(
                    path=path,
                    sha256=sha256,
                    base_version=base_version,
                    target_version=target_version,
                    deadline=time.monotonic() + info.timeout_seconds,
                )
                return {"version": weights.version, "digests": digests_to_json(parts)}
            case Action.UNDO:
                parts = weights.undo(base_version=_number(info.base_version, "base_version"))
                return {"version": weights.version, "digests": digests_to_json(parts)}
            case Action.DIGEST:
                parts = weights.digest(info.names) if info.names else weights.digest_staged()
                return {"version": weights.version, "digests": digests_to_json(parts)}
            case Action.LOAD:
                weights.load(
                    locations=Path(_text(info.path, "path")), version=_number(info.target_version, "target_version")
                )
            case Action.LABEL:
                weights.label(_number(info.target_version, "target_version"))
            case Action.WITHDRAW:
                weights.label(None)
        return {"version": weights.version}

    @property
    def _attached(self) -> RankWeights:
        if self._weights is None:
            self._weights = self._attach()
        return self._weights

    # The model.

    def _attach(self) -> RankWeights:
        if getattr(self.model_config, "use_mla", False):
            raise ConfigError(
                f"{self.model_config.model} keeps matrices that are derived from its weights (multi-head latent "
                "attention), which cannot be updated in place yet: serve another model"
            )
        started = time.monotonic()
        loader = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise ConfigError(
                f"load format {self.vllm_config.load_config.load_format} cannot be read a second time, which finding out "
                "where weights live needs: serve a safetensors checkpoint"
            )
        with loadable(self.model) as live:
            checkpoint = loader.get_all_weights(self.model_config, self.model)
            load: Any = self.model.load_weights
            layout, sources = trace(self.model, checkpoint, load=load, live=live)
        verify(layout, sources, permutations=cpu_layouts.memory_permutations(self.model))
        self._log(layout, time.monotonic() - started)
        return RankWeights(layout=layout, load_dense=self._load_dense(layout))

    def _log(self, layout: LayoutMap, seconds: float) -> None:
        opaque = {name: tensor.opaque for name, tensor in layout.tensors.items() if tensor.opaque is not None}
        logger.info("rank %d: %d tensors mapped in %.3f s", self._rank, len(layout.tensors) - len(opaque), seconds)
        for name, reason in opaque.items():
            logger.warning("tensor %s is reloaded whole, with its layer, whenever it changes: %s", name, reason)

    def _load_dense(self, layout: LayoutMap) -> Any:
        def load(tensors: Mapping[str, Bits], modules: Iterable[str]) -> None:
            def handed_out() -> Iterator[tuple[str, torch.Tensor]]:
                for name, bits in tensors.items():
                    spec = layout.tensors[name].spec
                    flat = torch.from_numpy(bits.view(f"<i{bits.itemsize}"))
                    yield name, flat.view(_TORCH_DTYPES[Dtype(spec.dtype)]).reshape(spec.shape)

            with torch.device(self.device), torch.no_grad():
                reload_layers(self.model, self.model_config, handed_out(), modules=modules)

        return load


def _patch(info: SparsewireUpdateInfo) -> tuple[Path, str, int, int]:
    return (
        Path(_text(info.path, "path")),
        _text(info.sha256, "sha256"),
        _number(info.base_version, "base_version"),
        _number(info.target_version, "target_version"),
    )


def _text(value: object, field_name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"update_info needs {field_name} as text, it has {value!r}")
    return value


def _number(value: object, field_name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"update_info needs {field_name} as an integer, it has {value!r}")
    return value
