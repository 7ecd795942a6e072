"""`sie-stream memory`: who holds the memory of devices with a budget, from the samples on sie.telemetry."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from msgspec import structs
from rich.console import Group, RenderableType

from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, console, show_json, table_of
from sie_stream.cli.top import RATE_OVER_MS, Board, fresh, readings
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.telemetry import DeviceMemorySample, DeviceSample, ModelMemory, SwitchSample

MIB = 1024 * 1024
BAR = 60
"""Characters of a whole device."""
USES = (("weights", "#"), ("kv", "k"), ("workspace", "w"), ("free", "."))
PLACES = ("device", "coming", "host", "disk")
MODELS = ("model", "version", "place", "mb", "pages", "comes_from")
SWITCHES = ("class", "count", "mb", "ms_mean", "ms_max")
NO_BUDGET = (
    "no device has a memory budget: set device_memory_mb (SIE_STREAM_DEVICE_MEMORY_MB) and start the workers again. "
    "`sie-stream top` shows what devices without one hold."
)


def memory(
    worker: Annotated[str, typer.Option("--worker", help="Only this worker.")] = "",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """The memory map: for each device with a budget who holds its bytes, which models are on it, which wait where.

    \b
    Examples:
      sie-stream memory
      sie-stream memory --worker w0
      sie-stream memory -o json
    """
    connection = Connection.open(bootstrap_servers)
    board = Board()
    for _ in readings(connection, board, time.monotonic() + RATE_OVER_MS / 1_000):
        pass
    found = chosen(fresh(board, round(time.time() * 1_000)).values(), worker)
    if output is OutputFormat.JSON:
        show_json([device_row(one) for one in found])
        return
    console.print(picture(found))


def chosen(samples: Iterable[DeviceSample], worker: str) -> list[DeviceSample]:
    """Those with a budget. Raises ConfigError for a worker that is not there."""
    known = list(samples)
    names = sorted({one.worker for one in known})
    if worker and worker not in names:
        raise ConfigError(
            f"--worker: {worker!r} has told nothing in the last ten seconds. Workers: {', '.join(names) or 'none'}."
            f"{did_you_mean(worker, names)}"
        )
    return [one for one in known if one.memory is not None and worker in ("", one.worker)]


def device_row(sample: DeviceSample) -> dict[str, Any]:
    """Everything, in bytes."""
    assert sample.memory is not None, "chosen() leaves only those with a budget"
    return {
        "worker": sample.worker,
        "device": sample.device,
        "incarnation": sample.incarnation,
        "at_ms": sample.at_ms,
        **structs.asdict(sample.memory),
        "models": [structs.asdict(one) for one in ordered(sample.memory)],
        "switches": [structs.asdict(one) for one in sample.memory.switches],
    }


def ordered(held: DeviceMemorySample) -> list[ModelMemory]:
    """By place, the largest first."""
    return sorted(held.models, key=lambda one: (PLACES.index(one.place), -one.size_bytes, one.model, one.version))


def picture(samples: list[DeviceSample]) -> RenderableType:
    if not samples:
        return NO_BUDGET
    parts: list[RenderableType] = []
    for sample in samples:
        held = sample.memory
        assert held is not None, "chosen() leaves only those with a budget"
        parts += [
            *([""] if parts else []),
            f"{sample.worker} {sample.device}: {_mb(held.total_bytes)} MB, pages of {held.page_bytes // 1024} KiB",
            f"  {bar(held)}",
            "  " + ", ".join(f"{sign} {use} {_mb(size)} MB" for use, sign, size in _uses(held)),
            f"  below: {_mb(held.host_used_bytes)} of {_mb(held.host_bytes)} MB of the host, "
            f"{_mb(held.disk_used_bytes)} MB on the disk",
            "",
            table_of([_model_row(one) for one in ordered(held)], MODELS),
            "",
            table_of([_switch_row(one) for one in held.switches], SWITCHES),
        ]
    return Group(*parts)


def bar(held: DeviceMemorySample) -> str:
    """BAR characters. What is there at all gets one, and the largest part gives it."""
    lengths = [BAR * size // max(1, held.total_bytes) for _, _, size in _uses(held)]
    lengths = [max(length, 1) if size else 0 for length, (_, _, size) in zip(lengths, _uses(held), strict=True)]
    lengths[lengths.index(max(lengths))] += BAR - sum(lengths)
    return "".join(sign * length for (_, sign, _), length in zip(_uses(held), lengths, strict=True))


def _uses(held: DeviceMemorySample) -> list[tuple[str, str, int]]:
    sizes = (held.weights_bytes, held.kv_bytes, held.workspace_bytes, held.free_bytes)
    return [(use, sign, size) for (use, sign), size in zip(USES, sizes, strict=True)]


def _model_row(one: ModelMemory) -> dict[str, Any]:
    return {
        "model": one.model,
        "version": one.version,
        "place": one.place,
        "mb": _mb(one.size_bytes),
        "pages": one.pages or None,
        "comes_from": one.below or "never leaves",
    }


def _switch_row(one: SwitchSample) -> dict[str, Any]:
    return {
        "class": one.switch_class,
        "count": one.count,
        "mb": _mb(one.size_bytes),
        "ms_mean": round(one.ms / one.count, 1) if one.count else None,
        "ms_max": one.ms_max if one.count else None,
    }


def _mb(size: int) -> float:
    return round(size / MIB, 1)
