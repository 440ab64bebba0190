"""Places every tensor of the run in the engine before the first version, or refuses with the whole list.

Pure. `handshake` is called by the worker loop and by engines with the run's schema and the engine's own description;
the `Binding` it returns says where each tensor of the schema lands. Names may differ in two harmless ways: modules
that training wraps around others (`_orig_mod`, `_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, `module`) in any
nesting, and leading `model.` / `language_model.` prefixes, as long as exactly one tensor on each side is left for the
bare name. A tied head may be listed by either side, by both, or by neither. Everything else refuses: a trainable
tensor left over on either side, another dtype or shape, or two names for one place.

Known limit: that a run which lists both ends of a tied pair really keeps them equal cannot be seen in names; the
digest audit after each apply finds it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sparsewire.rollout.engine import EngineTensor, Placement
from sparsewire.sync.block_fp8 import SCALE_SUFFIX
from sparsewire.sync.errors import HandshakeError
from sparsewire.sync.types import Dtype, Schema, TensorSpec

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"})
_PREFIXES = frozenset({"model", "language_model"})
_MAX_LISTED = 40


def canonical_name(name: str) -> str:
    """Return `name` without the modules that training wraps around others."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def bare_name(name: str) -> str:
    """Return the canonical name without its leading `model.` and `language_model.` prefixes."""
    parts = canonical_name(name).split(".")
    while len(parts) > 1 and parts[0] in _PREFIXES:
        parts.pop(0)
    return ".".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where each tensor of the run lands."""

    places: tuple[str, ...]
    """By number in the schema: name of the engine tensor whose storage holds it (of a tied pair, the one that owns it)."""
    mapped: tuple[tuple[str, str], ...]
    """Pairs (name in the run, name in the engine) that differ in nothing but the name."""
    tied: tuple[tuple[str, str], ...]
    """Pairs (engine tensor, engine tensor whose storage it shares)."""
    frozen: tuple[str, ...]
    """Engine tensors that the run does not train."""
    derived: tuple[str, ...]
    """Engine tensors that the engine computes itself."""

    def __str__(self) -> str:
        return (
            f"{len(self.mapped)} tensors mapped, {len(self.tied)} tied, {len(self.frozen)} frozen, "
            f"{len(self.derived)} derived, 0 unmatched"
        )


def handshake(schema: Schema, tensors: Sequence[EngineTensor]) -> Binding:
    """Place every tensor of `schema` in exactly one of `tensors`.

    Raises:
        HandshakeError: something does not fit; the message lists mapped, tied, frozen, derived and unmatched tensors
            of both sides, and differing dtypes and shapes.
    """
    by_name = {tensor.spec.name: tensor for tensor in tensors}
    pairs = _pair([spec.name for spec in schema], list(by_name))
    roots = {name: _owner(name, by_name) for name in by_name}

    mapped = [(ours, theirs) for ours, theirs in pairs.items() if by_name[theirs].placement is not Placement.DERIVED]
    held = {roots[theirs] for _, theirs in mapped}
    tied = [(name, roots[name]) for name, tensor in by_name.items() if tensor.placement is Placement.TIED]
    frozen = [
        name for name, tensor in by_name.items() if tensor.placement is Placement.FROZEN and name not in pairs.values()
    ]
    derived = [name for name, tensor in by_name.items() if tensor.placement is Placement.DERIVED]
    placed = dict(mapped)
    run_unmatched = [spec.name for spec in schema if spec.name not in placed]
    engine_unmatched = [
        name for name, tensor in by_name.items() if tensor.placement is Placement.MAPPED and name not in held
    ]
    differing = [
        f"{ours} is {_kind(schema[schema.index[ours]])} in the run, {theirs} is {_kind(by_name[theirs].spec)} in the engine"
        for ours, theirs in mapped
        if _kind(schema[schema.index[ours]]) != _kind(by_name[theirs].spec)
    ]
    if run_unmatched or engine_unmatched or differing:
        sections: Mapping[str, Sequence[str]] = {
            "mapped": [f"{ours} -> {theirs}" if ours != theirs else ours for ours, theirs in mapped],
            "tied": [f"{name} = {owner}" for name, owner in tied],
            "frozen": frozen,
            "derived": derived,
            "unmatched in the run": run_unmatched,
            "unmatched in the engine": engine_unmatched,
            "differing": differing,
        }
        report = "\n".join(f"  {title} ({len(items)}): {_listed(items)}" for title, items in sections.items())
        raise HandshakeError(
            f"the engine cannot place every tensor of the run, so no version will be loaded:\n{report}\n"
            f"  {_remedy(schema, by_name)}"
        )
    return Binding(
        places=tuple(roots[placed[spec.name]] for spec in schema),
        mapped=tuple(mapped),
        tied=tuple(tied),
        frozen=tuple(frozen),
        derived=tuple(derived),
    )


def _remedy(schema: Schema, by_name: Mapping[str, EngineTensor]) -> str:
    """Return what to do when the run's tensors do not fit."""
    scales = [spec.name + SCALE_SUFFIX for spec in schema if spec.dtype is Dtype.F8_E4M3]
    if any(name in schema.index and name not in by_name for name in scales):
        return (
            "the run publishes block-fp8 weights with scales, and this engine computes without scales: serve the run "
            'with an engine for block-fp8 checkpoints (vLLM), or start a run with view = "bf16" in the learner\'s '
            "configuration"
        )
    return "serve the model that the run trains, or publish exactly the tensors that the engine lists"


def _pair(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Pair names by canonical form, then what is left by bare form, each only where it is unambiguous."""
    pairs: dict[str, str] = {}
    for form in (canonical_name, bare_name):
        taken = set(pairs.values())
        left_ours = _unique_by(form, (name for name in ours if name not in pairs))
        left_theirs = _unique_by(form, (name for name in theirs if name not in taken))
        pairs |= {name: left_theirs[key] for key, name in left_ours.items() if key in left_theirs}
    crowded = {place for place, count in Counter(pairs.values()).items() if count > 1}
    return {name: pairs[name] for name in ours if name in pairs and pairs[name] not in crowded}


def _unique_by(form: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        found[form(name)].append(name)
    return {key: members[0] for key, members in found.items() if len(members) == 1}


def _owner(name: str, by_name: Mapping[str, EngineTensor]) -> str:
    tensor = by_name[name]
    if tensor.placement is not Placement.TIED:
        return name
    if tensor.shares_with is None or tensor.shares_with not in by_name:
        raise HandshakeError(f"engine tensor {name} is tied to {tensor.shares_with}, which the engine does not list")
    return tensor.shares_with


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _listed(items: Sequence[str]) -> str:
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return (", ".join(items[:_MAX_LISTED]) + more) or "none"
