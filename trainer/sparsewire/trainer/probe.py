"""What the learner itself makes of a few tokens, to travel with each version as its probe.

Three kinds of sequences, since each shows faults that the others do not: fixed texts, alike for all versions; tokens
from all over the vocabulary, for what is wrong with a part of the head's rows only, such as one rank's; and two
completions of the newest batch, on which training has just worked, so that weights some steps old show (measured:
docs/publishing.md, Probe).

`Prober.score` is collective: one small forward pass on every rank, between optimizer steps, without gradient. In
bfloat16 compute, FSDP casts each float32 weight to the very bfloat16 value that the bf16 view publishes, so worker and
learner compute with equal numbers, and what is left between them is the rounding of intermediate results. With another
compute dtype or view the rounding of weights comes on top.

Shape legend: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from prometheus_client import Histogram
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from sparsewire.sync.errors import ConfigError
from sparsewire.sync.probe import Probe
from sparsewire.sync.ranks import Agreement
from sparsewire.trainer.batch import TrainingBatch
from sparsewire.trainer.loss import token_logprobs
from sparsewire.trainer.model import CausalLM, vocabulary_size
from sparsewire.trainer.ranks import ProcessGroup

logger = logging.getLogger(__name__)

MAX_TEXT_TOKENS = 32
"""Of each text, counted from its start."""
MAX_PROMPT_TOKENS = 32
"""Of a prompt of the batch, counted from its end."""
MAX_COMPLETION_TOKENS = 16
"""Of a completion of the batch, counted from its start."""

_NUM_SPREAD = 16
"""Tokens of the sequence that is spread over the vocabulary."""

_PAD_MULTIPLE = 8
"""As for training batches: compiled layers see few shapes."""

_SECONDS = Histogram(
    "sparsewire_learner_probe_seconds",
    "Time to score the probe of one version.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)


class Prober:
    """Scores sequences with a model as it stands; for the thread that runs the steps."""

    def __init__(self, *, model: CausalLM, group: ProcessGroup, token_ids: Sequence[Sequence[int]]) -> None:
        """Fix the sequences that every version gets, each of at least two tokens; equal on all ranks."""
        self._model = model
        self._device = group.device
        self._fixed = [list(ids) for ids in token_ids]
        self._followed: list[tuple[list[int], int]] = []

    def follow(self, batch: TrainingBatch) -> None:
        """Take the rows of `batch` with most and least advantage into the probes that follow, in place of older ones."""
        self._followed = []
        if not len(batch):
            return
        ends = np.cumsum(batch.prompt_lengths_N + batch.completion_lengths_N)
        for row in sorted({int(batch.advantages_N.argmax()), int(batch.advantages_N.argmin())}):
            first = int(ends[row] - batch.completion_lengths_N[row])
            num_given = min(int(batch.prompt_lengths_N[row]), MAX_PROMPT_TOKENS)
            stop = min(int(ends[row]), first + MAX_COMPLETION_TOKENS)
            if num_given and stop > first:
                self._followed.append((batch.token_ids[first - num_given : stop].tolist(), num_given))

    def score(self) -> Probe | None:
        """Return the probe of the weights as they are; None when they give numbers that are not finite. Collective."""
        started = time.monotonic()
        sequences = [*((ids, 1) for ids in self._fixed), *self._followed]
        num_positions = -(-max(len(ids) for ids, _ in sequences) // _PAD_MULTIPLE) * _PAD_MULTIPLE
        ids_BT = torch.zeros(len(sequences), num_positions, dtype=torch.int64)
        for row, (ids, _) in enumerate(sequences):
            # Padding on the right: under causal attention no real token sees it.
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        ids_BT = ids_BT.to(self._device)
        with torch.no_grad():
            logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
            logprobs_BT, _ = token_logprobs(logits_BTV, ids_BT[:, 1:], temperature=1.0)
        # A forward pass without backward leaves the gathered copies of weights in place, and the next one would use them.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        rows = logprobs_BT.tolist()
        _SECONDS.observe(time.monotonic() - started)
        try:
            return Probe.of(
                [ids for ids, _ in sequences],
                [row[given - 1 : len(ids) - 1] for row, (ids, given) in zip(rows, sequences, strict=True)],
            )
        except ConfigError as error:
            logger.warning("the version goes without a probe: %s", error)
            return None


def open_prober(texts: Sequence[str], *, directory: Path, model: CausalLM, group: ProcessGroup) -> Prober | None:
    """Return a prober of `texts`, in the tokens of the model's own tokenizer, and more; None without texts. Collective.

    Raises:
        ConfigError: the model has no tokenizer, or a text is shorter than two tokens.
    """
    if not texts:
        return None
    spread = _spread(vocabulary_size(model))
    found = Agreement(group.control).on_first(lambda: json.dumps(_tokenise(texts, directory)).encode())
    return Prober(model=model, group=group, token_ids=[*json.loads(found), spread])


def _spread(num_tokens: int) -> list[int]:
    return [(2 * number + 1) * num_tokens // (2 * _NUM_SPREAD) for number in range(_NUM_SPREAD)]


def _tokenise(texts: Sequence[str], directory: Path) -> list[list[int]]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {directory}: no tokenizer there for probe_texts: {error}; add it, or set probe_texts = []"
        ) from error
    rows = [list(tokenizer(text, add_special_tokens=False)["input_ids"])[:MAX_TEXT_TOKENS] for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if len(row) < 2:
            raise ConfigError(f"probe text {text!r} has {len(row)} tokens; one needs at least two: make it longer")
    return rows
