"""GGUF files (ggml's format, versions 2 and 3): metadata, and tensors by name.

The package `gguf` reads them too, but makes Python objects of every token of the vocabulary, which takes seconds; here
arrays are skipped. What the package is asked for are the rarer quantisations.

A file may come from anywhere: each length is checked against what is left of it, by slicing or by struct.
"""

from __future__ import annotations

import struct
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.tensors import mapped, tensor_in

GROUP = 32
"""Weights of a block of the simple quantisations."""
Q4_1_BYTES = 20
"""float16 scale, float16 offset, then 16 bytes: their low halves are weights 0 to 15, their high halves the others."""
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
BLOCKS = {
    F32: (1, 4),
    F16: (1, 2),
    BF16: (1, 2),
    Q4_0: (32, 18),
    Q4_1: (32, Q4_1_BYTES),
    Q8_0: (32, 34),
    # Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
    6: (32, 22),
    7: (32, 24),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
}
"""(weights, bytes) of a block, by ggml's number of the type."""
ALIGNMENT = 32
DIMENSIONS_MAX = 4


class Entry(Struct, frozen=True):
    """One tensor: its rows and columns as torch says them, ggml's type, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile:
    """One open file. Quantised tensors are copies; others lie in the mapped file, which cannot be written to."""

    def __init__(self, file: Path) -> None:
        """Raises ModelRefused."""
        self._file = file
        self.metadata: dict[str, Any] = {}
        """Without arrays: those are None."""
        self.lengths: dict[str, int] = {}
        """Of the arrays of the metadata."""
        self.entries: dict[str, Entry] = {}
        try:
            self._bytes = mapped(file)
            self._read_header()
        except (OSError, ValueError, struct.error) as error:
            raise self._refused(str(error)) from error

    def tensor(self, name: str) -> Tensor:
        """float32, float16 or bfloat16, dequantised. Raises ModelRefused."""
        entry = self.entries[name]
        raw = self._raw(entry)
        match entry.kind:
            case 0 | 1 | 30:
                kind = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[entry.kind]
                return raw.view(kind).view(entry.shape)
            case 2 | 3:
                return widened(as_q4_1(raw.view(-1, raw.shape[-1]), entry.kind)).view(entry.shape)
            case 8:
                blocks = raw.view(-1, BLOCKS[Q8_0][1])
                scales = blocks[:, :2].contiguous().view(torch.float16).float()
                return (blocks[:, 2:].contiguous().view(torch.int8).float() * scales).view(entry.shape)
            case _:
                return _by_package(entry, raw)

    def blocks(self, name: str) -> Tensor | None:
        """(rows, columns / 32, 20) blocks of Q4_1, a copy, if that is how the tensor is kept, or as Q4_0."""
        entry = self.entries[name]
        if entry.kind not in (Q4_0, Q4_1) or len(entry.shape) != 2:
            return None
        return as_q4_1(self._raw(entry), entry.kind).view(entry.shape[0], -1, Q4_1_BYTES)

    def _raw(self, entry: Entry) -> Tensor:
        """(blocks, bytes of a block)"""
        weights, size = BLOCKS[entry.kind]
        count = prod(entry.shape) // weights
        return tensor_in(self._bytes, torch.uint8, entry.start, count * size).view(-1, size)

    def _read_header(self) -> None:
        magic, version, tensors, keys = struct.unpack_from("<4sIQQ", self._bytes, 0)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3")
        at = 24
        for _ in range(keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            if kind == ARRAY:
                self.lengths[key] = struct.unpack_from("<Q", self._bytes, at + 8)[0]
            self.metadata[key], at = self._value(key, kind, at + 4)
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensors):
            name, at = self._string(at)
            (count,) = struct.unpack_from("<I", self._bytes, at)
            if count > DIMENSIONS_MAX:
                raise ValueError(f"tensor {name} has {count} dimensions")
            *sizes, kind, offset = struct.unpack_from(f"<{count}QIQ", self._bytes, at + 4)
            found.append((name, tuple(reversed(sizes)), kind, offset))
            at += 16 + 8 * count
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"metadata general.alignment is {alignment!r}, not a whole number of bytes >= 1")
        data = -(-at // alignment) * alignment
        for name, shape, kind, offset in found:
            if offset % alignment:
                raise ValueError(f"tensor {name} begins at byte {offset}, which is no multiple of {alignment}")
            self.entries[name] = self._entry(name, shape, kind, data + offset)

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
        if kind not in BLOCKS:
            known = ", ".join(map(str, sorted(BLOCKS)))
            raise ValueError(f"tensor {name} is of ggml's type {kind}, which is not one of {known}")
        weights, size = BLOCKS[kind]
        if not shape or 0 in shape or shape[-1] % weights:
            raise ValueError(f"tensor {name} has sizes {shape}: {weights} must divide the last, and none may be 0")
        end = start + prod(shape) // weights * size
        if end > len(self._bytes):
            raise ValueError(
                f"tensor {name} with sizes {shape} ends at byte {end} of {len(self._bytes)}: the file is cut short, or "
                "its header is wrong. Fetch it again"
            )
        return Entry(shape, kind, start)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._bytes, at)
        end = at + 8 + length
        if end > len(self._bytes):
            raise ValueError(f"a text of {length} bytes at byte {at} ends after the file: it is cut short")
        return self._bytes[at + 8 : end].decode("utf-8", "replace"), end

    def _value(self, key: str, kind: int, at: int) -> tuple[Any, int]:
        if kind == STRING:
            return self._string(at)
        if kind == ARRAY:
            return None, self._after_array(key, at)
        if kind not in SCALARS:
            raise ValueError(f"metadata {key} is of type {kind}, which is not one of 0 to 12")
        (value,) = struct.unpack_from(SCALARS[kind], self._bytes, at)
        return value, at + struct.calcsize(SCALARS[kind])

    def _after_array(self, key: str, at: int) -> int:
        kind, count = struct.unpack_from("<IQ", self._bytes, at)
        at += 12
        if kind != STRING and kind not in SCALARS:
            raise ValueError(f"metadata {key} is an array of type {kind}")
        least = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
        if at + count * least > len(self._bytes):
            raise ValueError(f"metadata {key} has {count} values, more than the file: it is cut short")
        if kind != STRING:
            return at + count * least
        unpack, content, end = struct.Struct("<Q").unpack_from, self._bytes, len(self._bytes)
        for _ in range(count):
            at += 8 + unpack(content, at)[0]
            if at > end:
                raise ValueError(f"metadata {key} ends after the file: it is cut short")
        return at

    def _refused(self, why: str) -> ModelRefused:
        return ModelRefused("weights_unreadable", f"cannot read {self._file}: {why}.")


def _by_package(entry: Entry, raw: Tensor) -> Tensor:
    """The rarer quantisations."""
    library: Any = import_module("gguf")
    quants: Any = import_module("gguf.quants")
    rows = raw.view(prod(entry.shape[:-1]), -1).numpy()
    return torch.from_numpy(quants.dequantize(rows, library.GGMLQuantizationType(entry.kind))).view(entry.shape)


def as_q4_1(raw: Tensor, kind: int) -> Tensor:
    """(blocks, 18 or 20) bytes of Q4_0 or Q4_1 -> (blocks, 20), Q4_1, a copy; an offset of -8 scales says the same."""
    if kind == Q4_1:
        return raw.clone()
    scales = raw[:, :2].contiguous().view(torch.float16)
    return torch.cat([raw[:, :2], (scales * -8).view(torch.uint8), raw[:, 2:]], dim=1)


def widened(blocks: Tensor) -> Tensor:
    """(.., 20) bytes of Q4_1 -> (.., 32) float32."""
    ends = blocks[..., :4].contiguous().view(torch.float16).float()
    halves = blocks[..., 4:]
    weights = torch.cat([halves & 15, halves >> 4], dim=-1).float()
    return weights.mul_(ends[..., :1]).add_(ends[..., 1:])
