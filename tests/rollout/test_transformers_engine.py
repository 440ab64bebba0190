"""The embedded engine: bits land exactly, tokens know their version, nothing unproved is served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sparsewire.rollout.engine import Generation, GenerationRequest, Placement
from sparsewire.rollout.transformers_engine import TransformersEngine
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.errors import ConfigError, EngineError, HandshakeError, SchemaMismatchError
from sparsewire.sync.trajectories.types import FinishReason, SamplingParams, VersionSpan
from sparsewire.sync.types import Dtype, Schema, TensorSpec, bits_of

Weights = dict[str, npt.NDArray[Any]]
OpenEngine = Callable[..., TransformersEngine]
Nudged = Callable[[Weights, int], Weights]
PatchesBetween = Callable[[Weights, Weights], list[TensorPatch]]

SECOND = timedelta(seconds=1)
PROMPTS = ("What is 12 + 34?", "What is the answer to 5 + 5? Answer with just the number.", "Hi")


def make_requests(
    engine: TransformersEngine, *, max_new_tokens: int = 16, temperature: float = 1.0
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=engine.encode_chat(prompt),
            sampling=SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens),
            seed=1000 + number,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def assert_same(ours: Generation, theirs: Generation) -> None:
    assert ours.completion_token_ids.tolist() == theirs.completion_token_ids.tolist()
    assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
    assert ours.finish_reason == theirs.finish_reason


class SteppedEngine(TransformersEngine):
    """A real engine that calls back after a given number of decode steps, in the middle of a batch."""

    num_steps = 0
    at_step = -1
    callback: Callable[[], None] | None = None

    def _choose(self, batch: Any) -> tuple[list[int], list[float]]:
        chosen = super()._choose(batch)
        self.num_steps += 1
        return chosen

    def _drop_finished(self, batch: Any) -> Any:
        if self.num_steps == self.at_step and self.callback is not None:
            self.callback()
        return super()._drop_finished(batch)


def test_applied_patches_are_bit_for_bit_a_freshly_loaded_model(
    open_engine: OpenEngine, tiny_weights: Weights, nudged: Nudged, patches_between: PatchesBetween
) -> None:
    new = nudged(tiny_weights, 1)
    patched, fresh = open_engine(tiny_weights), open_engine(new, version=1)
    before = patched.generate(make_requests(patched))
    patched.pause(timeout=SECOND)
    patched.apply(patches_between(tiny_weights, new), version=1)
    patched.resume()
    assert patched.version == 1
    assert patched.digest(new) == {name: tensor_digest(array) for name, array in new.items()}
    after = patched.generate(make_requests(patched))
    for ours, theirs in zip(after, fresh.generate(make_requests(fresh)), strict=True):
        assert_same(ours, theirs)
        assert ours.spans == (VersionSpan(version=1, start=0, stop=len(ours.completion_token_ids)),)
    assert [generation.logprobs.tobytes() for generation in after] != [
        generation.logprobs.tobytes() for generation in before
    ]


def test_applying_twice_changes_nothing_and_undoing_restores_every_bit(
    open_engine: OpenEngine, tiny_weights: Weights, nudged: Nudged, patches_between: PatchesBetween
) -> None:
    new = nudged(tiny_weights, 2)
    engine = open_engine(tiny_weights)
    forward, back = patches_between(tiny_weights, new), patches_between(new, tiny_weights)
    engine.apply(forward, version=1)
    once = engine.digest(new)
    engine.apply(forward, version=1)
    assert engine.digest(new) == once
    engine.apply(back, version=0)
    assert engine.digest(tiny_weights) == {name: tensor_digest(array) for name, array in tiny_weights.items()}


def test_signed_zeros_and_nan_payloads_arrive_exactly(
    open_engine: OpenEngine, tiny_weights: Weights, patches_between: PatchesBetween
) -> None:
    new = {name: array.copy() for name, array in tiny_weights.items()}
    strange = np.array([0x8000, 0x0000, 0x7FC1, 0xFF81, 0x7F80, 0x0001], np.uint16)
    bits_of(new["model.layers.1.mlp.up_proj.weight"])[: len(strange)] = strange
    engine = open_engine(tiny_weights)
    engine.apply(patches_between(tiny_weights, new), version=1)
    live = engine._model.model.layers[1].mlp.up_proj.weight.view(torch.int16).reshape(-1)[: len(strange)]
    assert live.numpy().view(np.uint16).tolist() == strange.tolist()
    assert engine.digest(new) == {name: tensor_digest(array) for name, array in new.items()}
    with pytest.raises(EngineError, match="not finite"):
        engine.generate(make_requests(engine))


def test_update_in_mid_generation_makes_two_exact_spans_and_continues_as_a_fresh_engine_would(
    open_engine: OpenEngine, tiny_weights: Weights, nudged: Nudged, patches_between: PatchesBetween
) -> None:
    new = nudged(tiny_weights, 3)
    old_only, fresh = open_engine(tiny_weights, version=4), open_engine(new, version=5)
    engine = open_engine(tiny_weights, version=4, kind=SteppedEngine)
    assert isinstance(engine, SteppedEngine)

    def update() -> None:
        engine.pause(timeout=SECOND)
        engine.apply(patches_between(tiny_weights, new), version=5)
        engine.resume()

    engine.at_step, engine.callback = 6, update
    requests = make_requests(engine)
    reference = old_only.generate(requests)
    assert all(len(generation.completion_token_ids) > 6 for generation in reference), "choose other seeds"
    mixed = engine.generate(requests)
    continued = fresh.generate(
        [
            GenerationRequest(
                request_id=request.request_id,
                prompt_token_ids=np.concatenate([request.prompt_token_ids, generation.completion_token_ids[:6]]),
                sampling=SamplingParams(temperature=1.0, max_new_tokens=10),
                seed=request.seed,
            )
            for request, generation in zip(requests, mixed, strict=True)
        ]
    )
    for ours, before, after in zip(mixed, reference, continued, strict=True):
        num_tokens = len(ours.completion_token_ids)
        assert ours.spans == (
            VersionSpan(version=4, start=0, stop=6),
            VersionSpan(version=5, start=6, stop=num_tokens),
        )
        assert ours.completion_token_ids[:6].tolist() == before.completion_token_ids[:6].tolist()
        assert ours.logprobs[:6].tobytes() == before.logprobs[:6].tobytes()
        assert ours.completion_token_ids[6:].tolist() == after.completion_token_ids.tolist()
        assert ours.logprobs[6:].tobytes() == after.logprobs.tobytes()
        assert ours.finish_reason == after.finish_reason


def test_label_alone_moves_between_steps_without_a_pause(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    plain = open_engine(tiny_weights)
    engine = open_engine(tiny_weights, kind=SteppedEngine)
    assert isinstance(engine, SteppedEngine)
    engine.at_step, engine.callback = 3, lambda: engine.apply((), version=1)
    for ours, theirs in zip(engine.generate(make_requests(engine)), plain.generate(make_requests(plain)), strict=True):
        assert_same(ours, theirs)
        assert [span.version for span in ours.spans] == [0, 1]


def test_apply_without_a_pause_in_mid_generation_is_refused(
    open_engine: OpenEngine, tiny_weights: Weights, nudged: Nudged, patches_between: PatchesBetween
) -> None:
    engine = open_engine(tiny_weights, kind=SteppedEngine)
    assert isinstance(engine, SteppedEngine)
    patches = patches_between(tiny_weights, nudged(tiny_weights, 4))
    engine.at_step, engine.callback = 2, lambda: engine.apply(patches, version=1)
    with pytest.raises(EngineError, match="pause it first"):
        engine.generate(make_requests(engine))


def test_pause_gives_up_at_its_deadline_and_leaves_the_engine_running(
    open_engine: OpenEngine, tiny_weights: Weights
) -> None:
    engine = open_engine(tiny_weights)
    inside, leave = threading.Event(), threading.Event()

    def long_step(*_: object) -> None:
        inside.set()
        assert leave.wait(30)

    handle = engine._model.register_forward_pre_hook(long_step)
    thread = threading.Thread(target=lambda: engine.generate(make_requests(engine, max_new_tokens=1)))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(EngineError, match=r"did not end within 0\.050 s"):
        engine.pause(timeout=timedelta(milliseconds=50))
    leave.set()
    thread.join(30)
    assert not thread.is_alive()
    handle.remove()
    assert len(engine.generate(make_requests(engine))) == len(PROMPTS)


def test_failed_apply_serves_nothing_until_weights_are_proved_again(
    open_engine: OpenEngine, tiny_weights: Weights, nudged: Nudged, patches_between: PatchesBetween
) -> None:
    new = nudged(tiny_weights, 5)
    engine, fresh = open_engine(tiny_weights), open_engine(new, version=1)
    patches = patches_between(tiny_weights, new)

    def broken() -> Iterator[TensorPatch]:
        yield from patches[: len(patches) // 2]
        raise ValueError("the 15th of 30 tensors")

    with pytest.raises(EngineError, match="the 15th of 30 tensors"):
        engine.apply(broken(), version=1)
    assert engine.version is None
    with pytest.raises(EngineError, match="no proved weights"):
        engine.generate(make_requests(engine))
    with pytest.raises(EngineError, match="load them whole"):
        engine.apply((), version=1)
    engine.apply(patches, version=1)
    assert engine.version == 1
    for ours, theirs in zip(engine.generate(make_requests(engine)), fresh.generate(make_requests(fresh)), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("position", [-1, 64])
def test_patch_outside_its_tensor_is_refused(open_engine: OpenEngine, tiny_weights: Weights, position: int) -> None:
    engine = open_engine(tiny_weights)
    number = sorted(tiny_weights).index("model.norm.weight")
    patch = TensorPatch(
        tensor=number,
        start=0,
        count=64,
        indices=np.array([position], np.int64),
        values=np.array([1], np.uint16),
        undo=None,
    )
    with pytest.raises(EngineError, match=r"model\.norm\.weight covers positions"):
        engine.apply([patch], version=1)
    assert engine.digest(["model.norm.weight"])["model.norm.weight"] == tensor_digest(tiny_weights["model.norm.weight"])


def test_tied_head_is_listed_as_tied_and_written_once(
    open_engine: OpenEngine, tiny_weights: Weights, schema_of: Callable[[Weights], Schema]
) -> None:
    engine = open_engine(tiny_weights)
    tied = [tensor for tensor in engine.describe() if tensor.placement is Placement.TIED]
    assert [(tensor.spec.name, tensor.shares_with) for tensor in tied] == [
        ("lm_head.weight", "model.embed_tokens.weight")
    ]
    for listed in ({"lm_head.weight"}, {"lm_head.weight", "model.embed_tokens.weight"}):
        weights = {name: array for name, array in tiny_weights.items() if "embed" not in name}
        weights |= dict.fromkeys(listed, tiny_weights["model.embed_tokens.weight"])
        other = open_engine()
        other.bind(schema_of(weights))
        other.load(weights, version=0)
        assert set(other.digest(listed).values()) == {tensor_digest(weights["lm_head.weight"])}
        assert_same(other.generate(make_requests(other))[0], engine.generate(make_requests(engine))[0])


def test_untied_head_has_a_place_of_its_own(
    open_engine: OpenEngine,
    tiny_model_writer: Callable[..., None],
    weights_reader: Callable[[Path], Weights],
    tiny_weights: Weights,
    schema_of: Callable[[Weights], Schema],
    tmp_path: Path,
) -> None:
    tiny_model_writer(tmp_path, tie_word_embeddings=False)
    weights = weights_reader(tmp_path)
    engine = open_engine(weights, directory=tmp_path)
    assert not [tensor for tensor in engine.describe() if tensor.placement is Placement.TIED]
    assert engine.digest(weights) == {name: tensor_digest(array) for name, array in weights.items()}
    with pytest.raises(HandshakeError, match=r"unmatched in the engine \(1\): lm_head.weight"):
        engine.bind(schema_of(tiny_weights))


def test_rotary_tables_are_derived(open_engine: OpenEngine) -> None:
    derived = {tensor.spec.name for tensor in open_engine().describe() if tensor.placement is Placement.DERIVED}
    assert "model.rotary_emb.inv_freq" in derived


def test_unproved_checkpoint_is_not_served(
    open_engine: OpenEngine, tiny_weights: Weights, schema_of: Callable[[Weights], Schema]
) -> None:
    engine = open_engine()
    assert engine.version is None
    with pytest.raises(EngineError, match="bind it"):
        engine.load(tiny_weights, version=0)
    engine.bind(schema_of(tiny_weights))
    with pytest.raises(EngineError, match="no proved weights"):
        engine.generate(make_requests(engine))
    assert engine.digest(tiny_weights) == {name: tensor_digest(array) for name, array in tiny_weights.items()}


def test_load_refuses_missing_and_misshapen_tensors_before_writing(
    open_engine: OpenEngine, tiny_weights: Weights
) -> None:
    engine = open_engine(tiny_weights)
    name = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(SchemaMismatchError, match="is missing"):
        engine.load({key: array for key, array in tiny_weights.items() if key != name}, version=1)
    with pytest.raises(SchemaMismatchError, match=r"\[2, 2\]"):
        engine.load({**tiny_weights, name: tiny_weights[name][:2, :2]}, version=1)
    assert engine.version == 0


def test_logprobs_are_those_of_the_sampling_distribution(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    engine = open_engine(tiny_weights)
    requests = make_requests(engine, temperature=0.7)
    for request, generation in zip(requests, engine.generate(requests), strict=True):
        ids = np.concatenate([request.prompt_token_ids, generation.completion_token_ids])
        with torch.inference_mode():
            logits = engine._model(input_ids=torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)).logits[0].float()
        num_prompt = len(request.prompt_token_ids)
        logprobs = torch.log_softmax(logits / 0.7, dim=-1)[num_prompt - 1 : -1]
        wanted = logprobs.gather(-1, torch.from_numpy(ids[num_prompt:].astype(np.int64)).unsqueeze(-1)).squeeze(-1)
        assert np.abs(wanted.numpy() - generation.logprobs).max() < 0.1, "bf16 kernels differ by batch shape only"


def test_sample_does_not_depend_on_the_others_in_its_batch(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    engine = open_engine(tiny_weights)
    ours = make_requests(engine, max_new_tokens=8)[0]

    def batch(prompt: str, seed: int) -> list[GenerationRequest]:
        other = GenerationRequest(
            request_id="other", prompt_token_ids=engine.encode_chat(prompt), sampling=ours.sampling, seed=seed
        )
        return [ours, other]

    first, second = engine.generate(batch("zzzzzzzz", 7)), engine.generate(batch("qqqqqqqq", 8))
    assert first[1].completion_token_ids.tolist() != second[1].completion_token_ids.tolist()
    assert_same(first[0], second[0])


def test_samples_of_one_prompt_share_its_computation_and_differ_by_seed(
    open_engine: OpenEngine, tiny_weights: Weights
) -> None:
    engine = open_engine(tiny_weights)
    shapes: list[tuple[int, ...]] = []
    handle = engine._model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    request = make_requests(engine, max_new_tokens=8)[0]
    requests = [
        GenerationRequest(
            request_id=str(seed), prompt_token_ids=request.prompt_token_ids, sampling=request.sampling, seed=seed
        )
        for seed in range(6)
    ]
    completions = {tuple(generation.completion_token_ids.tolist()) for generation in engine.generate(requests)}
    handle.remove()
    assert shapes[0] == (1, len(request.prompt_token_ids))
    assert shapes[1][0] <= 6
    assert len(completions) > 1


def test_completion_ends_at_any_end_token_or_at_the_limit(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    engine = open_engine(tiny_weights)
    base = make_requests(engine, max_new_tokens=40)[0]
    requests = [
        GenerationRequest(
            request_id=str(seed), prompt_token_ids=base.prompt_token_ids, sampling=base.sampling, seed=seed
        )
        for seed in range(64)
    ]
    generations = engine.generate(requests)
    stopped = [generation for generation in generations if generation.finish_reason is FinishReason.STOP]
    assert stopped, "choose more seeds"
    for generation in generations:
        ids = generation.completion_token_ids.tolist()
        assert not {0, 2} & set(ids[:-1])
        if generation.finish_reason is FinishReason.STOP:
            assert ids[-1] in (0, 2)
        else:
            assert len(ids) == 40
            assert ids[-1] not in (0, 2)


def test_closing_ends_the_batch_with_reason_abort(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    engine = open_engine(tiny_weights, kind=SteppedEngine)
    assert isinstance(engine, SteppedEngine)
    engine.at_step, engine.callback = 4, engine.close
    for generation in engine.generate(make_requests(engine)):
        assert generation.finish_reason is FinishReason.ABORT
        assert len(generation.completion_token_ids) == 4


def test_prompt_beyond_the_context_is_refused(open_engine: OpenEngine, tiny_weights: Weights) -> None:
    engine = open_engine(tiny_weights)
    request = make_requests(engine)[0]
    long = GenerationRequest(
        request_id="long", prompt_token_ids=np.ones(2048, np.int32), sampling=request.sampling, seed=0
    )
    with pytest.raises(EngineError, match="2048"):
        engine.generate([long])


def test_chat_format_round_trips(open_engine: OpenEngine) -> None:
    engine = open_engine()
    ids = engine.encode_chat("What is 1 + 2?")
    assert ids.dtype == np.int32
    assert engine.decode_text(ids) == "user\nWhat is 1 + 2?\nassistant\n"


def test_directory_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        TransformersEngine.open(tmp_path)


def test_model_of_another_dtype_is_refused_at_the_handshake(
    open_engine: OpenEngine, tiny_weights: Weights, schema_of: Callable[[Weights], Schema]
) -> None:
    schema = Schema(
        tuple(TensorSpec(name=spec.name, dtype=Dtype.F32, shape=spec.shape) for spec in schema_of(tiny_weights))
    )
    with pytest.raises(HandshakeError, match=r"is F32\[64\] in the run, model\.norm\.weight is BF16\[64\]"):
        open_engine().bind(schema)
