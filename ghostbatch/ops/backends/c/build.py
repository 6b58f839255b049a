"""Compiles the C kernels on first use, with the C compiler of the machine.

That takes a second or two per dtype and happens once: the library is kept in the user's cache
folder (see `cache`), or, where that cannot be trusted, made for this process alone. It uses the
OpenMP that PyTorch has loaded and is linked against none; where PyTorch has other threads it does
not load.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import torch

from ghostbatch.ops.backends.c.cache import BUILD, open_cache, remove_leftovers

log = logging.getLogger("ghostbatch")

SOURCE = Path(__file__).with_name("kernels.c")
CPU = Path("/proc/cpuinfo")
PRIVATE = "ghostbatch-kernels-"
"""How the names of temporary folders begin, where there is no cache."""
COMPILE = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC")
TYPES = {
    torch.float32: ("-DREAL=float", "-DSTORED=float"),
    torch.float64: ("-DREAL=double", "-DSTORED=double"),
    torch.bfloat16: ("-DREAL=float", "-DSTORED=uint16_t", "-DBFLOAT16"),
}


class BuildError(RuntimeError):
    """The kernels do not compile, or do not load."""


@lru_cache
def library(dtype: torch.dtype, *options: str) -> ctypes.CDLL | None:
    """Return the kernels for tensors of this dtype; None if it has none or there is no compiler."""
    if dtype not in TYPES:
        return None
    compiler = find_compiler()
    if compiler is None:
        _log_no_compiler()
        return None
    try:
        return _load(compiler, (*COMPILE, *TYPES[dtype], *options))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).splitlines()
        raise BuildError(next((line for line in said if "error" in line), said[0])) from error


def find_compiler() -> tuple[str, ...] | None:
    """Return the path of the C compiler, $CC if that is set, and its options; only on Linux."""
    if sys.platform != "linux":
        return None
    wanted = shlex.split(os.environ.get("CC", ""))
    for name, *options in (wanted,) if wanted else (("cc",), ("gcc",), ("clang",)):
        if path := shutil.which(name):
            return path, *options
    return None


@lru_cache
def _log_no_compiler() -> None:
    if sys.platform == "linux":  # elsewhere there are no kernels to compile
        log.info("no C compiler ($CC, cc, gcc or clang) is found, so slower tensor code is used")


def _load(compiler: tuple[str, ...], options: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache; compile it first if it is not there."""
    name = f"norm-{_key(compiler, options)}.so"
    with ExitStack() as stack:
        try:
            cache = stack.enter_context(open_cache())
        except (OSError, RuntimeError) as reason:  # RuntimeError: there is no home folder
            log.info("compiling the CPU kernels for this process alone: %s", reason)
            remove_leftovers(Path(tempfile.gettempdir()), PRIVATE)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=PRIVATE))
            return ctypes.CDLL(str(_compile(compiler, options, Path(folder) / name)))
        kept = cache.load(name)
        if kept is not None:
            return kept
        log.info("compiling the CPU kernels; this happens once per machine and takes a few seconds")
        remove_leftovers(cache.path, BUILD)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=BUILD, dir=cache.path))
        return cache.keep(_compile(compiler, options, Path(folder) / name), name)


def _compile(compiler: tuple[str, ...], options: tuple[str, ...], path: Path) -> Path:
    """Compile and link in a new session, so that Ctrl-C does not reach the compiler."""
    compiled = str(path.with_suffix(".o"))
    for arguments in (
        (*options, "-c", str(SOURCE), "-o", compiled),
        ("-shared", compiled, "-o", str(path), "-lm"),
    ):
        command = (*compiler, *arguments)
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            start_new_session=True,
        )
    return path


def _key(compiler: tuple[str, ...], options: tuple[str, ...]) -> str:
    """Return a hash of what a library is made from and for: source, options, compiler, CPU."""
    seen = Path(compiler[0]).resolve().stat()
    cpu = [
        line
        for line in CPU.read_text().split("\n\n")[0].splitlines()
        if line.startswith(("model name", "flags", "Features", "CPU part"))
    ]
    made_from = (SOURCE.read_text(), compiler, options, seen.st_size, seen.st_mtime_ns, cpu)
    return hashlib.sha256(repr(made_from).encode()).hexdigest()[:20]
