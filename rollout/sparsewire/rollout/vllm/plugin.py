"""Makes any vLLM know the `sparsewire` weight-transfer backend: the entry point of group `vllm.general_plugins`.

vLLM calls `register` in every process it starts (server, engine core, each rank), whether or not the backend is used,
so it must stay cheap, change nothing for others, and be harmless when called again.
"""

from __future__ import annotations

import logging
import re

from sparsewire.sync.errors import ConfigError

logger = logging.getLogger(__name__)

BACKEND = "sparsewire"
"""Its name in `--weight-transfer-config '{"backend":"sparsewire"}'`."""

OLDEST = (0, 25)
NEWEST_TRIED = (0, 33)


def check_version(version: str) -> None:
    """Refuse a vLLM whose weight-transfer interface this backend does not speak.

    Raises:
        ConfigError: it is too old, or its version cannot be read.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"vLLM calls its version {version!r}, which cannot be compared: install a release")
    number = (int(found[1]), int(found[2]))
    if number < OLDEST:
        raise ConfigError(
            f"vLLM {version} is too old for the {BACKEND} backend: install {OLDEST[0]}.{OLDEST[1]} or newer "
            f"(tried up to {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]})"
        )
    if number > NEWEST_TRIED:
        logger.warning(
            "vLLM %s is newer than what the %s backend was tried with (%d.%d)", version, BACKEND, *NEWEST_TRIED
        )


def register() -> None:
    """Register the backend with this process's vLLM; one that is too old is left alone, with an error in the log."""
    import vllm
    from vllm.platforms import current_platform

    try:
        check_version(vllm.__version__)
    except ConfigError as error:
        logger.error("%s", error)
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "sparsewire.rollout.vllm.transfer", "SparsewireTransferEngine"
        )
    if current_platform.is_cpu():
        from sparsewire.rollout.vllm import cpu_layouts

        cpu_layouts.install(wanted=_is_configured)


def _is_configured() -> bool:
    """Tell whether the model being loaded belongs to an engine with this backend."""
    from vllm.config import get_current_vllm_config

    try:
        config = get_current_vllm_config().weight_transfer_config
    except AssertionError:
        return False
    return config is not None and config.backend == BACKEND
