"""Compile the native kernel when a wheel is built; without a working C compiler the wheel is pure Python.

Called by hatchling for every wheel, editable ones too. SPARSEWIRE_NATIVE is `auto` (the default), `0` (do not compile) or
`require` (fail without a compiler: CI, images, release wheels); CC names a compiler to try first. kernel.c is compiled
once per instruction set and dispatch.c chooses at run time, so one wheel serves every processor of its platform and
every Python: the interface is plain C. Warnings are shown with `pip install -v`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "sync/sparsewire/sync/native"
FLAGS = ["-O3", "-std=c11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
AVX2 = "-mavx2 -mbmi -mbmi2 -mpopcnt -mlzcnt -mpclmul"
AVX512 = AVX2 + " -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vbmi2 -mavx512vpopcntdq -mgfni"
LEVELS = {"base": "", "avx2": AVX2, "avx512": AVX512}


def compilers() -> list[list[str]]:
    """Return the commands to try, the one in CC first."""
    found = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found += [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        # Its default is -march=native, hence -mcpu.
        found.append([sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-s"])
    return found


def compile_kernel(cc: list[str], source: Path, target: Path) -> None:
    """Compile the library for this machine's architecture into `target`, which appears complete.

    Raises:
        OSError: the compiler cannot be started.
        CalledProcessError: it failed.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    with tempfile.TemporaryDirectory() as scratch:
        # All levels at once: each takes some seconds.
        parts, running = [], []
        for level, isa in LEVELS.items() if x86 else [("base", "")]:
            parts.append(f"{scratch}/{level}.o")
            command = [*cc, *FLAGS, *isa.split(), f"-DLEVEL={level}", "-c", str(source / "kernel.c"), "-o", parts[-1]]
            running.append(subprocess.Popen(command))
        for process in running:
            process.wait()
        for process in running:
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)
        link = [*cc, *FLAGS, "-shared", str(source / "dispatch.c"), *parts, "-o", f"{scratch}/kernel.so"]
        subprocess.run(link, check=True)
        # Replaced, never overwritten: a process may have the old one mapped.
        fresh = target.with_suffix(".new")
        shutil.copyfile(f"{scratch}/kernel.so", fresh)
        fresh.replace(target)


class KernelHook(BuildHookInterface[Any]):
    """Adds the compiled library to the wheel and tags it with the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects files; a library from an earlier build is never packed."""
        wish, source = os.environ.get("SPARSEWIRE_NATIVE", "auto"), Path(self.root, NATIVE)
        (target := source / "kernel.so").unlink(missing_ok=True)
        for cc in compilers() if wish != "0" else []:
            try:
                compile_kernel(cc, source, target)
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"native kernel: {error}")
                continue
            platform_tag = self.build_config.builder.get_best_matching_tag().split("-", 2)[2]
            build_data.update(pure_python=False, tag=f"py3-none-{platform_tag}", artifacts=[f"/{NATIVE}/kernel.so"])
            return
        if wish == "require":
            raise RuntimeError("native kernel: no working C compiler; set CC or install one (PyPI: ziglang)")
        self.app.display_warning("native kernel: no working C compiler; building the pure package")
