"""Fuzz the native kernel: compile it with address and undefined-behaviour sanitizers, replay the corpus, mutate it.

    python tests/fuzz/run.py --seconds 60

Any C compiler with sanitizers will do; a mutator of our own then edits the corpus at random. With `--engine libfuzzer` it
takes clang's, which follows coverage and keeps what it finds interesting in `--keep DIR`. Ends with status 1 when the
kernel crashed, left its memory, did other things at one instruction set than at another, or lost a change.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NATIVE = ROOT / "sync/sparsewire/sync/native"
SANITIZERS = ["-g", "-O1", "-std=c11", "-fno-sanitize-recover=all", "-ffp-contract=off"]


def levels() -> dict[str, list[str]]:
    """Return the flags of every level, those that the package is built with."""
    sys.path.insert(0, str(ROOT))
    from hatch_build import LEVELS

    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {name: flags.split() for name, flags in LEVELS.items() if x86 or name == "base"}


def build(compiler: str, target: Path, *, libfuzzer: bool, portable: bool) -> None:
    """Compile kernel and fuzz target into `target`."""
    library = "fuzzer-no-link," if libfuzzer else ""
    flags = [*SANITIZERS, f"-fsanitize={library}address,undefined", f"-I{NATIVE}"]
    if portable:
        flags.append("-DSW_NO_SSE2")
    objects = []
    for level, isa in levels().items():
        objects.append(str(target.with_name(f"{level}.o")))
        command = [compiler, *flags, *isa, f"-DLEVEL={level}", "-c", str(NATIVE / "kernel.c"), "-o", objects[-1]]
        subprocess.run(command, check=True)
    link = ["-fsanitize=fuzzer"] if libfuzzer else ["-DSW_STANDALONE"]
    sources = [str(NATIVE / "dispatch.c"), str(HERE / "classed.c")]
    subprocess.run([compiler, *flags, *link, *sources, *objects, "-o", str(target)], check=True)


def main() -> int:
    """Build, run, and return the exit status."""
    parser = argparse.ArgumentParser(description="Fuzz the native kernel with sanitizers.")
    parser.add_argument("--seconds", type=int, default=60, help="how long to mutate after the replay (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the random edits")
    parser.add_argument("--compiler", default=None, help="C compiler; default cc, clang with libfuzzer")
    parser.add_argument("--engine", choices=["own", "libfuzzer"], default="own", help="what mutates the corpus")
    parser.add_argument(
        "--portable", action="store_true", help="build the base level without SSE2, as other machines do"
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="folder for what libfuzzer finds; default a temporary one"
    )
    options = parser.parse_args()
    libfuzzer = options.engine == "libfuzzer"
    compiler = options.compiler or shutil.which("clang" if libfuzzer else "cc")
    if compiler is None:
        print("fuzz: no C compiler found; install one or name it with --compiler", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "classed")
        build(compiler, target, libfuzzer=libfuzzer, portable=options.portable)
        corpus = sorted(str(path) for path in (HERE / "corpus").iterdir())
        if libfuzzer:
            keep = options.keep or Path(scratch, "kept")
            keep.mkdir(parents=True, exist_ok=True)
            limits = [f"-max_total_time={options.seconds}", "-max_len=8192", "-timeout=20", f"-seed={options.seed}"]
            return subprocess.run([target, *limits, keep, HERE / "corpus"], check=False).returncode
        return subprocess.run([target, str(options.seconds), str(options.seed), *corpus], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
