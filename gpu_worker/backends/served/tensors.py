"""JSON rows to tensors of the Open Inference Protocol and back. Pure.

A TensorSpec is one tensor of one row; -1 is a free dimension. A batch is the rows stacked along a new first axis.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.served.failures import BadAnswer
from gpu_worker.backends.served.options import refused
from sie_stream.errors import did_you_mean

DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
Tensor = NDArray[np.generic]


class TensorSpec(Struct, frozen=True):
    """What one row has for one tensor. `shape` is None when nobody said."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None

    @property
    def single(self) -> bool:
        """One element in each row: a plain value in JSON."""
        return self.shape is not None and all(size == 1 for size in self.shape)


def declared(key: str, texts: Sequence[str]) -> tuple[TensorSpec, ...]:
    """`NAME`, `NAME:FP32` or `NAME:FP32:3,-1` from a declaration. Raises ModelRefused."""
    return tuple(_declared(key, text) for text in texts)


def _declared(key: str, text: str) -> TensorSpec:
    name, _, rest = text.partition(":")
    datatype, separator, sizes = rest.partition(":")
    if not name or (datatype and datatype not in DTYPES):
        guess = did_you_mean(datatype, DTYPES)
        raise refused(key, f"{text!r}: write NAME, NAME:TYPE or NAME:TYPE:SIZES, TYPE of {', '.join(DTYPES)}.{guess}")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size) if separator else None
    except ValueError as error:
        raise refused(key, f"{text!r}: sizes are whole numbers, -1 for any: {error}") from error
    return TensorSpec(name, datatype, shape)


