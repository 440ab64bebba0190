"""Finds out where each element of a checkpoint lives in a loaded model, from the model's own loaders.

`trace` runs `model.load_weights` once with every write to the model recorded instead of done. Loaders narrow, fuse and
shard by views and end in a copy of equal shape, so the strides of the copy's two sides say which box of a checkpoint
tensor lands in which box of runtime memory: fused projections, tensor-parallel shards, replicated heads, vocabulary
padding, tied embeddings, experts, block-scaled fp8 weights and their scales alike.

What does not fit that picture is opaque: a source that a loader transforms, a dtype that changes, a destination that
is no parameter or buffer, and (`verify`) any tensor that does not read back as the checkpoint has it, which is how
kernels that repack weights after loading show themselves. The dispatch mode is this thread's own; other threads must
not run the model meanwhile. Known limit: temporaries that depend on a source stay allocated until the trace ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsewire.rollout.storage import DTYPES
from sparsewire.rollout.vllm.layout import LayoutMap, Memory, Permutation, Segment, TensorLayout, flat_bits
from sparsewire.sync.types import TensorSpec


def trace(
    model: torch.nn.Module,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
    *,
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    live: Mapping[str, torch.Tensor] | None = None,
) -> tuple[LayoutMap, dict[str, torch.Tensor]]:
    """Find out where `load` puts the tensors of a checkpoint, without changing the model.

    Args:
        model: whose parameters and buffers are the only places that count.
        checkpoint: CPU tensors by checkpoint name; real ones, since some loaders look at values.
        load: the model's own `load_weights`.
        live: the tensors that the model computes with, by name, where it holds stand-ins for the time of the trace.

    Returns:
        The map, and the checkpoint's tensors by name for `verify`: views of what was passed where it is contiguous.
    """
    recorder = _Recorder(model, live=live)

    def handed_out() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint:
            yield name, recorder.add_source(name, tensor)

    with torch.no_grad(), recorder:
        load(handed_out())
    return LayoutMap(recorder.layouts()), recorder.sources


def verify(
    layout: LayoutMap,
    checkpoint: Mapping[str, torch.Tensor],
    *,
    permutations: Callable[[Memory], Sequence[Permutation]] = lambda _: (),
) -> None:
    """Read every tensor back through the map, and make opaque what differs from the checkpoint the model was loaded from.

    A memory that differs is tried with each order of elements that `permutations` proposes; one that fits it all stays.
    """
    failed = {name for name in layout.tensors if not _reads_back(layout, name, checkpoint)}
    by_memory: defaultdict[int, set[str]] = defaultdict(set)
    memories: dict[int, Memory] = {}
    for name, tensor in layout.tensors.items():
        for segment in tensor.segments:
            by_memory[id(segment.memory)].add(name)
            memories[id(segment.memory)] = segment.memory
    for key, memory in memories.items():
        if not by_memory[key] & failed:
            continue
        for permutation in permutations(memory):
            memory.permutation = permutation
            if all(_reads_back(layout, name, checkpoint) for name in by_memory[key]):
                failed -= by_memory[key]
                break
            memory.permutation = None
    for name in failed:
        places = ", ".join(sorted({segment.memory.name for segment in layout.tensors[name].segments}))
        layout.tensors[name].opaque = f"{places} does not read back as the checkpoint has it (repacked by a kernel)"
        layout.tensors[name].segments = ()


def _reads_back(layout: LayoutMap, name: str, checkpoint: Mapping[str, torch.Tensor]) -> bool:
    tensor = layout.tensors[name]
    if tensor.opaque is not None or not tensor.segments:
        return True
    bits = flat_bits(checkpoint[name])
    return all(segment.digest() == segment.digest_of(bits) for segment in tensor.segments)


_Label = str | int
"""What a temporary was computed from: the name of a checkpoint tensor, or the identity of a runtime storage."""


def _identity(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; views share it."""
    return int(tensor.untyped_storage()._cdata)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies into the model instead of doing them, and follows whatever else is computed from a source."""

    def __init__(self, model: torch.nn.Module, *, live: Mapping[str, torch.Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live
        self.sources: dict[str, torch.Tensor] = {}
        self._name_of: dict[int, str] = {}
        self._runtime: dict[int, str] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._modules: defaultdict[int, set[str]] = defaultdict(set)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._named = dict(named)
        for name, tensor in named:
            self._runtime.setdefault(_identity(tensor), name)
            self._tensors.setdefault(_identity(tensor), tensor)
            self._modules[_identity(tensor)].add(name.rpartition(".")[0])
        self._memories: dict[tuple[int, int], Memory] = {}
        self._labels: dict[int, frozenset[_Label]] = {}
        self._kept: list[torch.Tensor] = []
        self._segments: defaultdict[str, dict[object, Segment]] = defaultdict(dict)
        self._held_by: defaultdict[str, set[int]] = defaultdict(set)
        self._opaque: dict[str, str] = {}
        self._computed: dict[int, str] = {}

    def add_source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same elements behind a storage of their own, by which views of them are recognised."""
        own = tensor.detach().cpu().contiguous()
        if own.dtype in DTYPES and own.numel():
            shape = own.shape
            own = torch.from_numpy(flat_bits(own).view(f"<i{own.element_size()}")).view(own.dtype).reshape(shape)
        else:
            own = own.clone()
            self._opaque[name] = f"its elements are {tensor.dtype}{list(tensor.shape)}"
        self._name_of[_identity(own)] = name
        self.sources[name] = own
        return own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        into_model = [tensor for tensor in written if _identity(tensor) in self._runtime]
        if not into_model:
            return self._follow(func, args, kwargs, written)
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
            return args[0]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        constant = func.overloadpacket in (torch.ops.aten.fill_, torch.ops.aten.zero_)
        for tensor in into_model:
            labels = frozenset().union(*(self._labels_of(leaf) for leaf in read if leaf is not tensor))
            # Values that no checkpoint decides, such as zeroed padding, are as the first load left them.
            if labels or not constant:
                self._compute(tensor, labels, f"its loader changes {self._runtime[_identity(tensor)]} by {func}")
        return into_model[0]

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        labels = frozenset().union(*(self._labels_of(leaf) for leaf in read))
        result = func(*args, **kwargs)
        if labels:
            for tensor in (*tree_leaves(result), *written):
                if not isinstance(tensor, torch.Tensor):
                    continue
                identity = _identity(tensor)
                if identity not in self._runtime and identity not in self._name_of:
                    self._labels[identity] = self._labels.get(identity, frozenset()) | labels
                    self._kept.append(tensor)
        return result

    def _labels_of(self, tensor: torch.Tensor) -> frozenset[_Label]:
        identity = _identity(tensor)
        if identity in self._runtime:
            return frozenset({identity})
        if identity in self._name_of:
            return frozenset({self._name_of[identity]})
        return self._labels.get(identity, frozenset())

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._name_of.get(_identity(source))
        if name is None:
            if labels := self._labels_of(source):
                self._compute(target, labels, "its loader transforms it before copying it")
            return
        base = self.sources[name]
        self._held_by[name].add(_identity(target))
        if source.dtype != target.dtype:
            problem = f"the checkpoint has {source.dtype}, {self._runtime[_identity(target)]} is {target.dtype}"
        elif source.dtype != base.dtype or source.numel() != target.numel() or target.dtype not in DTYPES:
            problem = "its loader reinterprets or repeats it"
        elif (place := self._place(target)) is None:
            problem = (
                f"{self._runtime[_identity(target)]} has another shape, type or order in the kernel than in the loader"
            )
        else:
            segment = _segment(*place, target, source.reshape(target.shape))
            if segment is not None:
                self._segments[name].setdefault((segment.target_key, segment.key), segment)
                return
            problem = "its loader copies it in a way that is not a box of memory"
        self._compute(target, frozenset({name}), problem)

    def _compute(self, target: torch.Tensor, labels: frozenset[_Label], reason: str) -> None:
        """Note that `target` holds something computed: neither it nor what it was computed from can be written."""
        self._computed.setdefault(_identity(target), reason)
        for label in labels:
            if isinstance(label, str):
                self._opaque.setdefault(label, reason)
                self._held_by[label].add(_identity(target))
            else:
                self._computed.setdefault(label, reason)

    def _place(self, target: torch.Tensor) -> tuple[Memory, int] | None:
        """Return the live memory behind a view of a parameter, and where in it the view begins; None if it has no place."""
        name, known = self._runtime[_identity(target)], self._tensors[_identity(target)]
        live = known if self._live is None else self._live.get(name)
        if live is None or (live.shape, live.dtype, live.stride()) != (known.shape, known.dtype, known.stride()):
            return None
        key = (_identity(live), live.element_size())
        if key not in self._memories:
            self._memories[key] = Memory(name=name, tensor=live)
        return self._memories[key], int(target.storage_offset() - known.storage_offset() + live.storage_offset())

    def layouts(self) -> dict[str, TensorLayout]:
        """Return what was found for every source, in order of arrival."""
        layouts: dict[str, TensorLayout] = {}
        owners: dict[object, str] = {}
        aliases = self._aliases()
        for name, tensor in self.sources.items():
            segments = tuple(self._segments[name].values())
            reason = self._opaque.get(name) or next(
                (self._computed[place] for place in self._held_by[name] if place in self._computed), None
            )
            places = frozenset(segment.target_key for segment in segments)
            owner = owners.setdefault(places, name) if places else aliases.get(name, name)
            modules: set[str] = set().union(*(self._modules[place] for place in self._held_by[name]))
            layouts[name] = TensorLayout(
                spec=TensorSpec(name=name, dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape)),
                segments=() if reason else segments,
                opaque=reason,
                shares_with=None if owner == name else owner,
                module_names=frozenset(modules),
                aliases=tuple(alias for alias, of in aliases.items() if of == name and alias not in self.sources),
            )
        return layouts

    def _aliases(self) -> dict[str, str]:
        """Return other names under which the model holds a whole tensor, such as a tied head, each with the tensor's name."""
        holder: dict[int, str] = {}
        for name, segments in self._segments.items():
            for segment in segments.values():
                if segment.num_elements == len(segment.memory.flat):
                    holder.setdefault(id(segment.memory), name)
        memory_of = {place: memory for (place, _), memory in self._memories.items()}
        everything = self._live if self._live is not None else self._named
        found: dict[str, str] = {}
        for alias, tensor in everything.items():
            memory = memory_of.get(_identity(tensor))
            if memory is not None and id(memory) in holder and alias != holder[id(memory)]:
                found[alias] = holder[id(memory)]
        return found


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to, by its schema."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _segment(memory: Memory, offset: int, target: torch.Tensor, source: torch.Tensor) -> Segment | None:
    """Return the boxes of a copy in their simplest form; None when positions would not be unique."""
    dims = [
        (source.stride(number), extent, target.stride(number))
        for number, extent in enumerate(target.shape)
        if extent > 1
    ]
    dims.sort(reverse=True)
    merged: list[tuple[int, int, int]] = []
    for stride, extent, target_stride in dims:
        if merged and merged[-1][0] == stride * extent and merged[-1][2] == target_stride * extent:
            _, outer, _ = merged.pop()
            merged.append((stride, outer * extent, target_stride))
        else:
            merged.append((stride, extent, target_stride))
    merged = merged or [(1, 1, 1)]
    reach = 0
    for stride, extent, _ in reversed(merged):
        if stride <= reach:
            return None
        reach += stride * (extent - 1)
    reach = 0
    for _, extent, target_stride in sorted(merged, key=lambda dim: dim[2]):
        if target_stride <= reach:
            return None
        reach += target_stride * (extent - 1)
    return Segment(
        memory=memory,
        source_offset=int(source.storage_offset()),
        target_offset=offset,
        extents=tuple(extent for _, extent, _ in merged),
        source_strides=tuple(stride for stride, _, _ in merged),
        target_strides=tuple(stride for _, _, stride in merged),
    )
