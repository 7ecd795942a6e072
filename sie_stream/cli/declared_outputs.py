"""Finds out where results hold protected values: by the models in force, and by older declarations when it has to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
from msgspec import Raw

from schemas.codec import decode_row
from sie_stream.cli.output import tell
from sie_stream.control import ModelRow
from sie_stream.edge.tables import latest_rows
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader
from sie_stream.privacy.declared import NO_SCHEMA, Declaration, DeclaredOutputs
from sie_stream.replay.versions import Declared, VersionBook


class _Spec(msgspec.Struct):
    output_schema: Raw = Raw(NO_SCHEMA)


def declared_outputs(reader: LogReader, names: TopicNames, open_reader: Callable[[], LogReader]) -> DeclaredOutputs:
    """Reads sie.models now, and sie.cluster once a version is asked for that is not in force: with a reader of its own,
    since `reader` may be in the middle of the results that are asked about.
    """

    def history() -> Iterator[Declaration]:
        from sie_stream.cli.replaying.declared import declarations  # the scheduler's fold: a second, and rarely needed

        with closing(open_reader()) as own:
            yield from declared_in(VersionBook(declarations(own, names)))

    return DeclaredOutputs(_in_force(reader, names), history)


def declared_in(book: VersionBook) -> Iterator[Declaration]:
    for one in book.history:
        if isinstance(one, Declared):
            yield one.launch.model, one.launch.version, bytes(one.launch.output_schema)


def _in_force(reader: LogReader, names: TopicNames) -> Iterator[Declaration]:
    for row in latest_rows(reader, names.models, lambda value: decode_row(value, ModelRow), tell).values():
        try:
            yield row.model, row.version, bytes(msgspec.json.decode(row.spec, type=_Spec).output_schema)
        except msgspec.MsgspecError:
            tell(f"{names.models}, key {row.model!r}: left out, its declaration is none")
