"""The capability matrix in words, for `describe model`: rows for a table, and sentences with the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.capability import CapabilityMatrix, Fit
from sie_stream.topology.text import size_text

ROW_COLUMNS = ("device_class", "tensor_parallel", "precision", "context", "exclusive_from", "memory", "verdict")


def matrix_rows(matrix: CapabilityMatrix) -> list[dict[str, str | int]]:
    """One row per device class, tensor-parallel size and precision: the longest context that fits, with its arithmetic.

    `context` is empty where the model has none or nothing fits; `exclusive_from` is the shortest context shown that
    takes the device alone. The bytes behind `memory` are there too, for JSON.
    """
    return [_row(cells) for cells in _together(matrix)]


def _together(matrix: CapabilityMatrix) -> Iterator[tuple[Fit, ...]]:
    """Cells that differ in context only, longest first."""
    groups: dict[tuple[str, int, str], list[Fit]] = {}
    for cell in matrix.fits:
        groups.setdefault((cell.device_class, cell.tensor_parallel, cell.precision), []).append(cell)
    for cells in groups.values():
        yield tuple(cells)


def _shown(cells: Sequence[Fit]) -> Fit:
    """The longest context that fits; when none does, the shortest, which comes nearest."""
    return next((cell for cell in cells if cell.possible), cells[-1])


def _row(cells: Sequence[Fit]) -> dict[str, str | int]:
    cell = _shown(cells)
    exclusive = [c.context_tokens for c in cells if c.verdict == "exclusive"]
    return {
        "device_class": cell.device_class,
        "tensor_parallel": cell.tensor_parallel,
        "precision": cell.precision,
        "context": str(cell.context_tokens) if cell.context_tokens and cell.possible else "",
        "exclusive_from": str(min(exclusive)) if exclusive and cell.context_tokens else "",
        "memory": arithmetic(cell),
        "verdict": cell.verdict.replace("_", " "),
        "why": cell.why,
        "weights_bytes": cell.weights_bytes,
        "kv_bytes": cell.kv_bytes,
        "workspace_bytes": cell.workspace_bytes,
        "need_bytes": cell.need_bytes,
        "device_bytes": cell.device_bytes,
    }


def arithmetic(cell: Fit) -> str:
    """`14.9 GiB weights + 1.0 GiB KV + 1.2 GiB workspace = 17.1 of 40.0 GiB`; each is rounded down on its own."""
    parts = [f"{size_text(cell.weights_bytes)} weights"]
    if cell.kv_bytes:
        parts.append(f"{size_text(cell.kv_bytes)} KV of {cell.context_tokens} tokens")
    parts.append(f"{size_text(cell.workspace_bytes)} workspace")
    return f"{' + '.join(parts)} = {size_text(cell.need_bytes)} of {size_text(cell.device_bytes)}"


def matrix_sentences(matrix: CapabilityMatrix) -> tuple[str, ...]:
    """What is assumed, then one sentence per device class, tensor-parallel size and precision."""
    return (*matrix.assumptions, *(_sentence(cells) for cells in _together(matrix)))


def _sentence(cells: Sequence[Fit]) -> str:
    cell = _shown(cells)
    devices = f"{cell.tensor_parallel} x {cell.device_class}" if cell.tensor_parallel > 1 else cell.device_class
    start = f"{devices}, {cell.precision}"
    if cell.verdict == "impossible":
        return f"{start}: no. {cell.why}"
    each = " each" if cell.tensor_parallel > 1 else ""
    context = f"up to {cell.context_tokens} tokens" if cell.context_tokens and cell.possible else ""
    answer = "too big" if cell.verdict == "too_big" else " ".join(part for part in ("fits", context) if part)
    beside = f" {cell.contexts_at_once} such contexts at once." if cell.possible and cell.contexts_at_once > 1 else ""
    mind = f" {cell.why}" if cell.possible and cell.why else ""
    return f"{start}: {answer}. {arithmetic(cell)}{each}.{beside}{mind}"
