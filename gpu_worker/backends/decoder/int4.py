"""4-bit weights in groups of 32, each with a scale and an offset (asymmetric), kept as ggml's Q4_1 blocks: 5 bits a
weight. What a GGUF file has as Q4_0 or Q4_1 is taken as it is.

A few rows are multiplied by int4_products.c, which reads the blocks; for many rows, for other devices than a CPU, and
without a compiler, the weights are widened first. The kernel rounds the rows to 8 bits, as llama.cpp does.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.native import library_of
from gpu_worker.backends.gguf_file import GROUP, Q4_1_BYTES, widened

SOURCE = Path(__file__).with_name("int4_products.c")
ROWS_MAX = 64
"""Up to this many rows the kernel is the faster way; beyond, widening the weights pays."""
PARALLEL_FROM = 512
"""With fewer outputs a second thread costs more than it saves."""


class Int4Linear:
    """Implements linear.Linear. blocks: (out, in / 32, 20) bytes."""

    def __init__(self, blocks: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._blocks = blocks.contiguous()
        self._bias = bias
        self._dtype = dtype
        self._kernel = kernel() if blocks.device.type == "cpu" else None

    @property
    def size_bytes(self) -> int:
        return self._blocks.numel() + (0 if self._bias is None else self._bias.numel() * self._bias.element_size())

    @property
    def tensors(self) -> list[Tensor]:
        return [self._blocks] if self._bias is None else [self._blocks, self._bias]

    def __call__(self, states: Tensor) -> Tensor:
        if self._kernel is None or states.shape[0] > ROWS_MAX:
            weight = widened(self._blocks).flatten(1).to(self._dtype)
            return functional.linear(states, weight, self._bias)
        product = self._kernel(states.float(), self._blocks).to(self._dtype)
        return product if self._bias is None else product + self._bias


class Int4Kernel:
    """The compiled functions on tensors, shared out to the threads that torch has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._round, self._multiply = library.int4_rounded, library.int4_products
        self._round.restype = self._multiply.restype = None
        self._round.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3]
        self._multiply.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 5]
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, states: Tensor, blocks: Tensor) -> Tensor:
        """states (rows, in) float32 -> (rows, out)"""
        states = states.contiguous()
        count, (outs, groups) = states.shape[0], blocks.shape[:2]
        rounded = torch.empty((count, groups, GROUP), dtype=torch.int8)
        scales, sums = torch.empty((2, count, groups))
        self._round(states.data_ptr(), count, groups, *(one.data_ptr() for one in (rounded, scales, sums)))
        out = torch.empty((count, outs))
        places = [tensor.data_ptr() for tensor in (out, blocks, rounded, scales, sums)]
        parts = torch.get_num_threads() if outs >= PARALLEL_FROM else 1

        def run(part: int) -> None:
            self._multiply(*places, count, groups, outs, part * outs // parts, (part + 1) * outs // parts)

        if parts > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(parts - 1)
        waiting = [self._pool.submit(run, part) for part in range(1, parts)] if self._pool is not None else []
        run(0)
        for one in waiting:
            one.result()
        return out


@functools.cache
def kernel() -> Int4Kernel | None:
    """None without a compiler."""
    library = library_of(SOURCE)
    return None if library is None else Int4Kernel(library)


def int4_blocks(weight: Tensor) -> Tensor:
    """(out, in) -> (out, in / 32, 20): the range of each group in 15 steps. Raises ModelRefused for another width."""
    outs, width = weight.shape
    if width % GROUP:
        raise ModelRefused(
            "invalid_model_config", f"backend.config.precision: int4 needs widths that {GROUP} divides; one is {width}."
        )
    groups = weight.float().view(outs, -1, GROUP)
    least, most = groups.aminmax(dim=-1, keepdim=True)
    ends = torch.cat([(most - least) / 15, least], dim=-1).half()
    scale, offset = ends.float().split(1, dim=-1)
    steps = torch.where(scale > 0, (groups - offset) / scale, 0).round().clamp_(0, 15).to(torch.uint8)
    halves = steps[..., : GROUP // 2] | (steps[..., GROUP // 2 :] << 4)
    blocks = torch.cat([ends.view(torch.uint8), halves], dim=-1)
    assert blocks.shape[-1] == Q4_1_BYTES
    return blocks
