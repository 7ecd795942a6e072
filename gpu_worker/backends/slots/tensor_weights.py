"""Tensors of PyTorch as movable weights. The tensor object stays: only where its bytes lie changes.

Weights in oneDNN's blocked layout have no storage of torch's own. A tensor of that layout over given memory is made by
the C interface that compiled models are loaded through (torch/csrc/inductor/aoti_torch/c/shim.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_worker.backends.slots.weights import Weight

MKLDNN_LAYOUT = 3
"""c10::Layout::Mkldnn (c10/core/Layout.h)."""


class TensorWeight:
    """Implements Weight for all tensors of one storage: for the part of it that they show."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        spans = [_span(tensor) for tensor in tensors]
        self._start = min(start for start, _ in spans)
        self.size_bytes = max(end for _, end in spans) - self._start

    @property
    def address(self) -> int:
        first = self._tensors[0]
        return first.data_ptr() - _span(first)[0] + self._start

    def move_to(self, address: int) -> None:
        memory = torch.frombuffer((ctypes.c_uint8 * self.size_bytes).from_address(address), dtype=torch.uint8)
        storage = memory.untyped_storage()
        for tensor in self._tensors:
            moved = torch.empty(0, dtype=tensor.dtype)
            offset = (_span(tensor)[0] - self._start) // tensor.element_size()
            moved.set_(storage, offset, tensor.shape, tensor.stride())
            tensor.data = moved
        self._start = 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte in its storage, the last one excluded."""
    start = int(tensor.storage_offset())
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + last + 1 if tensor.numel() else start
    return start * tensor.element_size(), end * tensor.element_size()


class BlockedWeight:
    """Implements Weight for a tensor in oneDNN's layout."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.size_bytes = int(torch.ops.mkldnn._nbytes(tensor))

    @property
    def address(self) -> int:
        return int(torch.ops.mkldnn.data_ptr(self._tensor))

    def move_to(self, address: int) -> None:
        self._tensor.data = _blocked_at(address, self._tensor)


def tensor_weights(tensors: Iterable[Tensor]) -> list[Weight]:
    """Each block of bytes once, whatever tensors lie in it. Empty when one of them cannot be moved: on another device,
    or in a layout that this build of torch gives no way to.
    """
    groups: dict[int, list[Tensor]] = {}
    found: list[Weight] = []
    seen: dict[int, None] = {}
    for tensor in tensors:
        if id(tensor) in seen:
            continue
        seen[id(tensor)] = None
        if tensor.is_mkldnn:
            if not can_move_blocked():
                return []
            found.append(BlockedWeight(tensor))
        elif tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return []
        else:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return [*found, *(TensorWeight(group) for group in groups.values())]


def can_move_blocked() -> bool:
    return _shim() is not None and _owned_by_torch() is not None


def _owned_by_torch() -> Any:
    """From a capsule with a handle to the tensor it is; None where this build has no such function."""
    return getattr(getattr(torch._C, "_aoti", None), "alloc_tensor_by_stealing_from_void_ptr", None)


def _shim() -> Callable[..., int] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).aoti_torch_create_tensor_from_blob_v2
    except (OSError, AttributeError):
        return None


def _blocked_at(address: int, like: Tensor) -> Tensor:
    create = _shim()
    assert create is not None, "asked for before"
    described = torch.ops.mkldnn._get_mkldnn_serialized_md(like)
    description = (ctypes.c_uint8 * described.numel())(*described.tolist())
    count = like.dim()
    sizes = (ctypes.c_int64 * count)(*like.shape)
    strides = (ctypes.c_int64 * count)(*torch.empty(like.shape, device="meta").stride())
    handle = ctypes.c_void_p()
    dtype = _dtype_number(like.dtype)
    where = (ctypes.c_void_p(address), ctypes.c_int64(count), sizes, strides, ctypes.c_int64(0))
    what = (ctypes.c_int32(dtype), ctypes.c_int32(0), ctypes.c_int32(0), ctypes.byref(handle))
    layout = (ctypes.c_int32(MKLDNN_LAYOUT), description, ctypes.c_int64(described.numel()))
    if create(*where, *what, *layout):
        raise RuntimeError("torch could not make a tensor in oneDNN's layout over given memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return _owned_by_torch()(capsule(handle.value, None, None))


def _dtype_number(dtype: torch.dtype) -> int:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    number: Callable[[], int] = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    return number()
