"""Stands in for sgl_kernel where its CPU build does not exist: the one function that SGLang's plain path calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(requests: Any, table: Any, starts: Any, ends: Any, places: Any, *_: Any) -> None:
    """Write the cache places of each request's new tokens into its row of the table, columns starts to ends."""
    done = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[done : done + end - start].to(table.dtype)
        done += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
