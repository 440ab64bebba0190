"""The embedded engine: a Hugging Face causal language model whose weights change bit by bit between decode steps.

Implements `Engine` in process, on the CPU or unchanged on a GPU. A batch is generated with one KV cache; the gate is
taken for each step, so `pause` waits for at most one of them. When weights changed under a batch, its cache is
computed again from prompt and completion so far, so what follows is what a fresh engine with the new weights would
make of the same prefix; the spans say which version made which token. Without proved weights nothing is served:
`version` is None from the first bit written until the last, and stays None when that fails.

Known limits: rows of a batch share matrix products, so on some kernels the last bits of a log-probability depend on
the batch's size; `encode_chat` knows one user message.

Shapes: B rows (requests in flight), U distinct prefixes, T positions, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import Counter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from sparsewire.rollout.change import Change
from sparsewire.rollout.engine import EngineTensor, Generation, GenerationRequest, Placement
from sparsewire.rollout.gate import StepGate
from sparsewire.rollout.handshake import Binding, handshake
from sparsewire.rollout.proof import digest_of
from sparsewire.rollout.sampling import choose_tokens, uniform_at
from sparsewire.rollout.storage import LiveTensor
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import ZERO, TensorDigest
from sparsewire.sync.errors import ConfigError, EngineError, SchemaMismatchError
from sparsewire.sync.probe import ProbeSequence
from sparsewire.sync.trajectories.types import FinishReason, VersionSpan
from sparsewire.sync.types import Dtype, Schema, bits_of

CLOSE_TIMEOUT = timedelta(seconds=60)
"""How long `close` waits for the decode step in progress."""

_RECOMPUTED = Counter(
    "sparsewire_engine_recomputed_tokens_total", "Tokens whose cache entries were computed again after an update."
)


@dataclass(slots=True, kw_only=True)
class _Row:
    """One request in flight."""

    request: GenerationRequest
    limit: int
    """Completion tokens at most."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """Position of the next token in prompt plus completion."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def prefix(self) -> npt.NDArray[np.int32]:
        """Prompt and completion so far."""
        return np.concatenate([self.request.prompt_token_ids, np.array(self.tokens, np.int32)])

    def append(self, token: int, logprob: float, version: int, eos_ids: frozenset[int]) -> None:
        at = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        start = at
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, stop=at + 1))
        if token in eos_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.limit:
            self.finish_reason = FinishReason.LENGTH

    def result(self) -> Generation:
        return Generation(
            request_id=self.request.request_id,
            completion_token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            spans=tuple(self.spans),
            finish_reason=self.finish_reason or FinishReason.ABORT,
        )


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Rows that are not finished, and their KV cache under the weights of `epoch`."""

    rows: list[_Row]
    cache: DynamicCache
    mask_BT: torch.Tensor  # noqa: N815 - shape suffix
    logits_BV: torch.Tensor  # noqa: N815 - shape suffix
    epoch: int


class TransformersEngine:
    """Samples from a Hugging Face causal language model; `open` one, `bind` it, `load` weights, `generate`."""

    def __init__(
        self, *, model: Any, tokenizer: Any, eos_ids: frozenset[int], device: torch.device, holds_checkpoint: bool
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._model.get_output_embeddings().register_forward_pre_hook(_make_contiguous)
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._device = device
        self._gate = StepGate()
        self._generating = threading.Lock()
        self._version: int | None = None
        self._epoch = 0
        self._schema: Schema | None = None
        self._places: tuple[LiveTensor, ...] = ()
        self._live: dict[str, LiveTensor] = {}
        self._tensors: list[EngineTensor] = []
        self._list_tensors(holds_checkpoint=holds_checkpoint)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        load_weights: bool = True,
    ) -> Self:
        """Build the model of a Hugging Face directory, in eval mode, without touching any network.

        With `load_weights` the checkpoint's weights are read; they are not proved, so `version` is None all the same,
        but tensors that the run does not train keep them. Without it every tensor must come by `load`.

        Raises:
            ConfigError: the directory holds no usable model, tokenizer or chat template, or the device is not there.
        """
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} has no config.json: give the path of a Hugging Face model directory")
        disable_progress_bar: Any = transformers_logging.disable_progress_bar
        disable_progress_bar()
        try:
            place = torch.device(device)
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            if load_weights:
                model = AutoModelForCausalLM.from_pretrained(
                    directory, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
                )
            else:
                from_config: Any = AutoModelForCausalLM.from_config
                model = from_config(config, dtype=dtype)
            cast("torch.nn.Module", model).to(place)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(f"the model in {directory} cannot be loaded on {device}: {error}") from error
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {directory} has no chat template: use an instruction-tuned model")
        return cls(
            model=model,
            tokenizer=tokenizer,
            eos_ids=_eos_ids(model, tokenizer),
            device=place,
            holds_checkpoint=load_weights,
        )

    def _list_tensors(self, *, holds_checkpoint: bool) -> None:
        checkpointed = set(self._model.state_dict(keep_vars=True))
        trainable = dict(self._model.named_parameters(remove_duplicate=False))
        everything = trainable | dict(self._model.named_buffers(remove_duplicate=False))
        owners: dict[tuple[int, int], str] = {}
        for name, tensor in everything.items():
            live = LiveTensor(name=name, tensor=tensor)
            owner = owners.setdefault(live.storage, name) if tensor.numel() else name
            if name not in trainable and name not in checkpointed:
                placement = Placement.DERIVED
            elif owner != name:
                placement = Placement.TIED
            elif name in trainable or not holds_checkpoint:
                placement = Placement.MAPPED
            else:
                placement = Placement.FROZEN
            shares_with = owner if placement is Placement.TIED else None
            self._live[name] = live
            self._tensors.append(EngineTensor(spec=live.spec, placement=placement, shares_with=shares_with))

    def describe(self) -> Sequence[EngineTensor]:
        """List parameters and buffers by their Hugging Face names."""
        return tuple(self._tensors)

    @property
    def version(self) -> int | None:
        """The version loaded; None while weights are missing, being written, or not proved."""
        return self._version

    def bind(self, schema: Schema) -> None:
        """Fix the run's schema.

        Raises:
            HandshakeError: a tensor has no place.
        """
        binding: Binding = handshake(schema, self._tensors)
        self._places = tuple(self._live[name] for name in binding.places)
        self._schema = schema

    def load(self, tensors: Mapping[str, npt.NDArray[Any]], *, version: int) -> None:
        """Replace all weights by the run's tensors, named and shaped as in the bound schema.

        Raises:
            SchemaMismatchError: a tensor is missing or has another dtype or shape; nothing was written.
            EngineError: the engine generates and is not paused.
        """
        schema = self._bound()
        self._require_quiet("load")
        for spec in schema:
            array = tensors.get(spec.name)
            if array is None:
                raise SchemaMismatchError(
                    f"tensor {spec.name} is missing from what should be loaded as version {version}"
                )
            width = Dtype.of(array.dtype).width
            if tuple(array.shape) != spec.shape or width != spec.dtype.width:
                raise SchemaMismatchError(
                    f"tensor {spec.name} is {array.dtype}{list(array.shape)}, the run has {spec.dtype}{list(spec.shape)}"
                )
        self._version = None
        self._epoch += 1
        for spec, live in zip(schema, self._places, strict=True):
            live.write_all(bits_of(tensors[spec.name]))
        self._version = version

    def pause(self, *, timeout: timedelta) -> None:
        """Return once no decode step runs and none will start before `resume`."""
        self._gate.pause(timeout=timeout)

    def resume(self) -> None:
        """Let generation go on."""
        self._gate.resume()

    def withdraw(self) -> None:
        """Hold no version any more; the batch in progress fails at its next step."""
        self._version = None

    def stage(self, change: Change) -> None:
        """Nothing to do: weights are in this process, and patches are written as they are."""

    def apply(self, patches: Iterable[TensorPatch], *, version: int) -> None:
        """Scatter bits into the paused engine and flip its version; without patches only the version flips, unpaused.

        Whatever stops it, also an error of the iterable itself, leaves `version` None: nothing is served until a later
        `apply` or `load` succeeds.

        Raises:
            EngineError: a patch does not fit, or writing one failed.
        """
        schema = self._bound()
        if self._version is None and self._epoch == 0:
            raise EngineError(
                f"version {version} cannot be applied before any weights are loaded: load them whole first"
            )
        current, num_written = self._version, 0
        try:
            for patch in patches:
                if patch.num_changed == 0:
                    continue
                if num_written == 0:
                    self._require_quiet("apply")
                    self._version = current = None
                    self._epoch += 1
                _check_patch(schema, patch)
                self._places[patch.tensor].write(patch)
                num_written += patch.num_changed
        except BaseException as error:
            self._version = None
            if isinstance(error, (IndexError, ValueError, RuntimeError)):
                raise EngineError(f"version {version} failed after {num_written} elements: {error}") from error
            raise
        if num_written == 0 and current is None:
            raise EngineError(f"version {version} changes nothing, but no proved weights are loaded: load them whole")
        self._version = version

    def digest(self, names: Iterable[str]) -> Mapping[str, TensorDigest]:
        """Digest live weights, by the run's names."""
        schema = self._bound()
        digests: dict[str, TensorDigest] = {}
        for name in names:
            if name not in schema.index:
                raise SchemaMismatchError(f"tensor {name} is not part of the run, so it has no digest here")
            digests[name] = self._places[schema.index[name]].digest()
        return digests

    def digest_at(self, patches: Iterable[TensorPatch]) -> Mapping[str, TensorDigest]:
        """Digest live weights at the positions of patches, by the run's names."""
        schema = self._bound()
        digests: dict[str, TensorDigest] = {}
        for patch in patches:
            name = schema[patch.tensor].name
            live = digest_of(patch, self._places[patch.tensor].read(patch))
            digests[name] = digests.get(name, ZERO) + live
        return digests

    def encode_chat(self, prompt: str) -> npt.NDArray[np.int32]:
        """Return the ids of one user message in the model's chat format, ending where the assistant begins."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode_text(self, token_ids: npt.NDArray[np.int32]) -> str:
        """Return the text of completion tokens without special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Complete a batch of prompts; requests unfinished when the engine is closed come back with reason abort.

        Raises:
            EngineError: no proved weights are loaded, another batch is in progress, a prompt does not fit, or the
                model produced numbers that are not finite.
        """
        if not self._generating.acquire(blocking=False):
            raise EngineError("a batch is in progress: generate from one thread")
        try:
            with torch.inference_mode():
                return self._generate([self._row(request) for request in requests])
        finally:
            self._generating.release()

    def score(self, sequences: Sequence[ProbeSequence]) -> Sequence[npt.NDArray[np.float32]]:
        """Return log-probabilities of given tokens; see `probe.Scores`.

        The first half of each sequence passes through the prefill, the second through the cache that it left, as
        completion tokens do. Takes no part in the gate: a batch may go on beside it.

        Raises:
            EngineError: no proved weights are loaded, or a sequence does not fit the model.
        """
        if self._version is None:
            raise EngineError("the engine holds no proved weights, so nothing is scored: wait for the next version")
        context = int(getattr(self._model.config, "max_position_embeddings", 0) or 0)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        for sequence in sequences:
            num_tokens, largest = len(sequence.token_ids), max(sequence.token_ids)
            if (context and num_tokens > context) or largest >= vocabulary:
                raise EngineError(
                    f"a probe of {num_tokens} tokens with ids up to {largest} does not fit a model with a context of "
                    f"{context} and {vocabulary} tokens: the run trains another model"
                )
        with torch.inference_mode():
            return self._score([np.array(sequence.token_ids, np.int32) for sequence in sequences], sequences)

    def _score(
        self, rows: Sequence[npt.NDArray[np.int32]], sequences: Sequence[ProbeSequence]
    ) -> list[npt.NDArray[np.float32]]:
        cuts = [(len(row) + 1) // 2 for row in rows]
        num_first, num_second = max(cuts), max(len(row) - cut for row, cut in zip(rows, cuts, strict=True))
        cache, mask_UT, first_UTV = self._prefill_distinct(
            [row[:cut] for row, cut in zip(rows, cuts, strict=True)], num_logits=num_first
        )
        ids_UT = torch.zeros(len(rows), num_second, dtype=torch.long)
        more_UT = torch.zeros(len(rows), num_second, dtype=torch.long)
        for number, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
            ids_UT[number, : len(row) - cut] = torch.from_numpy(row[cut:].astype(np.int64))
            more_UT[number, : len(row) - cut] = 1
        starts_U1 = torch.tensor(cuts, device=self._device).unsqueeze(-1)
        second_UTV = self._model(
            input_ids=ids_UT.to(self._device),
            attention_mask=torch.cat([mask_UT, more_UT.to(self._device)], dim=-1),
            position_ids=starts_U1 + torch.arange(num_second, device=self._device),
            past_key_values=cache,
            use_cache=True,
        ).logits
        scores = []
        for number, (row, cut, sequence) in enumerate(zip(rows, cuts, sequences, strict=True)):
            logits_TV = torch.cat([first_UTV[number, num_first - cut :], second_UTV[number, : len(row) - cut]])
            targets_T = torch.from_numpy(row[1:].astype(np.int64)).to(self._device)
            logprobs_T = torch.log_softmax(logits_TV[:-1].float(), dim=-1).gather(-1, targets_T.unsqueeze(-1))
            scores.append(logprobs_T[sequence.num_given - 1 :, 0].cpu().numpy())
        return scores

    def _generate(self, rows: list[_Row]) -> Sequence[Generation]:
        batch: _Batch | None = None
        active = list(rows)
        while active:
            with self._gate.step() as entered:
                if not entered:
                    break
                version = self._version
                if version is None:
                    raise EngineError(
                        "the engine holds no proved weights, so nothing is served: wait for the next version"
                    )
                if batch is None or batch.epoch != self._epoch:
                    batch = self._prefill(active)
                else:
                    self._decode(batch)
                tokens, logprobs = self._choose(batch)
            for row, token, logprob in zip(active, tokens, logprobs, strict=True):
                row.append(token, logprob, version, self._eos_ids)
            active = self._drop_finished(batch)
        return [row.result() for row in rows]

    def _prefill(self, rows: list[_Row]) -> _Batch:
        """Compute the cache of all rows from scratch; each distinct prefix is computed once."""
        prefixes = [row.prefix for row in rows]
        _RECOMPUTED.inc(sum(len(prefix) for prefix, row in zip(prefixes, rows, strict=True) if row.tokens))
        numbers: dict[bytes, int] = {}
        number_of_row = [numbers.setdefault(prefix.tobytes(), len(numbers)) for prefix in prefixes]
        distinct = [np.frombuffer(key, np.int32) for key in numbers]
        cache, mask_BT, logits_UTV = self._prefill_distinct(distinct, num_logits=1)
        logits_BV = logits_UTV[:, -1]
        if len(distinct) < len(rows):
            expand = torch.tensor(number_of_row, device=self._device)
            cache.batch_select_indices(expand)
            logits_BV, mask_BT = logits_BV[expand], mask_BT[expand]
        return _Batch(rows=rows, cache=cache, mask_BT=mask_BT, logits_BV=logits_BV, epoch=self._epoch)

    def _prefill_distinct(
        self, distinct: Sequence[npt.NDArray[np.int32]], *, num_logits: int
    ) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        """Return cache and mask (U x T) of prefixes padded on the left, and the logits at their last positions."""
        length = max(map(len, distinct))
        ids_UT = torch.zeros(len(distinct), length, dtype=torch.long)
        mask_UT = torch.zeros(len(distinct), length, dtype=torch.long)
        for number, prefix in enumerate(distinct):
            ids_UT[number, length - len(prefix) :] = torch.from_numpy(prefix.astype(np.int64))
            mask_UT[number, length - len(prefix) :] = 1
        mask_UT = mask_UT.to(self._device)
        cache = DynamicCache(config=self._model.config)
        output = self._model(
            input_ids=ids_UT.to(self._device),
            attention_mask=mask_UT,
            position_ids=(mask_UT.cumsum(-1) - 1).clamp_(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        return cache, mask_UT, output.logits

    def _decode(self, batch: _Batch) -> None:
        """Feed each row's last token and leave the logits of the next in the batch."""
        last_B1 = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=self._device)
        positions_B1 = torch.tensor([[row.position - 1] for row in batch.rows], device=self._device)
        batch.mask_BT = torch.nn.functional.pad(batch.mask_BT, (0, 1), value=1)
        output = self._model(
            input_ids=last_B1,
            attention_mask=batch.mask_BT,
            position_ids=positions_B1,
            past_key_values=batch.cache,
            use_cache=True,
        )
        batch.logits_BV = output.logits[:, -1]

    def _choose(self, batch: _Batch) -> tuple[list[int], list[float]]:
        tokens_B, logprobs_B = choose_tokens(
            batch.logits_BV,
            [row.request.sampling.temperature for row in batch.rows],
            [uniform_at(row.request.seed, row.position) for row in batch.rows],
        )
        if not bool(torch.isfinite(logprobs_B).all()):
            raise EngineError(
                f"version {self._version} gives log-probabilities that are not finite: its weights are broken"
            )
        return tokens_B.tolist(), logprobs_B.tolist()

    def _drop_finished(self, batch: _Batch) -> list[_Row]:
        """Take finished rows out of the batch, so that no step is spent on them."""
        keep = [number for number, row in enumerate(batch.rows) if row.finish_reason is None]
        if keep and len(keep) < len(batch.rows):
            select = torch.tensor(keep, device=self._device)
            batch.cache.batch_select_indices(select)
            batch.mask_BT = batch.mask_BT[select]
        batch.rows = [batch.rows[number] for number in keep]
        return batch.rows

    def _row(self, request: GenerationRequest) -> _Row:
        num_prompt = len(request.prompt_token_ids)
        context = int(getattr(self._model.config, "max_position_embeddings", 0) or 0)
        if num_prompt == 0:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if context and num_prompt >= context:
            raise EngineError(
                f"request {request.request_id} has a prompt of {num_prompt} tokens, the model's context is {context}: "
                "use shorter prompts"
            )
        limit = request.sampling.max_new_tokens
        return _Row(request=request, limit=min(limit, context - num_prompt) if context else limit)

    def _bound(self) -> Schema:
        if self._schema is None:
            raise EngineError("the engine has no schema: bind it after the handshake")
        return self._schema

    def _require_quiet(self, what: str) -> None:
        if self._generating.locked() and not self._gate.paused:
            raise EngineError(f"{what} needs a paused engine while a batch is generated: pause it first")

    def close(self) -> None:
        """End the batch in progress after its current step, and let go of the model."""
        self._version = None
        self._gate.close(timeout=CLOSE_TIMEOUT)


