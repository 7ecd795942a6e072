"""What public traces of LLM services say about bursts and sizes, and the generator that is fitted to them.

Read from a folder when it is there: azure_llm_2023_conv.csv and azure_llm_2023_code.csv (Azure/AzurePublicDataset),
mooncake_conversation.jsonl and mooncake_synthetic.jsonl (kvcache-ai/Mooncake). `fit` computes from such a file:

- `tokens_cv`: coefficient of variation of the output lengths. Latency of a generation is nearly proportional to it.
- `burst_cv`: of the rate in minutes, beyond what Poisson arrivals would show: sqrt(index of dispersion - 1) / sqrt(mean
  per minute). It is the spread of a lognormal factor on the rate that changes once a minute.
- `peak`: busiest minute over the mean minute: how high a burst goes.

FITTED holds what `fit` gave for the four files, so that the simulator works without them; a test compares where they
are present. Time of day is not in them (each is about an hour): the shapes below are ours, stated as such.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
from msgspec import Struct

MINUTE_S = 60.0


class Fit(Struct, frozen=True):
    """One trace in numbers."""

    tokens_cv: float
    burst_cv: float
    peak: float


FITTED: dict[str, Fit] = {
    "azure_llm_2023_conv.csv": Fit(0.771, 0.213, 1.52),
    "azure_llm_2023_code.csv": Fit(2.147, 1.038, 4.18),
    "mooncake_conversation.jsonl": Fit(0.729, 0.096, 1.21),
    "mooncake_synthetic.jsonl": Fit(1.195, 0.029, 1.17),
}


def read_fits(folder: Path | None) -> dict[str, Fit]:
    """The fits of the files in `folder`; of those that are not there (or without a folder), FITTED.

    Raises ValueError, KeyError or OSError for a file that is there and is no such trace.
    """
    if folder is None:
        return dict(FITTED)
    return {name: fit(folder / name) if (folder / name).is_file() else known for name, known in FITTED.items()}


def fit(path: Path) -> Fit:
    times, tokens = _azure(path) if path.suffix == ".csv" else _mooncake(path)
    minutes = np.bincount((times / MINUTE_S).astype(np.int64))[:-1]  # the last one is not complete
    dispersion = float(minutes.var() / minutes.mean())
    return Fit(
        tokens_cv=round(float(tokens.std() / tokens.mean()), 3),
        burst_cv=round((max(0.0, dispersion - 1) / float(minutes.mean())) ** 0.5, 3),
        peak=round(float(minutes.max() / minutes.mean()), 2),
    )


def _azure(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Seconds since the first request, and tokens generated."""
    times: list[float] = []
    tokens: list[int] = []
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            times.append(datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp())
            tokens.append(int(row["GeneratedTokens"]))
    return np.array(times) - times[0], np.array(tokens)


def _mooncake(path: Path) -> tuple[np.ndarray, np.ndarray]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return np.array([row["timestamp"] / 1000 for row in rows]), np.array([row["output_length"] for row in rows])


# ---------------------------------------------------------------- time of day


def _bump(hour: np.ndarray, at: float, width: float) -> np.ndarray:
    away = np.abs((hour - at + 12.0) % 24.0 - 12.0)
    return np.exp(-0.5 * (away / width) ** 2)


def _flat(hour: np.ndarray) -> np.ndarray:
    return np.ones_like(hour)


def _day(hour: np.ndarray) -> np.ndarray:
    """Office hours in one time zone: lowest before dawn, about 2.6 times that in the afternoon."""
    return 0.5 + 0.8 * _bump(hour, 14.5, 4.0)


def _double_peak(hour: np.ndarray) -> np.ndarray:
    """A shopping day: a peak at noon, a higher one in the evening."""
    return 0.35 + 0.9 * _bump(hour, 12.5, 1.3) + 1.35 * _bump(hour, 20.5, 1.6)


CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"flat": _flat, "day": _day, "double-peak": _double_peak}


def curve(shape: str, hour: np.ndarray) -> np.ndarray:
    """Rate at these hours of the day (any number, 24 is midnight again), as a multiple of the day's mean."""
    of_day = CURVES[shape]
    return of_day(hour) / float(of_day(np.arange(0.0, 24.0, 0.05)).mean())
