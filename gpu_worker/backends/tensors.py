"""Tensors by name, from whatever file holds them. Files are mapped, not read: what is never asked for costs nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.backends.base import ModelRefused

Size = tuple[int, ...]
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls them."""


class _Entry(Struct, frozen=True):
    """One tensor in the header of a safetensors file. data_offsets: its first byte and the one after its last, from the
    end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Header(Struct, frozen=True):
    """The header, less the remarks of whoever wrote the file."""

    entries: dict[str, _Entry]
    data: int
    """Where the bytes of the tensors begin."""


class Tensors:
    """What one model's files hold. A tensor may lie in the mapped file: copy what is to be kept or changed."""

    def __init__(
        self,
        source: Path,
        getters: Mapping[str, Callable[[], Tensor]],
        blocks: Mapping[str, Callable[[], Tensor | None]] | None = None,
    ) -> None:
        self.source = source
        self._getters = getters
        self._blocks = blocks or {}

    def __contains__(self, name: str) -> bool:
        return name in self._getters

    @property
    def names(self) -> list[str]:
        return sorted(self._getters)

    def __call__(self, name: str) -> Tensor:
        """Raises ModelRefused for a tensor that is missing."""
        getter = self._getters.get(name)
        if getter is None:
            raise ModelRefused(
                "weights_unreadable", f"{self.source} lacks tensors that its config.json promises: {name}."
            )
        return getter()

    def blocks(self, name: str) -> Tensor | None:
        """4-bit blocks as decoder/int4.py keeps them, if the file has the tensor in them."""
        getter = self._blocks.get(name)
        return None if getter is None else getter()


def wrong_size(source: Path, name: str, tensor: Tensor, size: Size) -> ModelRefused:
    """What to raise for a tensor that is not as large as its config says."""
    return ModelRefused(
        "weights_unreadable",
        f"{source}: the size of {name} is {tuple(tensor.shape)}, and by its config.json {size}. The two are not of one "
        "model, or the file is damaged: fetch it again.",
    )


@contextmanager
def safetensors_of(source: Path) -> Iterator[Tensors]:
    """Everything in the *.safetensors of a folder. Raises ModelRefused, also for tensors that do not fit together
    while the caller puts them together."""
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ModelRefused("weights_unreadable", f"cannot read {source}: no *.safetensors in it.")
    with fitting(source):
        try:
            getters = {name: getter for file in files for name, getter in _getters(file).items()}
        except (SafetensorError, OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise ModelRefused("weights_unreadable", f"cannot read {source}: {error}") from error
        yield Tensors(source, getters)


def mapped(file: Path) -> mmap:
    """All of a file, read-only: the kernel counts a mapping that may be written to as if its memory had been taken.

    Raises OSError, and ValueError for an empty file.
    """
    with file.open("rb") as stream:
        return mmap(stream.fileno(), 0, access=ACCESS_READ)


def tensor_in(content: mmap, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """(count) values from byte `start` on, where they lie. Whoever writes into it ends the process: copy it before."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(content, dtype=dtype, count=count, offset=start)


def _getters(file: Path) -> dict[str, Callable[[], Tensor]]:
    """Raises SafetensorError for a header that the library refuses.

    The library maps files for torch so that they can be written to, which counts as memory taken; it says whether the
    header is in order, and the tensors are looked up here.
    """
    with safe_open(file, framework="numpy"):
        content = mapped(file)
    header = _header(content)
    return {name: partial(_tensor, file, name, content, header) for name in header.entries}


def _header(content: mmap) -> _Header:
    """The format: a length of 8 bytes, as much JSON, then the bytes of the tensors
    (https://github.com/huggingface/safetensors#format)."""
    data = 8 + int.from_bytes(content[:8], "little")
    told = msgspec.json.decode(content[8:data], type=dict[str, msgspec.Raw])
    told.pop("__metadata__", None)
    return _Header({name: msgspec.json.decode(raw, type=_Entry) for name, raw in told.items()}, data)


def _tensor(file: Path, name: str, content: mmap, header: _Header) -> Tensor:
    """Raises ModelRefused for a type that is not known here: only then is it of no use that others of the file are."""
    entry = header.entries[name]
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ModelRefused(
            "weights_unreadable", f"{file}: {name} is of type {entry.dtype!r}, not one of {', '.join(DTYPES)}"
        )
    start, end = entry.data_offsets
    return tensor_in(content, dtype, header.data + start, (end - start) // dtype.itemsize).view(entry.shape)


@contextmanager
def fitting(source: Path) -> Iterator[None]:
    """Turns torch's complaint about shapes into ModelRefused."""
    try:
        yield
    except RuntimeError as error:
        raise ModelRefused("weights_unreadable", f"{source}: tensors do not fit its config.json: {error}") from error
