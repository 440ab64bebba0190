"""The one error tree of sparsewire: what went wrong, with which object, and what the caller should do.

Every error that leaves a public function is one of these. Each docstring says how to react. Messages name the
object (key, version, tensor, field), give both values where two disagree, and end with the remedy. All are
picklable (one positional message), so they cross process borders; `rpc.py` maps them to gRPC status and back.
"""

from __future__ import annotations


class SparsewireError(Exception):
    """Base of all errors of this package; catch it at the edge of a process or task only."""


class ConfigError(SparsewireError):
    """The configuration or the arguments are wrong: fix what the message lists; retrying will not help (exit code 2)."""


class StoreError(SparsewireError):
    """The object store refused or failed; see the subclasses for what to do."""


class NotFoundError(StoreError):
    """The object does not exist: it was never written, or retention removed it; plan again from what does exist."""


class AlreadyExistsError(StoreError):
    """A put-if-absent met an existing object: somebody else wrote it first; read theirs."""


class PreconditionFailedError(StoreError):
    """A compare-and-set lost: the object changed since it was read; read again, then decide."""


class StoreUnavailableError(StoreError):
    """The store did not answer within the retry budget; nothing was lost, try again later."""


class StoreAccessError(StoreError):
    """Credentials, bucket or permission are wrong: fix them; retrying will not help."""


class UnsafeStoreError(StoreError):
    """The server ignores conditional writes, so two learners could both commit a version: use another server."""


class DamagedError(SparsewireError):
    """Stored or received bytes are not what they claim to be: fetch again; if it persists, the object is lost."""


class UnsupportedFormatError(SparsewireError):
    """The bytes carry a format number or mode this build does not know: upgrade the older side."""


class ProtocolMismatchError(SparsewireError):
    """The peer speaks another protocol number: run builds with equal protocol numbers on both sides."""


class FencedError(SparsewireError):
    """Another learner has claimed the run with a newer epoch: this one must stop."""


class SchemaMismatchError(SparsewireError):
    """Names, dtypes or shapes differ from those of the run: wrong model or wrong run."""


class WrongBaseError(SparsewireError):
    """A delta was offered to weights that are not its base: catch up by the plan instead of forcing it."""


class LastChangeMissingError(WrongBaseError):
    """A delta is coded against the change before it, which is not at hand: take a path without such links."""


class DigestMismatchError(SparsewireError):
    """Weights do not have the digest that the manifest states: they must not be served; re-anchor."""


class VersionUnavailableError(SparsewireError):
    """No path of anchors and deltas leads to the wanted version: it never existed or was pruned."""


class DeadlineExceededError(SparsewireError):
    """The work did not finish before the caller's deadline; state is unchanged, call again."""


class HandshakeError(SparsewireError):
    """The engine cannot place every tensor of the run: the message lists mapped, tied, frozen, derived, unmatched."""


class EngineError(SparsewireError):
    """The engine failed to generate or to apply; its weights must be proved again before it serves."""


class SpoolFullError(SparsewireError):
    """The trajectory spool is at its bound: stop producing until the sender has drained it."""


class LimitExceededError(SparsewireError):
    """A peer sent or asked for more than the documented limit; nothing was allocated or stored."""
