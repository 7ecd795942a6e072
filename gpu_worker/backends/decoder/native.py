"""C files of this folder as loaded libraries, where a C compiler is installed.

Compiling takes about a second, once per machine: what came of it is kept, under a name that says from what it was made.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

COMPILERS = ("gcc", "cc", "clang")
FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC", "-std=c11"),
    # What of -ffast-math lets sums be vectorised. The flag itself would change how the whole process rounds.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only"),
)
COMPILE_S_MAX = 60
CPUINFO = Path("/proc/cpuinfo")
SEEN_BY_COMPILER = (b"flags", b"Features", b"cpu family", b"model", b"CPU part", b"CPU implementer")
"""Lines of CPUINFO that -march=native depends on."""


@functools.cache
def library_of(source: Path) -> ctypes.CDLL | None:
    """None without a compiler or when it fails."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    with suppress(OSError, RuntimeError):  # no home, or one that cannot be written to
        return built(source, compiler, Path.home() / ".cache" / "sie-stream" / "compiled")
    with suppress(OSError), tempfile.TemporaryDirectory() as folder:
        return built(source, compiler, Path(folder))
    return None


def built(source: Path, compiler: str, folder: Path) -> ctypes.CDLL | None:
    """The library, from `folder` or made there; None when the compiler fails. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = folder / f"{source.stem}-{_key(source, compiler)}.so"
    if kept.exists():
        with suppress(OSError):  # not a library: it is made anew
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / kept.name
        command = [compiler, *FLAGS, str(source), "-o", str(fresh), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S_MAX)
        except subprocess.SubprocessError:
            return None
        fresh.replace(kept)
    return ctypes.CDLL(str(kept))


def _key(source: Path, compiler: str) -> str:
    """Of all that the code depends on: what is compiled, by which compiler, how, and for which processor."""
    program = Path(compiler).resolve()
    made = program.stat()
    parts = [source.read_bytes(), " ".join(FLAGS).encode(), f"{program} {made.st_size} {made.st_mtime_ns}".encode()]
    try:
        lines = CPUINFO.read_bytes().splitlines()
        parts += sorted({line for line in lines if line.startswith(SEEN_BY_COMPILER)})
    except OSError:
        parts.append(platform.processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
