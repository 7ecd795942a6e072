"""A rollout as it goes: one line for each change, and its end. Pure: states in, lines and endings out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from msgspec import Struct

from scheduler.rollout import Ending
from scheduler.rollout_past import past_of
from scheduler.state import ClusterState
from sie_stream.cli.output import one_line
from sie_stream.cli.rollout_view import SHADOW, status_rows


class Watched(Struct, frozen=True):
    """A rollout that was under way when somebody began to look."""

    model: str
    rollout: str
    version: str
    """`BEFORE -> NEW`."""


class End(Struct, frozen=True):
    """How a watched rollout ended."""

    watched: Watched
    ending: Ending
    why: str

    def __str__(self) -> str:
        return f"{self.watched.model}  {self.watched.version}  {self.ending}: {self.why}"


def under_way(state: ClusterState, model: str = "") -> list[Watched]:
    """Those of `model`, or of all models."""
    return [Watched(row["model"], row["rollout"], row["version"]) for row in status_rows(state, model)]


def ends_of(state: ClusterState, watched: Iterable[Watched]) -> list[End]:
    """Those that ended. What is neither under way nor in the history went with its model."""
    return [end for one in watched if (end := _end_of(state, one)) is not None]


def _end_of(state: ClusterState, watched: Watched) -> End | None:
    for rollout in past_of(state, watched.model):
        if rollout.rollout == watched.rollout and rollout.ending is not None:
            return End(watched, rollout.ending, rollout.why)
    model = state.models.get(watched.model)
    if model is None:
        return End(watched, "aborted", "The model was deleted.")
    if any(rollout.rollout == watched.rollout for rollout in model.rollouts.values()):
        return None
    return End(watched, "aborted", "It is in the history no more: the model was deleted, or rolled out often since.")


def from_there(first: ClusterState, later: Iterable[ClusterState]) -> Iterator[ClusterState]:
    """`first`, and those of `later` that know more; who folds from a snapshot sees what was before once again."""
    yield first
    offset = first.next_offset
    yield from (state for state in later if state.next_offset > offset)


class Changes:
    """Lines for a file or a pipe: one when something changed that is not just a growing number."""

    def __init__(self, watched: Iterable[Watched]) -> None:
        self._open = list(watched)
        self._told: dict[str, tuple[Any, ...]] = {}

    def lines(self, state: ClusterState) -> Iterator[str]:
        """What is new in `state`, ends included, each once."""
        names = {one.rollout for one in self._open}
        for row in status_rows(state):
            told = (row["phase"], row["step"], row["share"], row["note"].partition(":")[0], _verdicts(row))
            if row["rollout"] in names and self._told.get(row["rollout"]) != told:
                self._told[row["rollout"]] = told
                yield f"{_clock(state)}  {_in_words(row)}"
        for end in ends_of(state, self._open):
            self._open.remove(end.watched)
            yield f"{_clock(state)}  {one_line(str(end))}"


def _verdicts(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((gate["gate"], gate["verdict"]) for gate in row["gate_results"] if gate["verdict"] != "pass")


def _clock(state: ClusterState) -> str:
    return f"{datetime.fromtimestamp(state.now_ms / 1_000).astimezone():%H:%M:%S}"


def _in_words(row: dict[str, Any]) -> str:
    parts = [
        row["model"],
        row["version"],
        row["phase"],
        "" if row["step"] == SHADOW else f"step {row['step']}",
        f"{row['share']} of the keys",
        f"{row['samples']} of {row['samples_min']} samples",
        *row["gates"],
        row["note"],
    ]
    return one_line("  ".join(filter(None, parts)))
