"""Every tensor lands in exactly one place, or the worker refuses with the whole list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsewire.rollout.engine import EngineTensor, Placement
from sparsewire.rollout.handshake import bare_name, canonical_name, handshake
from sparsewire.sync.errors import HandshakeError
from sparsewire.sync.types import Dtype, Schema, TensorSpec

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.norm.weight",
)


def spec(name: str, *, dtype: Dtype = Dtype.BF16, shape: tuple[int, ...] = (4, 8)) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def schema(names: Sequence[str]) -> Schema:
    return Schema.of([spec(name) for name in names])


def engine(names: Sequence[str], *, tied: bool = True, derived: bool = True) -> list[EngineTensor]:
    tensors = [EngineTensor(spec=spec(name), placement=Placement.MAPPED) for name in names]
    if tied:
        owner = next(name for name in names if "embed_tokens" in name)
        tensors.append(EngineTensor(spec=spec("lm_head.weight"), placement=Placement.TIED, shares_with=owner))
    if derived:
        tensors.append(EngineTensor(spec=spec("model.rotary_emb.inv_freq"), placement=Placement.DERIVED))
    return tensors


def wrap_everywhere(name: str) -> str:
    return "_orig_mod." + name.replace("layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.module.{name}",
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod."),
        lambda name: f"_fsdp_wrapped_module.{name.replace('model.', 'model._fsdp_wrapped_module.', 1)}",
        lambda name: name.removeprefix("model."),
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name.removeprefix('model.')}",
        lambda name: f"language_model.model.{name.removeprefix('model.')}",
        wrap_everywhere,
    ],
)
def test_names_that_mean_the_same_land_in_the_same_place(rename: Callable[[str], str]) -> None:
    run = schema([rename(name) for name in NAMES])
    binding = handshake(run, engine(NAMES))
    places = dict(zip((tensor.name for tensor in run), binding.places, strict=True))
    assert places == {rename(name): name for name in NAMES}
    assert binding.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert binding.derived == ("model.rotary_emb.inv_freq",)
    reverse = handshake(schema(NAMES), engine([rename(name) for name in NAMES]))
    assert sorted(reverse.places) == sorted(rename(name) for name in NAMES)


WRAPPERS = st.sampled_from(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"])


@given(st.data())
def test_wrappers_in_any_nesting_are_seen_through(data: st.DataObject) -> None:
    names = []
    for name in NAMES:
        parts: list[str] = []
        for part in name.split("."):
            parts += data.draw(st.lists(WRAPPERS, max_size=3))
            parts.append(part)
        names.append(".".join(parts))
    binding = handshake(schema(names), engine(NAMES))
    assert dict(binding.mapped) == dict(zip(names, NAMES, strict=True))


@pytest.mark.parametrize("listed", [(), ("lm_head.weight",), ("model.lm_head.weight",), ("_orig_mod.lm_head.weight",)])
def test_tied_head_may_be_listed_by_the_run_or_not(listed: tuple[str, ...]) -> None:
    run = schema([*NAMES, *listed])
    places = dict(zip((tensor.name for tensor in run), handshake(run, engine(NAMES)).places, strict=True))
    assert all(places[name] == "model.embed_tokens.weight" for name in listed)


def test_run_that_lists_only_the_head_of_a_tied_pair_fills_both() -> None:
    run = schema(["lm_head.weight", *NAMES[1:]])
    assert handshake(run, engine(NAMES)).places[0] == "model.embed_tokens.weight"


def test_tied_run_is_refused_by_an_untied_engine() -> None:
    with pytest.raises(HandshakeError, match=r"unmatched in the engine \(1\): lm_head.weight"):
        handshake(schema(NAMES), engine([*NAMES, "lm_head.weight"], tied=False))


def test_untied_run_lands_in_an_untied_engine() -> None:
    names = [*NAMES, "lm_head.weight"]
    binding = handshake(schema(names), engine(names, tied=False))
    assert set(binding.places) == set(names)
    assert binding.tied == ()


def test_one_extra_tensor_in_the_run_is_refused_with_the_list() -> None:
    with pytest.raises(HandshakeError) as caught:
        handshake(schema([*NAMES, "model.layers.2.mlp.up_proj.weight"]), engine(NAMES))
    message = str(caught.value)
    assert "unmatched in the run (1): model.layers.2.mlp.up_proj.weight" in message
    assert "unmatched in the engine (0): none" in message
    assert "mapped (5): model.embed_tokens.weight" in message
    assert "tied (1): lm_head.weight = model.embed_tokens.weight" in message
    assert "derived (1): model.rotary_emb.inv_freq" in message
    assert "frozen (0): none" in message


def test_one_missing_trainable_tensor_is_refused_with_the_list() -> None:
    with pytest.raises(HandshakeError, match=r"unmatched in the engine \(1\): model.norm.weight"):
        handshake(schema(NAMES[:-1]), engine(NAMES))


def test_frozen_tensor_may_be_missing_from_the_run_or_be_part_of_it() -> None:
    frozen = EngineTensor(spec=spec("model.vision.scale"), placement=Placement.FROZEN)
    assert handshake(schema(NAMES), [*engine(NAMES), frozen]).frozen == ("model.vision.scale",)
    run = schema([*NAMES, "model.vision.scale"])
    assert handshake(run, [*engine(NAMES), frozen]).frozen == ()


def test_derived_tensor_in_the_run_is_refused() -> None:
    with pytest.raises(HandshakeError, match=r"unmatched in the run \(1\): model.rotary_emb.inv_freq"):
        handshake(schema([*NAMES, "model.rotary_emb.inv_freq"]), engine(NAMES))


def test_differing_dtype_and_shape_are_refused_with_both_sides() -> None:
    run = Schema.of(
        [*(spec(name) for name in NAMES[:-2]), spec(NAMES[-2], dtype=Dtype.F32), spec(NAMES[-1], shape=(8, 4))]
    )
    with pytest.raises(HandshakeError) as caught:
        handshake(run, engine(NAMES))
    assert f"{NAMES[-2]} is F32[4, 8] in the run, {NAMES[-2]} is BF16[4, 8] in the engine" in str(caught.value)
    assert f"{NAMES[-1]} is BF16[8, 4] in the run" in str(caught.value)


def test_two_names_for_one_place_are_refused() -> None:
    with pytest.raises(
        HandshakeError, match=r"unmatched in the run \(2\): _orig_mod.model.norm.weight, model.norm.weight"
    ):
        handshake(schema([*NAMES, "_orig_mod.model.norm.weight"]), engine(NAMES))


def test_prefix_is_not_guessed_where_two_engine_tensors_would_fit() -> None:
    both = ["model.embed_tokens.weight", "model.norm.weight", "language_model.norm.weight"]
    with pytest.raises(HandshakeError, match=r"unmatched in the run \(1\): norm.weight"):
        handshake(schema(["model.embed_tokens.weight", "norm.weight"]), engine(both))
    exact = handshake(schema(both), engine(both))
    assert exact.places == ("language_model.norm.weight", "model.embed_tokens.weight", "model.norm.weight")


def test_names_are_reduced_as_documented() -> None:
    assert canonical_name("_orig_mod.model.layers.0._fsdp_wrapped_module.w") == "model.layers.0.w"
    assert bare_name("model.language_model.model.layers.0.w") == "layers.0.w"
    assert bare_name("model.vision_tower.model.layers.0.w") == "vision_tower.model.layers.0.w"
    assert bare_name("model") == "model"
