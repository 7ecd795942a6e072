"""Matrix products of a decoder, by precision of the weights.

On a CPU float32 weights are kept in oneDNN's blocked layout: for the 8 to 32 rows of a decoding step this is 1.2 to 1.8
times as fast as the plain layout, for one row and for prompts no slower.

int8 keeps one scale for each output row (symmetric, round to nearest). Few rows are multiplied with the int8 weights
themselves, so a decoding step reads a quarter of the bytes of float32; for many rows, where arithmetic is what costs,
the weights are widened first.

int4 is in int4.py; there the output layer and the embeddings stay at int8, which costs little and errs less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.backends.decoder.int4 import Int4Linear, int4_blocks

PACKED_FOR_ROWS = 32
"""The layout is best for this many rows; it serves any number."""
INT8_ROWS_MAX = 12
"""Up to this many rows the int8 kernel is the faster one; beyond, widening the weights pays."""


class Linear(Protocol):
    """y = x W^T + b on (rows, in)."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def tensors(self) -> list[Tensor]:
        """All it computes with."""
        ...

    def __call__(self, states: Tensor) -> Tensor: ...


class DenseLinear:
    """Weights in the dtype of the states."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return _bytes(self._weight) + _bytes(self._bias)

    @property
    def tensors(self) -> list[Tensor]:
        return _present(self._weight, self._bias)

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self._weight, self._bias)


class PackedLinear:
    """float32 weights on a CPU, in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.size_bytes = _bytes(weight) + _bytes(bias)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self._bias = bias

    @property
    def tensors(self) -> list[Tensor]:
        return _present(self._weight, self._bias)

    def __call__(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")


class Int8Linear:
    """Weights as int8 with a scale for each output row; the product is in bfloat16 for few rows, else as the states."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._dtype = weight.dtype
        scales = (weight.float().abs().amax(dim=1) / 127.0).clamp(min=torch.finfo(torch.float32).tiny)
        self._weight = (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8).contiguous()
        self._scales = scales
        self._kernel_scales = scales.to(torch.bfloat16)
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return sum(map(_bytes, self.tensors))

    @property
    def tensors(self) -> list[Tensor]:
        return _present(self._weight, self._scales, self._kernel_scales, self._bias)

    def __call__(self, states: Tensor) -> Tensor:
        if states.shape[0] > INT8_ROWS_MAX:
            return functional.linear(states, self.widened(), self._bias)
        narrow = states.to(torch.bfloat16)
        product = torch.ops.aten._weight_int8pack_mm(narrow, self._weight, self._kernel_scales).to(self._dtype)
        return product if self._bias is None else product + self._bias

    def rows(self, ids: Tensor) -> Tensor:
        """(n, in) some rows of the weights, widened: embeddings, where the table is also the output layer."""
        return self._weight[ids].to(self._dtype) * self._scales[ids, None].to(self._dtype)

    def widened(self) -> Tensor:
        return self._weight.to(self._dtype).mul_(self._scales[:, None].to(self._dtype))


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Weights as they are, in the layout that suits the device."""
    packs = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return PackedLinear(weight, bias) if packs else DenseLinear(weight, bias)


def int4(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return Int4Linear(int4_blocks(weight), bias, weight.dtype)


PRECISIONS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    **dict.fromkeys(("dense", "fp32", "bf16", "fp16"), dense),
    "int8": Int8Linear,
    "int4": int4,
}
"""`dense`: in the dtype of the states, whatever it is; the names beside it choose that dtype as well."""


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
