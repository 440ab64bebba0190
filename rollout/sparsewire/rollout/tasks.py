"""Prompts and rewards: what a model is asked, and how well it answered.

A task is a pure function of the item's number, the same on every worker and at the learner. `open_task` knows
`addition` (two-digit sums, the demo's) and every dataset of reasoning-gym as `reasoning-gym:<dataset>`.

Known limit: reasoning-gym's verifiers are third-party code; one that raises on an answer counts as reward 0 and is
logged.
"""

from __future__ import annotations

import hashlib
import logging
import re
from difflib import get_close_matches
from typing import Any, Protocol

from sparsewire.sync.errors import ConfigError

logger = logging.getLogger(__name__)

ADDITION = "addition"
REASONING_GYM = "reasoning-gym:"
NUM_REASONING_GYM_ITEMS = 1 << 20
"""Items of a reasoning-gym dataset; higher numbers start over."""

_NUM_PREPARED_ITEMS = {"acre": 1 << 12}
"""Items of datasets that make all of them when opened (acre: 0.2 ms each), instead of one when asked."""

_MAX_ANSWER_CHARACTERS = 10_000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Task(Protocol):
    """Numbered problems with a verifier."""

    def prompt(self, item: int) -> str:
        """Return the user message of an item; equal items give equal messages, everywhere."""
        ...

    def score(self, item: int, completion: str) -> float:
        """Return the reward of an answer to an item, from 0 to 1."""
        ...


class Addition:
    """Sums of two two-digit numbers, 8100 of them; the reward is 1 when the last number of the answer is the sum.

    SmolLM2-135M-Instruct starts at 0.03 with 12 tokens at temperature 1, with both outcomes in a fifth of groups of 8
    (384 samples); under an exact match of the whole answer it starts at 0.00, which leaves nothing to learn from.
    """

    def _terms(self, item: int) -> tuple[int, int]:
        digest = hashlib.sha256(b"addition %d" % item).digest()
        pair = int.from_bytes(digest[:8], "little") % 8100
        return 10 + pair // 90, 10 + pair % 90

    def prompt(self, item: int) -> str:
        """Return the question, for example `What is 17 + 25? Answer with just the number.`"""
        a, b = self._terms(item)
        return f"What is {a} + {b}? Answer with just the number."

    def score(self, item: int, completion: str) -> float:
        """Return 1.0 when the last number in the completion is the sum, else 0.0."""
        a, b = self._terms(item)
        numbers = _NUMBER.findall(completion)
        return float(bool(numbers) and numbers[-1] == str(a + b))


class ReasoningGym:
    """A dataset of reasoning-gym with its own verifier; an `<answer>` element is used where the model writes one."""

    def __init__(self, *, name: str, dataset: Any, num_items: int) -> None:
        self._num_items = num_items
        self._name = name
        self._dataset = dataset

    def prompt(self, item: int) -> str:
        """Return the dataset's question."""
        return str(self._entry(item)["question"])

    def score(self, item: int, completion: str) -> float:
        """Return the verifier's score of the answer, clipped to [0, 1]."""
        from reasoning_gym.utils import extract_answer

        answer = (extract_answer(completion) or completion).strip()[:_MAX_ANSWER_CHARACTERS]
        try:
            score = float(self._dataset.score_answer(answer, self._entry(item)))
        except Exception as error:  # noqa: BLE001 - verifiers parse what a model wrote and raise anything
            logger.warning("verifier of %s raised on an answer to item %d, reward 0: %r", self._name, item, error)
            return 0.0
        return min(1.0, max(0.0, score)) if score == score else 0.0

    def _entry(self, item: int) -> dict[str, Any]:
        entry: dict[str, Any] = self._dataset[item % self._num_items]
        return entry


def open_task(name: str, *, seed: int = 0) -> Task:
    """Return the task called `name`; `seed` shifts the items of a reasoning-gym dataset.

    Raises:
        ConfigError: there is no such task; the message suggests near ones.
    """
    if name == ADDITION:
        return Addition()
    if name.startswith(REASONING_GYM):
        return _open_reasoning_gym(name, seed=seed)
    raise ConfigError(f"there is no task {name!r}; {_suggestion(name)}")


def _open_reasoning_gym(name: str, *, seed: int) -> Task:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task {name!r} needs the package reasoning-gym: pip install 'sparsewire[rollout]'"
        ) from error
    dataset_name = name.removeprefix(REASONING_GYM)
    if dataset_name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset {dataset_name!r}; {_suggestion(dataset_name, list(DATASETS))}")
    num_items = _NUM_PREPARED_ITEMS.get(dataset_name, NUM_REASONING_GYM_ITEMS)
    try:
        dataset = reasoning_gym.create_dataset(dataset_name, seed=seed, size=num_items)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task {name!r} cannot be used without settings of its own: {error}; choose another"
        ) from error
    return ReasoningGym(name=name, dataset=dataset, num_items=num_items)


def _suggestion(wanted: str, datasets: list[str] | None = None) -> str:
    if datasets is None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError:
            return f"write {ADDITION!r}, or install sparsewire[rollout] for '{REASONING_GYM}<dataset>'"
        datasets = list(DATASETS)
    known = {dataset: f"{REASONING_GYM}{dataset}" for dataset in datasets} | {ADDITION: ADDITION}
    near = [known[match] for match in get_close_matches(wanted.rpartition(":")[2], known, n=4, cutoff=0.5)]
    return f"did you mean {' or '.join(near)}?" if near else f"write {ADDITION!r} or '{REASONING_GYM}<dataset>'"