def _make_contiguous(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copy the last hidden states before the output head: on a strided slice matmul copies the head once a row.

    Measured on a 135M model, prefill of 16 x 37 tokens on one core: 3.9 s without, 1.4 s with.
    """
    return tuple(hidden.contiguous() for hidden in inputs)


def _check_patch(schema: Schema, patch: TensorPatch) -> None:
    """Refuse what would write outside its tensor; negative positions would wrap silently."""
    if not 0 <= patch.tensor < len(schema):
        raise EngineError(f"a patch names tensor number {patch.tensor}, the run has {len(schema)}")
    spec = schema[patch.tensor]
    first, last = patch.start, patch.start + patch.count - 1
    if patch.indices is not None:
        first, last = int(patch.indices[0]), int(patch.indices[-1])
    if first < 0 or last >= spec.num_elements:
        raise EngineError(f"a patch of {spec.name} covers positions {first}..{last} of {spec.num_elements}")
    if patch.values.dtype.itemsize != spec.dtype.width:
        raise EngineError(
            f"a patch of {spec.name} has {patch.values.dtype.itemsize}-byte values, {spec.dtype} has {spec.dtype.width}"
        )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every token that ends a completion, from the generation config, the config, or the tokenizer."""
    sources = (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    )
    for source in sources:
        if source is not None:
            return frozenset(source if isinstance(source, (list, tuple)) else [source])
    raise ConfigError("the model names no end-of-sequence token, so completions would never end: set eos_token_id")
