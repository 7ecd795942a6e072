"""paged_attention.c, compiled when a decoder is loaded, where a C compiler is installed; else torch does without it.

Compiling takes about a second, once per engine process. torch.compile would need the same compiler, and much longer.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("paged_attention.c")
COMPILERS = ("gcc", "cc", "clang")
FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC", "-std=c11"),
    # What of -ffast-math lets sums be vectorised. The flag itself would change how the whole process rounds.
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only"),
)
COMPILE_S_MAX = 60
PARALLEL_FROM = 4
"""With fewer sequences a second thread costs more than it saves."""


@functools.cache
def compiled() -> Any | None:
    """The function, or None without a compiler or when it fails."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "paged_attention.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(library), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S_MAX)
        except (subprocess.SubprocessError, OSError):
            return None
        function = ctypes.CDLL(str(library)).paged_attention
    function.restype = None
    function.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 10, ctypes.c_float, ctypes.c_void_p]
    return function


class PagedKernel:
    """The compiled function on tensors, shared out to the threads that torch has."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads - 1) if self._threads > 1 else None

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, window: int | None
    ) -> Tensor:
        """queries (n, heads, width); keys, values (pages, block, KV heads, width) of a layer; table (n, pages)."""
        queries = queries.contiguous()
        count, heads, width = queries.shape
        block, kv_heads = keys.shape[1:3]
        pages = table.shape[1]
        longest = pages * block
        group = heads // kv_heads
        out = torch.empty_like(queries)
        parts = self._threads if self._pool is not None and count >= PARALLEL_FROM else 1
        scratch = torch.empty((parts, group * longest), dtype=torch.float32)

        def run(part: int) -> None:
            self._function(
                *(tensor.data_ptr() for tensor in (out, queries, keys, values, table, lengths)),
                *(part * count // parts, (part + 1) * count // parts, pages, block, keys.stride(0), kv_heads, group),
                *(width, window or 0, longest, width**-0.5, scratch[part].data_ptr()),
            )

        waiting = [self._pool.submit(run, part) for part in range(1, parts)] if self._pool is not None else []
        run(0)
        for one in waiting:
            one.result()
        return out


def kernel_for(device: str, dtype: torch.dtype) -> PagedKernel | None:
    """For float32 on a CPU with a compiler; None: use torch's attention."""
    if torch.device(device).type != "cpu" or dtype != torch.float32:
        return None
    function = compiled()
    return None if function is None else PagedKernel(function)
