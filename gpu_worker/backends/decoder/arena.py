"""The memory of the paged KV pool: one allocation per device, cut into pages that all its models share.

A page holds the keys and values of consecutive tokens for all layers of one model, so a block of any model is one page.
A model with small keys and values puts more tokens into a page. Layout of a page: layer, keys | values, token, KV head,
head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.shape import DecoderShape
from gpu_worker.decoding.blocks import BlockPool

BLOCK_TOKENS = 16
"""Tokens of a page for the model that an arena is made for."""
BLOCK_TOKENS_MIN = 8
"""A model that gets fewer into a page has an arena of its own."""
BLOCK_TOKENS_MAX = 256


def token_bytes(shape: DecoderShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_width * dtype.itemsize


class Arena:
    """Pages of one device and the pool that says who holds them."""

    def __init__(self, page_bytes: int, pages: int, device: str, name: str = "arena") -> None:
        """name: unique in the engine process."""
        self.name = name
        self.page_bytes = page_bytes
        self.pool = BlockPool(pages)
        self.device = device
        self.memory = _reserved(pages * page_bytes, device).view(pages, page_bytes)

    @property
    def size_bytes(self) -> int:
        return self.pool.count * self.page_bytes

    def block_tokens(self, shape: DecoderShape, dtype: torch.dtype) -> int:
        """Tokens of this model that fit into a page, a multiple of BLOCK_TOKENS_MIN; 0: the pages are too small."""
        fitting = min(self.page_bytes // token_bytes(shape, dtype), BLOCK_TOKENS_MAX)
        return fitting // BLOCK_TOKENS_MIN * BLOCK_TOKENS_MIN


class Arenas:
    """All arenas of an engine process: usually one for each device."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []

    def arena_for(self, shape: DecoderShape, dtype: torch.dtype, device: str, size_bytes: int) -> Arena:
        """An arena whose pages suit the model; a new one of `size_bytes` if there is none. Raises ModelRefused."""
        for arena in self._arenas:
            if arena.device == device and arena.block_tokens(shape, dtype):
                return arena
        page_bytes = BLOCK_TOKENS * token_bytes(shape, dtype)
        pages = size_bytes // page_bytes
        if pages < 1:
            raise ModelRefused(
                "invalid_model_config",
                f"backend.config.kv_mb: {size_bytes >> 20} MiB hold no page of {page_bytes} bytes "
                f"({BLOCK_TOKENS} tokens of this model).",
            )
        arena = Arena(page_bytes, pages, device, f"arena {len(self._arenas)}")
        self._arenas.append(arena)
        return arena


class HostCopies(Protocol):
    """Pages of one model, copied to host memory and back."""

    @property
    def used_bytes(self) -> int:
        """Of a page."""
        ...

    @property
    def block_tokens(self) -> int:
        """Of a page."""
        ...

    def read(self, pages: Sequence[int], tokens: int) -> Tensor:
        """(pages, used bytes) as they are now. Zeros after the first `tokens` tokens: what lies there is nobody's, or
        another request's."""
        ...

    def write(self, pages: Sequence[int], content: Tensor) -> None:
        """What `read` gave, into other pages."""
        ...


class ModelPages:
    """One model's view of an arena: keys and values of each layer as (pages, block tokens, KV heads, head width).
    Implements HostCopies."""

    def __init__(self, arena: Arena, shape: DecoderShape, dtype: torch.dtype) -> None:
        self.block_tokens = arena.block_tokens(shape, dtype)
        pages = arena.memory.shape[0]
        used = 2 * shape.layers * self.block_tokens * shape.kv_heads * shape.head_width
        self._memory = arena.memory
        self._dtype = dtype
        self._cut = (shape.layers, 2, self.block_tokens, shape.kv_heads, shape.head_width)
        self.used_bytes = used * dtype.itemsize
        """Of a page, by this model."""
        typed = arena.memory[:, : self.used_bytes].view(dtype)
        cut = typed.view(pages, *self._cut)
        self.keys: list[Tensor] = [cut[:, layer, 0] for layer in range(shape.layers)]
        self.values: list[Tensor] = [cut[:, layer, 1] for layer in range(shape.layers)]

    def read(self, pages: Sequence[int], tokens: int) -> Tensor:
        copied = self._memory[list(pages), : self.used_bytes].cpu()
        rest = len(pages) * self.block_tokens - tokens
        if rest > 0:
            last = copied[-1].view(self._dtype).view(self._cut)
            last[:, :, self.block_tokens - rest :] = 0
        return copied

    def write(self, pages: Sequence[int], content: Tensor) -> None:
        for page, one in zip(pages, content, strict=True):
            self._memory[page, : self.used_bytes].copy_(one)

    def clear(self, pages: Sequence[int]) -> None:
        """Zeros for what is left of another request, or of a model of another dtype: masked places are multiplied by
        zero, and zero times a NaN is a NaN."""
        for page in pages:
            self._memory[page].zero_()


def _reserved(size: int, device: str) -> Tensor:
    """`size` bytes of zeros. On a CPU untouched pages cost nothing: the kernel gives memory at the first write."""
    if torch.device(device).type == "cpu":
        return torch.frombuffer(mmap(-1, size), dtype=torch.uint8)
    return torch.zeros(size, dtype=torch.uint8, device=device)
