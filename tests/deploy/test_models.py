"""Names become model directories, or errors that say what would be one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from sparsewire.deploy.models import cache_directory, describe_missing_model, resolve_model
from sparsewire.sync.errors import ConfigError


def test_a_model_directory_is_returned_as_it_is(tiny_model: Path) -> None:
    assert resolve_model(str(tiny_model)) == tiny_model.resolve()
    assert describe_missing_model(str(tiny_model)) is None


@pytest.mark.parametrize(
    ("files", "wanted"), [([], "has no config.json"), (["config.json"], "has no *.safetensors weights")]
)
def test_a_directory_that_is_no_model_is_refused_with_the_reason(tmp_path: Path, files: list[str], wanted: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as refused:
        resolve_model(str(tmp_path))
    assert wanted in str(refused.value)


def test_a_name_that_is_nothing_is_refused_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        resolve_model("smolm2")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEWIRE_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path.resolve()
    monkeypatch.delenv("SPARSEWIRE_CACHE")
    assert cache_directory() == (Path.home() / ".cache" / "sparsewire").resolve()


@pytest.mark.slow
def test_the_packaged_model_is_converted_once_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory = resolve_model("smollm2")
    assert directory.parent == tmp_path.resolve() / "models"
    written = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= written.keys()
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name]
    assert resolve_model("smollm2") == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == written
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="bfloat16")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
