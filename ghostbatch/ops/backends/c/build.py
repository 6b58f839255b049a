"""Compiles the C kernels on first use, with the C compiler of the machine.

That takes a second or two per dtype and happens once: the library is kept in the user's cache
folder ($XDG_CACHE_HOME/ghostbatch, or ~/.cache/ghostbatch). It uses the OpenMP that PyTorch has
loaded and is linked against none; where PyTorch has other threads it does not load.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("kernels.c")
CPU = Path("/proc/cpuinfo")
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
    compiler = find_compiler()
    if dtype not in TYPES or compiler is None:
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


def _load(compiler: tuple[str, ...], options: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache; compile it first if it is not there."""
    try:
        folder = _cache_folder()
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        with tempfile.TemporaryDirectory(prefix="ghostbatch-") as private:
            return ctypes.CDLL(str(_compile(compiler, options, Path(private) / "norm.so")))
    path = folder / f"norm-{_key(compiler, options)}.so"
    if not _is_complete(path):
        with tempfile.TemporaryDirectory(dir=folder) as private:
            built = _compile(compiler, options, Path(private) / path.name)
            with built.open("ab") as file:
                file.write(hashlib.sha256(built.read_bytes()).digest())
            built.replace(path)
    return ctypes.CDLL(str(path))


def _is_complete(path: Path) -> bool:
    """Return whether a library ends in its checksum: one cut short would crash Python."""
    content = path.read_bytes() if path.exists() else b""
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


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


def _cache_folder() -> Path:
    """Return the folder of compiled libraries, which this user can write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ghostbatch"
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(folder)
    return folder


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
