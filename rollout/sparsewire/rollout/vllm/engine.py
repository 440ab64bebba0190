"""The vLLM engine of a worker: an AsyncLLM of its own, whose weights change between decode steps and are proved there.

Implements `Engine`. vLLM runs in processes of its own (engine core and ranks); an asyncio loop in a thread of this one
talks to them.

    updater:  stage ───────► pause(keep, caches cleared) ─► apply ─► digest_at ─► resume: label, go on
    sampler:  generate ═══════════════════╗ (steps held back)                  ╚═══════════════════►

Requests in flight survive a pause; their caches are computed again from prompt and completion so far, so what follows
is what a fresh engine with the new weights would make of the same prefix. vLLM itself notes which version made which
token, and the label changes only while nothing is scheduled. Without proved weights nothing is served: requests in
flight are aborted and the scheduler stays paused, whatever resumes, until a load succeeded. An engine core that died is
started again by the next `load`.

Known limit: the random stream of a sampled request belongs to vLLM, so which tokens follow an interruption depends on
where it happened; their distribution does not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter
from transformers import AutoTokenizer

from sparsewire.rollout.change import Change
from sparsewire.rollout.engine import EngineTensor, Generation, GenerationRequest
from sparsewire.rollout.vllm.driver import RankDriver
from sparsewire.rollout.vllm.plugin import BACKEND, check_version
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import TensorDigest
from sparsewire.sync.errors import ConfigError, EngineError
from sparsewire.sync.trajectories.types import FinishReason, VersionSpan
from sparsewire.sync.types import Schema

logger = logging.getLogger(__name__)

START_TIMEOUT = timedelta(minutes=15)
"""Bound on starting vLLM, which reads the whole model."""

MIN_TEMPERATURE = 0.01
"""vLLM samples at none lower; below it the likeliest token is taken, with its log-probability at temperature 1."""

CALL_TIMEOUT = timedelta(seconds=60)
ABORT_TIMEOUT = timedelta(seconds=5)
CLOSE_TIMEOUT = timedelta(seconds=30)

_POLL_SECONDS = 0.5
_SHARED_MEMORY = Path("/dev/shm")
_SEED_MASK = (1 << 63) - 1
_RESTARTS = Counter("sparsewire_engine_restarts_total", "Times that a dead vLLM was started again.")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How to start vLLM."""

    max_model_len: int | None = None
    """Longest prompt plus completion; unset leaves the model's own limit."""
    max_num_seqs: int = 64
    """Requests that are decoded together."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; unset lets vLLM take its share of all memory, on a CPU 90 % of it."""
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    enforce_eager: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`."""


class _AsyncCalls:
    """`RankCalls` over an AsyncLLM whose loop runs in another thread."""

    def __init__(self, *, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        self._llm = llm
        self._loop = loop
        self._init_request = WeightTransferInitRequest
        self._update_request = WeightTransferUpdateRequest

    @property
    def num_ranks(self) -> int:
        return int(self._llm.vllm_config.parallel_config.world_size)

    def initialize(self, init_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        self._run(
            self._llm.init_weight_transfer_engine(self._init_request(init_info=dict(init_info))), "take over", timeout
        )

    def start_update(self, *, timeout: timedelta) -> None:
        self._run(self._llm.start_weight_update(), "begin an update", timeout)

    def update(self, update_info: Mapping[str, Any], *, timeout: timedelta) -> None:
        self._run(
            self._llm.update_weights(self._update_request(update_info=dict(update_info))),
            str(update_info.get("action")),
            timeout,
        )

    def finish_update(self, version: str, *, timeout: timedelta) -> None:
        self._run(self._llm.finish_weight_update(version), "finish an update", timeout)

    def check_alive(self) -> None:
        if self._llm.errored:
            raise EngineError("vLLM's engine core is dead: its weights must be loaded again")

    def _run(self, call: Coroutine[Any, Any, Any], what: str, timeout: timedelta) -> None:
        wait_for(self._loop, call, what=what, timeout=timeout)


def wait_for(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, _T], *, what: str, timeout: timedelta) -> _T:
    """Run a coroutine in another thread's loop and return its result.

    Raises:
        EngineError: it failed, or did not end in time.
    """
    future: Future[_T] = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return future.result(timeout.total_seconds())
    except FutureTimeoutError as error:
        future.cancel()
        raise EngineError(f"vLLM did not {what} within {timeout.total_seconds():.3f} s") from error
    except EngineError:
        raise
    except Exception as error:  # the edge of vLLM, which raises all kinds
        raise EngineError(f"vLLM failed to {what}: {error!r}") from error


class VllmEngine:
    """Samples with an AsyncLLM; `open` one, `bind` it, `load` weights, `generate`."""

    def __init__(
        self, *, directory: Path, options: VllmOptions, tokenizer: Any, eos_ids: Sequence[int], exchange: Path
    ) -> None:
        """Take a private directory for exchange with the ranks; use `open`, which also starts vLLM."""
        self._directory = directory
        self._options = options
        self._tokenizer = tokenizer
        self._eos_ids = list(eos_ids)
        self._exchange = exchange
        self._version: int | None = None
        self._label: int | None = None
        self._paused = False
        self._schema: Schema | None = None
        self._closed = False
        self._generating = threading.Lock()
        self._in_flight: set[str] = set()
        self._num_requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._llm: Any = None
        self._driver: RankDriver | None = None

    @classmethod
    def open(cls, directory: Path, *, options: VllmOptions | None = None) -> Self:
        """Start vLLM on the model of a Hugging Face directory, without touching any network.

        The directory's weights are loaded; they are not proved, so `version` is None all the same.

        Raises:
            ConfigError: vLLM is missing, too old, or kept from loading its plugin; or the model cannot be served.
            EngineError: vLLM did not start.
        """
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} has no config.json: give the path of a Hugging Face model directory")
        _prepare_environment()
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(
                f"vLLM cannot be imported ({error}): install it, or choose the transformers engine"
            ) from error
        check_version(vllm.__version__)
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {directory} has no chat template: use an instruction-tuned model")
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        engine = cls(
            directory=directory,
            options=options or VllmOptions(),
            tokenizer=tokenizer,
            eos_ids=_eos_ids(directory, tokenizer),
            exchange=Path(tempfile.mkdtemp(prefix="sparsewire-", dir=parent)),
        )
        try:
            engine._start()
        except BaseException:
            engine.close()
            raise
        return engine

    def _start(self) -> None:
        """Start vLLM and find out where its weights live."""
        if not self._thread.is_alive():
            self._thread.start()
        self._llm = wait_for(self._loop, self._build(), what="start", timeout=START_TIMEOUT)
        self._driver = RankDriver(calls=_AsyncCalls(llm=self._llm, loop=self._loop), directory=self._exchange)
        self._ranks.describe()

    async def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = self._options
        arguments: dict[str, Any] = {
            "model": str(self._directory),
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "kv_cache_memory_bytes": options.kv_cache_bytes,
            "tensor_parallel_size": options.tensor_parallel_size,
            "enforce_eager": options.enforce_eager,
            # Sampling is what the request says, whatever the model's authors recommend.
            "generation_config": "vllm",
            # Log-probabilities under the distribution that is sampled from, as the learner recomputes them.
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": BACKEND},
            "disable_log_stats": True,
            **options.extra,
        }
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    # The seam: weights.

    def describe(self) -> Sequence[EngineTensor]:
        """List the checkpoint's tensors, and tied names, by their Hugging Face names."""
        return self._ranks.describe()

    @property
    def _ranks(self) -> RankDriver:
        if self._driver is None:
            raise EngineError("vLLM does not run: it failed to start, or the engine was closed")
        return self._driver

    @property
    def version(self) -> int | None:
        """The version that is served; None while there is none, and when vLLM has died."""
        return None if self._is_dead else self._version

    @property
    def _is_dead(self) -> bool:
        return self._llm is None or bool(self._llm.errored)

    def bind(self, schema: Schema) -> None:
        """Fix the run's schema.

        Raises:
            HandshakeError: a tensor has no place.
        """
        self._ranks.bind(schema)
        self._schema = schema

    def load(self, tensors: Mapping[str, npt.NDArray[Any]], *, version: int) -> None:
        """Replace all weights; starts vLLM again where it has died.

        Raises:
            SchemaMismatchError: a tensor is missing or has another dtype or shape; nothing was written.
            EngineError: the engine generates and is not paused, or it failed.
        """
        if self._is_dead:
            self._restart()
        self._require_quiet("load")
        self._version = self._label = None
        self._ranks.load(tensors, version=version)
        self._take(version)

    def _restart(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed: nothing can be loaded any more")
        logger.error("vLLM has died: starting it again")
        _RESTARTS.inc()
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = self._driver = None
        self._version = self._label = None
        self._start()
        if self._schema is not None:
            self._ranks.bind(self._schema)
        if self._paused:
            self._pause_scheduler(timeout=CALL_TIMEOUT)

    def _take(self, version: int) -> None:
        """Serve a version from the next `resume` on, or at once when nothing is paused."""
        self._version = self._label = version
        if not self._paused:
            self._ranks.finish(version)
            self._label = None

    def pause(self, *, timeout: timedelta) -> None:
        """Return once no decode step runs and none will start before `resume`; caches are cleared.

        A vLLM that has died counts as paused.

        Raises:
            EngineError: the step in progress did not end in time; the engine is not paused.
        """
        if not self._is_dead:
            try:
                self._pause_scheduler(timeout=timeout)
            except EngineError:
                if not self._paused and not self._is_dead:
                    self._resume_scheduler()
                raise
        self._paused = True

    def _pause_scheduler(self, *, timeout: timedelta) -> None:
        call = self._llm.pause_generation(mode="keep", clear_cache=True)
        wait_for(self._loop, call, what="end the step in progress", timeout=timeout)

    def _resume_scheduler(self) -> None:
        wait_for(self._loop, self._llm.resume_generation(), what="resume", timeout=CALL_TIMEOUT)

    def stage(self, change: Change) -> None:
        """Have every rank check a change and translate it into places of its memory, while it generates."""
        self._ranks.stage(change)

    def apply(self, patches: Iterable[TensorPatch], *, version: int) -> None:
        """Scatter bits into the paused engine and flip its version; without patches only the version flips, unpaused.

        Raises:
            EngineError: it failed; no version is served until a later `apply` or `load` succeeds.
        """
        change = patches if isinstance(patches, Change) else self._change(list(patches), version)
        if not change.patches:
            if self._version is None:
                raise EngineError(
                    f"version {version} changes nothing, but no proved weights are loaded: load them whole"
                )
            self._ranks.label(version)
            self._take(version)
            return
        self._require_quiet("apply")
        self._version = self._label = None
        self._ranks.apply(change)
        self._take(version)

    def _change(self, patches: Sequence[TensorPatch], version: int) -> Change:
        base = self._ranks.held_version
        if base is None:
            raise EngineError(f"version {version} cannot be applied before any weights are loaded: load them whole")
        return Change(patches=patches, base_version=base, version=version)

    def withdraw(self) -> None:
        """Hold no version any more: requests in flight are aborted, and the scheduler pauses until a load."""
        self._version = self._label = None
        if self._is_dead:
            return
        try:
            if not self._paused:
                self._pause_scheduler(timeout=CALL_TIMEOUT)
                self._paused = True
            self._abort_all()
            self._ranks.withdraw()
        except EngineError as error:
            logger.error("vLLM could not be told to hold no version, but nothing is served from it: %s", error)

    def _abort_all(self) -> None:
        requests = list(self._in_flight)
        if requests:
            wait_for(self._loop, self._llm.abort(requests), what="abort requests", timeout=CALL_TIMEOUT)

    def resume(self) -> None:
        """Let generation go on under the version held; without one the engine stays as it is."""
        if self._version is None or self._is_dead:
            return
        if self._label is not None:
            self._ranks.finish(self._label)
            self._label = None
        if self._paused:
            self._resume_scheduler()
            self._paused = False

    def digest(self, names: Iterable[str]) -> Mapping[str, TensorDigest]:
        """Digest live weights in the ranks' memory, by the run's names."""
        return self._ranks.digest(names)

    def digest_at(self, patches: Iterable[TensorPatch]) -> Mapping[str, TensorDigest]:
        """Digest live weights at the positions of patches, by the run's names."""
        if isinstance(patches, Change):
            return self._ranks.digest_at(patches)
        return self._ranks.digest_at(self._change(list(patches), self._ranks.held_version or 0))

    # The seam: tokens.

    def encode_chat(self, prompt: str) -> npt.NDArray[np.int32]:
        """Return the token ids of one user message, ready for the assistant's turn."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode_text(self, token_ids: npt.NDArray[np.int32]) -> str:
        """Return the text of completion tokens without special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Complete prompts; updates may land between decode steps.

        Raises:
            EngineError: no version is served, weights were lost on the way, or vLLM failed.
        """
        if not self._generating.acquire(blocking=False):
            raise EngineError("a batch is in progress: generate from one thread")
        try:
            if self.version is None:
                raise EngineError("the engine holds no proved weights, so nothing is served: wait for the next version")
            call = asyncio.run_coroutine_threadsafe(self._generate(requests), self._loop)
            generations = self._result(call)
        except EngineError:
            raise
        except Exception as error:  # the edge of vLLM, which raises all kinds
            raise EngineError(f"vLLM failed to generate: {error!r}") from error
        finally:
            self._generating.release()
        if self.version is None and not self._closed:
            raise EngineError("the weights were lost while a batch was generated: its completions are given up")
        return generations

    def _result(self, call: Future[Sequence[Generation]]) -> Sequence[Generation]:
        while True:
            try:
                return call.result(_POLL_SECONDS)
            except FutureTimeoutError:
                if call.done():
                    raise
                if not self._thread.is_alive():
                    raise EngineError("the engine was closed while a batch was generated") from None

    async def _generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        return await asyncio.gather(*(self._complete(request) for request in requests))

    async def _complete(self, request: GenerationRequest) -> Generation:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_requests += 1
        temperature = request.sampling.temperature
        request_id = f"{request.request_id}-{self._num_requests}"
        sampling = SamplingParams(
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            max_tokens=request.sampling.max_new_tokens,
            seed=request.seed & _SEED_MASK,
            logprobs=0,
            stop_token_ids=self._eos_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final: Any = None
        self._in_flight.add(request_id)
        try:
            prompt = {"prompt_token_ids": request.prompt_token_ids.tolist()}
            async for output in self._llm.generate(prompt, sampling, request_id):
                final = output
        finally:
            self._in_flight.discard(request_id)
        if final is None:
            raise EngineError(f"vLLM gave no result for request {request.request_id}")
        return _generation(request, final.outputs[0])

    def _require_quiet(self, what: str) -> None:
        if self._in_flight and not self._paused:
            raise EngineError(f"{what} needs a paused engine while a batch is generated: pause it first")

    def close(self) -> None:
        """Abort what is in flight, end vLLM and its processes, and remove the exchange directory."""
        if self._closed:
            return
        self._closed = True
        self._version = None
        if self._llm is not None:
            try:
                if not self._is_dead:
                    self._abort_all()
                    until = time.monotonic() + ABORT_TIMEOUT.total_seconds()
                    while self._in_flight and time.monotonic() < until:
                        time.sleep(_POLL_SECONDS / 100)
            except EngineError as error:
                logger.warning("requests in flight were not aborted: %s", error)
            self._llm.shutdown()
            # Let go of it while the interpreter is whole: it shuts down again when it is collected.
            self._llm = self._driver = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT.total_seconds())
            self._loop.close()
        shutil.rmtree(self._exchange, ignore_errors=True)


def _generation(request: GenerationRequest, output: Any) -> Generation:
    tokens = np.array(output.token_ids, np.int32)
    chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or [], strict=True)]
    logprobs = np.array(chosen, np.float32)
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"request {request.request_id} has log-probabilities that are not finite: the weights are broken"
        )
    reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(output.finish_reason, FinishReason.ABORT)
    return Generation(
        request_id=request.request_id,
        completion_token_ids=tokens,
        logprobs=logprobs,
        spans=tuple(
            VersionSpan(version=int(span.version), start=span.start, stop=span.end)
            for span in output.weight_versions or ()
        ),
        finish_reason=reason,
    )


def _prepare_environment() -> None:
    """Set what vLLM reads from the environment of its processes, where the user has not.

    Raises:
        ConfigError: the user lets vLLM load other plugins only.
    """
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and BACKEND not in plugins.split(","):
        raise ConfigError(f"VLLM_PLUGINS is {plugins!r}, which keeps vLLM from loading {BACKEND}: add it")
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)


def _eos_ids(directory: Path, tokenizer: Any) -> Sequence[int]:
    """Return every token that ends a completion, from the generation config, the config, or the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return list(found) if isinstance(found, list) else [int(found)]
    if tokenizer.eos_token_id is None:
        raise ConfigError("the model names no end-of-sequence token, so completions would never end: set eos_token_id")
    return [int(tokenizer.eos_token_id)]
