"""A probe: a few token sequences with the log-probabilities that the publisher's own model gives them.

Pure. It travels in a version's manifest, and whoever serves that version scores the same tokens and compares: equal
bytes are no proof that an engine computes with them. Small by contract, so that it costs neither manifest nor engine
anything to speak of; what comes from the network is checked against the same bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsewire.sync.errors import ConfigError, DamagedError
from sparsewire.v1 import manifest_pb2

MAX_SEQUENCES = 16
MAX_TOKENS = 1024
"""Of all sequences together."""

_MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSequence:
    """One sequence; its first `num_given` tokens are context, each later one is scored given all before it."""

    token_ids: tuple[int, ...]
    num_given: int
    logprobs: tuple[float, ...]
    """Of each scored token, in order: natural logarithm at temperature 1, exact in float32."""

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ConfigError(f"a probe's sequence {problem}")

    def _problem(self) -> str:
        num_tokens = len(self.token_ids)
        if not 1 <= self.num_given < num_tokens:
            return f"gives {self.num_given} of its {num_tokens} tokens; at least one must be given and one scored"
        if len(self.logprobs) != num_tokens - self.num_given:
            return f"has {len(self.logprobs)} log-probabilities for {num_tokens - self.num_given} scored tokens"
        if min(self.token_ids) < 0 or max(self.token_ids) > _MAX_TOKEN_ID:
            return f"has a token id that is not in 0..{_MAX_TOKEN_ID}"
        if not all(map(math.isfinite, self.logprobs)):
            return "has log-probabilities that are not finite"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What every engine at a version should find for these tokens, up to rounding."""

    sequences: tuple[ProbeSequence, ...]

    def __post_init__(self) -> None:
        num_tokens = sum(len(sequence.token_ids) for sequence in self.sequences)
        if not 1 <= len(self.sequences) <= MAX_SEQUENCES or num_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a probe has {len(self.sequences)} sequences of {num_tokens} tokens; it may have 1 to {MAX_SEQUENCES} "
                f"of {MAX_TOKENS}"
            )

    @staticmethod
    def of(token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Probe:
        """Return a probe of sequences whose last tokens have these log-probabilities, rounded to float32.

        Raises:
            ConfigError: too many tokens, none to score, or numbers that are not finite.
        """
        return Probe(
            sequences=tuple(
                ProbeSequence(
                    token_ids=tuple(map(int, ids)),
                    num_given=len(ids) - len(values),
                    logprobs=tuple(np.asarray(values, np.float32).tolist()),
                )
                for ids, values in zip(token_ids, logprobs, strict=True)
            )
        )

    @property
    def num_scored(self) -> int:
        """Tokens that have a log-probability."""
        return sum(len(sequence.logprobs) for sequence in self.sequences)


def probe_to_wire(probe: Probe) -> manifest_pb2.Probe:
    """Return the message of a probe."""
    return manifest_pb2.Probe(
        sequences=[
            manifest_pb2.ProbeSequence(
                token_ids=sequence.token_ids, num_given=sequence.num_given, logprobs=sequence.logprobs
            )
            for sequence in probe.sequences
        ]
    )


def probe_from_wire(message: manifest_pb2.Probe, *, where: str) -> Probe:
    """Return the probe of a message from the network.

    Raises:
        DamagedError: it is not one, or too large.
    """
    num_tokens = sum(len(sequence.token_ids) + len(sequence.logprobs) for sequence in message.sequences)
    if len(message.sequences) > MAX_SEQUENCES or num_tokens > 2 * MAX_TOKENS:
        raise DamagedError(
            f"{where}: a probe of {len(message.sequences)} sequences and {num_tokens} numbers is too large"
        )
    try:
        return Probe(
            sequences=tuple(
                ProbeSequence(
                    token_ids=tuple(sequence.token_ids),
                    num_given=sequence.num_given,
                    logprobs=tuple(sequence.logprobs),
                )
                for sequence in message.sequences
            )
        )
    except ConfigError as error:
        raise DamagedError(f"{where}: {error}") from error