def agreed(key: str, wanted: Sequence[TensorSpec], served: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The declared tensors as the server has them; all of the server's when none are declared.

    Raises ModelRefused (metadata_mismatch) for a name, type or shape that differ, or (invalid_model_config) when
    neither side says the type of a tensor.
    """
    if not wanted:
        chosen = tuple(served)
    else:
        by_name = {spec.name: spec for spec in served}
        chosen = tuple(_agree(key, one, by_name) for one in wanted)
    for spec in chosen:
        if spec.datatype not in DTYPES:
            raise refused(
                key, f"{spec.name}: type {spec.datatype or 'unknown'} cannot be served; name it {spec.name}:TYPE."
            )
    if not chosen:
        raise refused(key, "the server tells no tensors; name them as NAME:TYPE:SIZES.")
    return chosen


def _agree(key: str, wanted: TensorSpec, served: dict[str, TensorSpec]) -> TensorSpec:
    if not served:
        return wanted
    found = served.get(wanted.name)
    if found is None:
        guess = did_you_mean(wanted.name, served)
        text = f"backend.config.{key}: the server's model has no {wanted.name!r}, only {', '.join(served)}.{guess}"
        raise ModelRefused("metadata_mismatch", text)
    if wanted.datatype and wanted.datatype != found.datatype:
        text = f"backend.config.{key}: {wanted.name} is declared {wanted.datatype}, the server has {found.datatype}."
        raise ModelRefused("metadata_mismatch", text)
    if wanted.shape is not None and found.shape is not None and not fits(wanted.shape, found.shape):
        sizes = f"{_sizes(wanted.shape)}, the server has {_sizes(found.shape)}"
        text = f"backend.config.{key}: {wanted.name} is declared {sizes}."
        raise ModelRefused("metadata_mismatch", text)
    return found if found.shape is not None or wanted.shape is None else wanted


def fits(shape: tuple[int, ...], spec: tuple[int, ...]) -> bool:
    """Whether `shape` (may have free dimensions itself) is one that `spec` allows."""
    return len(shape) == len(spec) and all(
        one == other or -1 in (one, other) for one, other in zip(shape, spec, strict=True)
    )


def _sizes(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# ---------------------------------------------------------------- rows to tensors


def row_tensor(spec: TensorSpec, value: object, binary: bool) -> Tensor:
    """One row of one input from its JSON value. Raises ValueError that says what is wrong.

    `binary`: texts of a BYTES tensor are base64 of what is meant.
    """
    try:
        # As objects: numpy's own texts are all as long as the longest, and lose zeros at their end.
        array = np.asarray(value, np.object_ if spec.datatype == "BYTES" else None)
    except ValueError as error:
        raise ValueError("its lists have different lengths") from error
    dtype = DTYPES[spec.datatype]
    if spec.datatype == "BYTES":
        cells: Tensor = _texts(array, binary)
    else:
        cells = _numbers(array, np.dtype(dtype), spec.datatype)
    if spec.shape is None:
        return cells
    if cells.ndim == 0 and math.prod(abs(size) for size in spec.shape) == 1:
        return cells.reshape([1] * len(spec.shape))
    if not fits(cells.shape, spec.shape):
        raise ValueError(f"has shape {_sizes(cells.shape)}, the model takes {_sizes(spec.shape)}")
    return cells


def _texts(array: Tensor, binary: bool) -> Tensor:
    cells = np.empty(array.shape, np.object_)
    for place, cell in enumerate(array.reshape(-1).tolist()):
        if not isinstance(cell, str):
            raise ValueError("must be text")
        try:
            cells.reshape(-1)[place] = base64.b64decode(cell, validate=True) if binary else cell.encode()
        except binascii.Error as error:
            raise ValueError(f"is not base64: {error}") from error
    return cells


def _numbers(array: Tensor, dtype: np.dtype[np.generic], name: str) -> Tensor:
    allowed = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}[dtype.kind]
    if array.size and array.dtype.kind not in allowed:
        raise ValueError(f"must hold {'true or false' if dtype.kind == 'b' else name + ' numbers'}")
    with np.errstate(over="ignore"):
        cells = array.astype(dtype)
    exact = np.isfinite(cells).all() if dtype.kind == "f" else (cells == array).all()
    if not exact:
        raise ValueError(f"holds a number that {name} cannot")
    return cells


# ---------------------------------------------------------------- tensors to rows


def answer_rows(spec: TensorSpec, array: Tensor, count: int, batched: bool) -> list[Tensor]:
    """The rows of one output. Raises BadAnswer when it has another count or shape than agreed."""
    if batched:
        if array.ndim == 0 or len(array) != count:
            found = len(array) if array.ndim else 0
            raise BadAnswer(f"output {spec.name} has {found} rows for {count} inputs")
        rows = list(array)
    else:
        rows = [array]
    for row in rows:
        shape = np.shape(row)
        if spec.shape is not None and not fits(shape, spec.shape):
            raise BadAnswer(f"output {spec.name} has shape {_sizes(shape)} in a row, agreed was {_sizes(spec.shape)}")
    return rows


def flat_array(name: str, datatype: str, shape: Sequence[int], cells: Sequence[object]) -> Tensor:
    """A tensor from the flat list of a JSON answer. Raises BadAnswer."""
    if datatype not in DTYPES:
        raise BadAnswer(f"output {name} has the unknown type {datatype!r}")
    if math.prod(shape) != len(cells):
        raise BadAnswer(f"output {name} says shape {_sizes(shape)} and holds {len(cells)} values")
    try:
        if datatype == "BYTES":
            array: Tensor = _texts(np.asarray(cells, np.object_), binary=False)
        else:
            array = np.asarray([math.nan if cell is None else cell for cell in cells], DTYPES[datatype])
        return array.reshape(tuple(shape))
    except (ValueError, TypeError, OverflowError) as error:
        raise BadAnswer(f"output {name} does not hold {datatype}: {error}") from error


def json_value(spec: TensorSpec, row: Tensor, plain: bool, binary: bool) -> object:
    """One row of one output as JSON. `plain`: the one element instead of a list."""
    cells = np.asarray(row).reshape(-1).tolist()
    if spec.datatype == "BYTES":
        cells = [base64.b64encode(cell).decode() if binary else cell.decode() for cell in cells]
    if plain:
        return cells[0]
    shape = np.shape(row)
    return _nested(cells, shape) if len(shape) > 1 else cells


def _nested(cells: Sequence[object], shape: tuple[int, ...]) -> list[object]:
    if len(shape) == 1:
        return list(cells)
    width = math.prod(shape[1:])
    return [_nested(cells[start * width : (start + 1) * width], shape[1:]) for start in range(shape[0])]


def finite(row: Tensor) -> bool:
    return not np.issubdtype(np.asarray(row).dtype, np.floating) or bool(np.isfinite(row.astype(np.float64)).all())
