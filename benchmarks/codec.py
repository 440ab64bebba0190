"""How small and how fast the delta format is, against what others ship, on the same input in one run.

    python benchmarks/codec.py [--smoke] [--trace DIR] [--json FILE]

Sizes are exact. "payload" is the chunks, "all" is what a publisher stores for the version: packs and manifest. The bound
is the entropy of positions and steps given the exponent of the old weight. Speeds are of one thread unless said, in GB/s
of one bf16 array, medians of rounds that measure everything in turn; their ratios are to a bare loop that compares the two
arrays with the machine's best instructions. "predicted" is for deltas of traces that have one before them, with that as history. ARCv3 is measured when `fireworks-delta-compression` is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
from bound import exponent_bound
from figures import Anchors, Calibration, Sizes, Speeds, show
from inputs import SYNTHETIC_SCALES, Delta, Words, overwrite_words, synthetic, trace
from peers import (
    ArcRun,
    arc_is_installed,
    gaps_zstd,
    overwrite_stream,
    run_arc,
    xor_stream,
    xor_zstd,
)

from sparsewire.sync.codec import (
    ChunkPlan,
    CutsMemory,
    DecodedChunk,
    EncodedChunk,
    Profile,
    Segment,
    decode_chunk,
    encode_chunk,
    plan_segments,
)
from sparsewire.sync.codec.classed import encode_classed
from sparsewire.sync.codec.cuts import fit_partition
from sparsewire.sync.delta import LastChange, TensorPatch, apply_patch, changed_positions
from sparsewire.sync.digest import digest_bits
from sparsewire.sync.native import kernel
from sparsewire.sync.publisher import Publisher
from sparsewire.sync.store.memory import forget_memory_store
from sparsewire.sync.types import Bits, Dtype

ROUNDS = 7
ARC_RUNS = 3
"""As installed it races candidates against a clock: the median counts, the best is shown beside it."""

PUBLISHED_OVERWRITE_AND_XOR = {1e-4: (0.74, 0.33), 1e-3: (7.02, 3.23), 1e-2: (25.70, 14.93)}
"""MB by amplitude in Table 2 of the NeMo-DCR paper, on 20 million elements."""


class Codec:
    """A delta ready to be encoded and decoded chunk by chunk, as publisher and mirror do."""

    def __init__(self, *, delta: Delta, profile: Profile, last: LastChange | None = None) -> None:
        self._profile = profile
        self._last = last
        self._names = sorted(delta.old)
        self._old = [delta.old[name].reshape(-1) for name in self._names]
        self._new = [delta.new[name].reshape(-1) for name in self._names]
        extents = [(number, 0, len(bits), Dtype.BF16) for number, bits in enumerate(self._old)]
        self._plans = list(plan_segments(extents))
        self._cuts = CutsMemory()

    def _base(self, segment: Segment) -> Bits:
        return self._old[segment.tensor][segment.start : segment.stop]

    def _encode(self, plan: ChunkPlan) -> EncodedChunk:
        place = plan.segments[0]
        chunk = encode_chunk(
            plan.dtype,
            plan.segments,
            [self._base(segment) for segment in plan.segments],
            [self._new[segment.tensor][segment.start : segment.stop] for segment in plan.segments],
            profile=self._profile,
            cuts=self._cuts.suggest(place),
            last=self._last,
        )
        self._cuts.remember(place, chunk.cuts)
        return chunk

    def _decode(self, payload: bytes) -> DecodedChunk:
        return decode_chunk(payload, schema=None, base=self._base, last=self._last)

    def encode(self, pool: ThreadPoolExecutor | None = None) -> list[bytes]:
        """Encode all chunks; digests included."""
        chunks = pool.map(self._encode, self._plans) if pool else map(self._encode, self._plans)
        return [chunk.payload for chunk in chunks]

    def decode(self, payloads: Sequence[bytes], pool: ThreadPoolExecutor | None = None) -> list[DecodedChunk]:
        """Decode all chunks against the base and prove them by their checks."""
        return list(pool.map(self._decode, payloads) if pool else map(self._decode, payloads))

    def check(self, decoded: Sequence[DecodedChunk]) -> None:
        """Apply what was decoded and compare every bit."""
        live = [bits.copy() for bits in self._old]
        for chunk in decoded:
            for patch in chunk.patches:
                apply_patch(live[patch.tensor], patch)
        if not all(np.array_equal(a, b) for a, b in zip(live, self._new, strict=True)):
            raise SystemExit("decoded bits differ from those encoded")

    def scatter_seconds(self, decoded: Sequence[DecodedChunk]) -> float:
        """Return how long writing all patches into a mirror takes."""
        live = [bits.copy() for bits in self._old]

        def scatter() -> None:
            for chunk in decoded:
                for patch in chunk.patches:
                    apply_patch(live[patch.tensor], patch)

        return seconds(scatter)


def last_change(delta: Delta) -> LastChange | None:
    """Return the change that led to `delta.old`, None when it is not known."""
    if delta.before is None:
        return None
    patches = []
    for number, name in enumerate(sorted(delta.old)):
        before, old = delta.before[name].reshape(-1), delta.old[name].reshape(-1)
        at = changed_positions(before, old)
        patches.append(TensorPatch(tensor=number, start=0, count=len(old), indices=at, values=old[at], undo=before[at]))
    return LastChange.of(patches)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def peak_extra(into: dict[str, int], name: str) -> Iterator[ThreadPoolExecutor]:
    """Give a new thread, whose work space is yet to be made, and note the most memory that was held beyond before."""
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            yield pool
        into[name] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def count_changed(old: Words, new: Words) -> int:
    """Compare two arrays by a bare loop, the native one where there is a kernel."""
    native = kernel()
    return int(np.count_nonzero(old != new)) if native is None else native.count_changed(old, new)


def halves(old: Words, new: Words) -> list[tuple[Words, Words]]:
    middle = len(old) // 2
    return [(old[:middle], new[:middle]), (old[middle:], new[middle:])]


def stored_bytes(delta: Delta) -> int:
    """Publish both versions to a store and return what the second one took: packs and manifest."""
    name = uuid.uuid4().hex
    with Publisher.open(f"memory://{name}", run="benchmark") as publisher:
        for step, version in enumerate((delta.old, delta.new)):
            publisher.publish(dict(version), step=step)
        report = publisher.last_report
    forget_memory_store(name)
    if report is None:
        raise SystemExit("the publisher published nothing")
    return report.wire_bytes


def measure(delta: Delta, rounds: int) -> tuple[Sizes, Speeds]:
    """Measure one delta; everything is decoded and compared first."""
    classed = Codec(delta=delta, profile=Profile.CLASSED)
    base_free = Codec(delta=delta, profile=Profile.BASE_FREE)
    payloads, base_free_payloads = classed.encode(), base_free.encode()
    decoded = classed.decode(payloads)
    classed.check(decoded)
    base_free.check(base_free.decode(base_free_payloads))
    last = last_change(delta)
    predicted = None if last is None else Codec(delta=delta, profile=Profile.CLASSED, last=last)
    predicted_payloads = [] if predicted is None else predicted.encode()
    names = sorted(delta.old)
    old = np.concatenate([delta.old[name].reshape(-1) for name in names])
    new = np.concatenate([delta.new[name].reshape(-1) for name in names])
    changed, gigabytes = delta.num_changed, old.nbytes / 1e9

    def arc(compression_format: str, runs: int) -> list[ArcRun]:
        return [run_arc(delta, compression_format) for _ in range(runs)] if arc_is_installed() else []

    arc_v2, arc_v3 = arc("arc_v2", 1), arc("arc_v3", ARC_RUNS)
    peaks: dict[str, int] = {}
    with peak_extra(peaks, "encode") as thread:
        classed.encode(thread)
    with peak_extra(peaks, "decode") as thread:
        for payload in payloads:
            classed.decode([payload], thread)
    timed: dict[str, list[float]] = {}
    with ThreadPoolExecutor(2) as pool:
        works: dict[str, Callable[[], object]] = {
            "compare": lambda: count_changed(old, new),
            "encode": classed.encode,
            "decode": lambda: [classed.decode([payload]) for payload in payloads],
            "compare two": lambda: list(pool.map(lambda half: count_changed(*half), halves(old, new))),
            "encode two": lambda: classed.encode(pool),
            "decode two": lambda: classed.decode(payloads, pool),
            "base-free encode": base_free.encode,
            "base-free decode": lambda: base_free.decode(base_free_payloads),
        }
        if predicted is not None:
            predicted.check(predicted.decode(predicted_payloads))
            works["predicted encode"] = predicted.encode
            works["predicted decode"] = lambda: [predicted.decode([payload]) for payload in predicted_payloads]
        for _ in range(rounds):
            for name, work in works.items():
                timed.setdefault(name, []).append(seconds(work))
    took = {name: statistics.median(values) for name, values in timed.items()}

    def of_compare(name: str, compare: str) -> float:
        """The ratio within each round, so that what else the machine did weighs on both."""
        return statistics.median(c / t for c, t in zip(timed[compare], timed[name], strict=True))

    bound = exponent_bound(old, new)
    sizes = Sizes(
        input=delta.name,
        num_elements=old.size,
        num_changed=changed,
        density=changed / old.size,
        bound=bound.num_bytes / changed,
        bound_position_bits=bound.position_bits / changed,
        bound_step_bits=bound.step_bits / changed,
        payload=sum(map(len, payloads)) / changed,
        all=stored_bytes(delta) / changed,
        share_of_full=sum(map(len, payloads)) / old.nbytes,
        base_free=sum(map(len, base_free_payloads)) / changed,
        gaps_zstd=gaps_zstd(old, new) / changed,
        xor_zstd=xor_zstd(old, new) / changed,
        arc_v3_median=statistics.median(run.num_bytes for run in arc_v3) / changed if arc_v3 else None,
        arc_v3_best=min(run.num_bytes for run in arc_v3) / changed if arc_v3 else None,
        arc_v2=arc_v2[0].num_bytes / changed if arc_v2 else None,
        predicted=sum(map(len, predicted_payloads)) / changed if predicted else None,
    )
    speeds = Speeds(
        input=delta.name,
        compare=gigabytes / took["compare"],
        compare_two_threads=gigabytes / took["compare two"],
        encode=gigabytes / took["encode"],
        encode_two_threads=gigabytes / took["encode two"],
        encode_of_compare=of_compare("encode", "compare"),
        encode_two_threads_of_compare=of_compare("encode two", "compare two"),
        decode=gigabytes / took["decode"],
        decode_two_threads=gigabytes / took["decode two"],
        decode_of_compare=of_compare("decode", "compare"),
        predicted_encode=gigabytes / took["predicted encode"] if predicted else None,
        predicted_decode=gigabytes / took["predicted decode"] if predicted else None,
        predicted_encode_of_compare=of_compare("predicted encode", "compare") if predicted else None,
        predicted_decode_of_compare=of_compare("predicted decode", "compare") if predicted else None,
        base_free_encode=gigabytes / took["base-free encode"],
        base_free_decode=gigabytes / took["base-free decode"],
        arc_v3_encode=gigabytes / statistics.median(run.encode_seconds for run in arc_v3) if arc_v3 else None,
        arc_v3_decode=gigabytes / statistics.median(run.decode_seconds for run in arc_v3) if arc_v3 else None,
        scatter_changes_per_second=changed / statistics.median(classed.scatter_seconds(decoded) for _ in range(rounds)),
        encode_peak_extra_bytes=peaks["encode"],
        decode_peak_extra_bytes=peaks["decode"],
    )
    return sizes, speeds


def measure_anchors(delta: Delta, rounds: int) -> Anchors:
    """Measure anchors of the newer version of one delta; they are decoded and compared first."""
    bits = [delta.new[name].reshape(-1) for name in sorted(delta.new)]
    plans = list(plan_segments([(number, 0, len(part), Dtype.BF16) for number, part in enumerate(bits)]))

    def encode(plan: ChunkPlan) -> bytes:
        return encode_chunk(
            plan.dtype, plan.segments, None, [bits[s.tensor][s.start : s.stop] for s in plan.segments]
        ).payload

    def decode(payload: bytes) -> DecodedChunk:
        return decode_chunk(payload, schema=None, base=None)

    payloads = list(map(encode, plans))
    for payload in payloads:
        for patch in decode(payload).patches:
            if not np.array_equal(patch.values, bits[patch.tensor][patch.start : patch.start + patch.count]):
                raise SystemExit("decoded bits differ from those encoded")
    timed: dict[str, list[float]] = {}
    with ThreadPoolExecutor(2) as pool:
        works: dict[str, Callable[[], object]] = {
            "encode": lambda: [encode(plan) for plan in plans],
            "encode two": lambda: list(pool.map(encode, plans)),
            "decode": lambda: [decode(payload).digest_changes for payload in payloads],
            "decode two": lambda: list(pool.map(lambda payload: decode(payload).digest_changes, payloads)),
            "digest": lambda: [digest_bits(part) for part in bits],
            "copy": lambda: [part.copy() for part in bits],
        }
        for _ in range(rounds):
            for name, work in works.items():
                timed.setdefault(name, []).append(seconds(work))
    num_bytes = sum(part.nbytes for part in bits)
    speed = {name: num_bytes / 1e9 / statistics.median(times) for name, times in timed.items()}
    return Anchors(
        input=delta.name,
        share=sum(map(len, payloads)) / num_bytes,
        encode=speed["encode"],
        encode_two_threads=speed["encode two"],
        decode=speed["decode"],
        decode_two_threads=speed["decode two"],
        digest=speed["digest"],
        copy=speed["copy"],
    )


def value_stream_bytes(old: Words, new: Words) -> int:
    """Return what signs, tokens, tables and raw bits of these changes take in classed bodies."""
    total = 0
    for start in range(0, len(old), 4 << 20):
        before, steps = old[start : start + (4 << 20)], (new - old)[start : start + (4 << 20)]
        cuts = fit_partition([before], [before + steps]).cuts
        every = np.arange(len(before))
        # A body of steps of one is all but the steps themselves, and their signs.
        units = len(encode_classed(before, every, np.ones_like(steps), cuts)) - -(-len(steps) // 8)
        total += len(encode_classed(before, every, steps, cuts)) - units
    return total


def calibrate(num_elements: int) -> list[Calibration]:
    """Return Table 2 of the NeMo-DCR paper, scaled to 20 million elements where there are fewer."""
    rows = []
    for amplitude, (overwrite, xor) in PUBLISHED_OVERWRITE_AND_XOR.items():
        old, new = overwrite_words(amplitude, num_elements)
        scale = 20e6 / num_elements / 1e6
        rows.append(
            Calibration(
                amplitude=amplitude,
                overwrite=overwrite_stream(old, new) * scale,
                published_overwrite=overwrite,
                xor=xor_stream(old, new) * scale,
                published_xor=xor,
                ours=value_stream_bytes(old, new) * scale,
            )
        )
    return rows


def deltas(traces: Sequence[Path], num_elements: int) -> Iterator[Delta]:
    """Yield every input, one at a time in memory."""
    for directory in traces:
        yield from trace(directory)
    for label in SYNTHETIC_SCALES:
        yield synthetic(label, num_elements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small inputs, one round")
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="folder of a recorded trace; may repeat"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    num_elements, rounds = (1 << 20, 1) if arguments.smoke else (1 << 26, ROUNDS)
    native = kernel()
    print(f"kernel: {'none, pure NumPy' if native is None else native.isa.name.lower()}; {platform.platform()}")
    if not arc_is_installed():
        print("ARC is NOT measured: pip install fireworks-delta-compression==0.1.0 (benchmarks only)")
    sizes, speeds, anchors = [], [], []
    for delta in deltas(arguments.trace, num_elements):
        of_delta = measure(delta, rounds)
        sizes.append(of_delta[0])
        speeds.append(of_delta[1])
        anchors.append(measure_anchors(delta, rounds))
    calibration = calibrate(1_000_000 if arguments.smoke else 20_000_000)
    show(sizes, speeds, anchors, calibration)
    if arguments.json:
        figures = {
            "machine": platform.platform(),
            "kernel": None if native is None else native.isa.name.lower(),
            "sizes": [asdict(row) for row in sizes],
            "speeds": [asdict(row) for row in speeds],
            "anchors": [asdict(row) for row in anchors],
            "calibration": [asdict(row) for row in calibration],
        }
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
