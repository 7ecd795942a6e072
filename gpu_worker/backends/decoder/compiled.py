"""paged_attention.c on tensors, where a C compiler is installed; else torch does without it.

torch.compile would need the same compiler, and much longer.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_worker.backends.decoder.attention import Layer
from gpu_worker.backends.decoder.native import library_of

SOURCE = Path(__file__).with_name("paged_attention.c")
PARALLEL_FROM = 4
"""With fewer sequences a second thread costs more than it saves."""


@functools.cache
def compiled() -> Any | None:
    """The function, or None without a compiler or when it fails."""
    library = library_of(SOURCE)
    if library is None:
        return None
    function = library.paged_attention
    function.restype = None
    function.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 10, *[ctypes.c_float] * 2, ctypes.c_void_p]
    return function


class PagedKernel:
    """The compiled function on tensors, shared out to the threads that torch has."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads - 1) if self._threads > 1 else None

    def __call__(self, queries: Tensor, table: Tensor, lengths: Tensor, layer: Layer) -> Tensor:
        """queries (n, heads, width); table (n, pages). Implements attention.Kernel."""
        keys, values = layer.keys, layer.values
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
                *(width, layer.window or 0, longest, layer.scale, layer.cap or 0.0, scratch[part].data_ptr()),
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
