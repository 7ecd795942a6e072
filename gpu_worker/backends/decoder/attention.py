"""Attention of one step over the paged pool.

Rows of a step are tokens of many sequences. Those that decode are attended to together: by the compiled kernel, which
reads the pages where they are, or else gathered into one padded tensor. A chunk of a prompt is attended to by itself.
In the repeatable form every row is attended to alone, in shapes that depend on nothing but its own position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention


class Layer(NamedTuple):
    """What one layer brings: its part of the pool, how many tokens a row sees (None: all), what products of queries and
    keys are multiplied by, and what tanh then keeps them within (None: nothing)."""

    keys: Tensor
    values: Tensor
    window: int | None
    scale: float
    cap: float | None = None


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Within (-cap, cap), smoothly (arXiv:2408.00118)."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: Layer) -> Tensor:
    """Attention over (.., rows, width) where `mask` is true; by torch's own kernel unless scores are capped."""
    if layer.cap is None:
        return attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
    scores = capped((queries @ keys.transpose(-2, -1)).float() * layer.scale, layer.cap)
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1).to(values.dtype) @ values


class Attention(Protocol):
    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        """queries (rows, heads, width), keys and values (rows, KV heads, width) of the rows, which are in the pool
        already -> (rows, heads, width)."""
        ...


class Kernel(Protocol):
    def __call__(self, queries: Tensor, table: Tensor, lengths: Tensor, layer: Layer) -> Tensor:
        """queries (n, heads, width), table (n, pages), lengths (n) -> (n, heads, width)."""
        ...


@dataclass(slots=True)
class DecodingRows:
    """One new token of each of n sequences.

    table:   (n, pages) pages of each sequence, padded with any page
    lengths: (n) tokens in the pool, the new one included
    """

    rows: slice
    table: Tensor
    lengths: Tensor
    kernel: Kernel | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def __call__(self, queries: Tensor, layer: Layer) -> Tensor:
        if self.kernel is not None:
            return self.kernel(queries, self.table, self.lengths, layer)
        count, pages = self.table.shape
        block, heads, width = layer.keys.shape[1:]
        places = self.table.reshape(-1)
        shape = (count, pages * block, heads, width)
        keys = layer.keys.index_select(0, places).view(shape).transpose(1, 2)
        values = layer.values.index_select(0, places).view(shape).transpose(1, 2)
        # The query heads that share a KV head are rows of one product, so nothing is repeated.
        grouped = queries.view(count, heads, -1, width)
        mask = self._mask(pages * block, layer.window)
        return attended(grouped, keys, values, mask, layer).reshape(count, -1, width)

    def _mask(self, length: int, window: int | None) -> Tensor:
        mask = self.masks.get((length, window))
        if mask is None:
            places = torch.arange(length, device=self.lengths.device)
            seen = places < self.lengths[:, None]
            if window is not None:
                seen &= places >= self.lengths[:, None] - window
            mask = self.masks[length, window] = seen[:, None, None, :]
        return mask


@dataclass(slots=True)
class PromptRows:
    """Rows that are consecutive tokens of one sequence, the first of them at `start`. table: (pages)."""

    rows: slice
    table: Tensor
    start: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        count = queries.shape[0]
        end = self.start + count
        if self.start:
            keys = layer.keys.index_select(0, self.table).flatten(0, 1)[:end]
            values = layer.values.index_select(0, self.table).flatten(0, 1)[:end]
        repeats = queries.shape[1] // keys.shape[1]
        keys = keys.transpose(0, 1).repeat_interleave(repeats, dim=0)[None]
        values = values.transpose(0, 1).repeat_interleave(repeats, dim=0)[None]
        queries = queries.transpose(0, 1)[None]
        windowed = layer.window is not None and layer.window < end
        if not self.start and not windowed and layer.cap is None:
            out = attention(queries, keys, values, is_causal=True, scale=layer.scale)
        else:
            out = attended(queries, keys, values, self._mask(count, end, layer.window if windowed else None), layer)
        return out[0].transpose(0, 1)

    def _mask(self, count: int, end: int, window: int | None) -> Tensor:
        mask = self.masks.get(window)
        if mask is None:
            device = self.table.device
            mine = torch.arange(self.start, self.start + count, device=device)[:, None]
            theirs = torch.arange(end, device=device)[None, :]
            mask = theirs <= mine
            if window is not None:
                mask &= theirs > mine - window
            self.masks[window] = mask
        return mask


@dataclass(slots=True)
class GroupedAttention:
    """Decoding rows and prompt chunks of one step."""

    decoding: list[DecodingRows]
    prompts: list[PromptRows]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        parts = [group(queries[group.rows], layer) for group in self.decoding]
        parts += [one(queries[one.rows], keys[one.rows], values[one.rows], layer) for one in self.prompts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class LoneRow(NamedTuple):
    """One token of one sequence in the repeatable form."""

    row: int
    position: int
    table: Tensor


@dataclass(slots=True)
class LoneAttention:
    """Every row alone: what is computed for it, and in which order, depends only on its own sequence."""

    rows: list[LoneRow]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        out = torch.zeros_like(queries)
        heads, width = layer.keys.shape[2:]
        for row, position, table in self.rows:
            first = 0 if layer.window is None else max(0, position + 1 - layer.window)
            seen = layer.keys.index_select(0, table).flatten(0, 1)[first : position + 1].transpose(0, 1).contiguous()
            told = layer.values.index_select(0, table).flatten(0, 1)[first : position + 1].transpose(0, 1).contiguous()
            query = queries[row].view(heads, -1, width)
            scores = capped((query @ seen.transpose(1, 2)).float() * layer.scale, layer.cap)
            shares = torch.softmax(scores, dim=-1).to(queries.dtype)
            out[row] = (shares @ told).reshape(-1, width)
        return out
