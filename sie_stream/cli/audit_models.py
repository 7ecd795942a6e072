"""Declarations and model cards of a bundle: of what is declared now, and of every version that answered."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from scheduler.adapter_bases import Following
from scheduler.launches import WEIGHT_SUFFIXES
from schemas.codec import decode_cluster
from schemas.wire import CodecError
from sie_stream.cli.audit_contents import declared_rows
from sie_stream.commands import ApplyModel, StartRollout
from sie_stream.control import ModelRow
from sie_stream.edge.tables import read_to_end
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader
from sie_stream.spec import ModelSpec, from_json, to_json

MODEL_CARD = "MODEL_CARD.md"
MARKS = (b"ApplyModel", b"StartRollout")
"""Nearly all of sie.cluster is something else, and is not decoded."""
GONE = "the declaration of {}@{}, which answered, is not on sie.cluster any more"

Version = tuple[str, str]
"""(model, version)."""


def write_models(
    folder: Path,
    reader: LogReader,
    names: TopicNames,
    answered: Mapping[Version, int],
    bases: Mapping[Version, Collection[str]] | None = None,
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Writes each declaration, and its card where the package can be read from here.

    `answered`: how many results of the bundle are of which version; empty model or version: of none. `bases`:
    digests of the weights below, which results of adapters name.
    Returns which are there, and how many results have none.
    """
    folder.mkdir()
    rows = declared_rows(reader, names.models, lambda _told: None)  # told when the payloads were read
    written = []
    for name, row in rows.items():
        _write(folder / name, row)
        written.append(f"{row.model}@{row.version}")
    declared = {(row.model, row.version) for row in rows.values()}
    wanted = {version: count for version, count in answered.items() if all(version) and version not in declared}
    found = _declared_before(reader, names.cluster, wanted, bases or {}) if wanted else {}
    for (model, version), row in sorted(found.items()):
        _write(folder / f"{model}@{version}", row)
        written.append(f"{model}@{version}")
    gone = {GONE.format(*version): count for version, count in sorted(wanted.items()) if version not in found}
    return tuple(written), gone


def _declared_before(
    reader: LogReader, topic: str, wanted: Mapping[Version, int], bases: Mapping[Version, Collection[str]]
) -> dict[Version, ModelRow]:
    """The newest declaration of each version that is wanted, as it was accepted."""
    found: dict[Version, ModelRow] = {}
    following = Following()
    for at_ms, command in _declarations(reader, topic):
        try:
            readings = [from_json(one) for one in following.readings(command)]
            written = from_json(command.spec)
        except ConfigError:
            continue  # it was never in force
        version = (written.name, written.version)
        if readings and version in wanted:
            spec = _that_answered(readings, bases.get(version, ())) or written
            found[version] = ModelRow(*version, 0, msgspec.Raw(to_json(spec)), "accepted", at_ms)
    return found


def _that_answered(readings: Sequence[ModelSpec], bases: Collection[str]) -> ModelSpec | None:
    """The declaration over the base that results name; None: nobody can say which it was, so it stays as written."""
    fitting = [one for one in readings if one.backend.config.get("base_digest") in bases]
    if fitting:
        return fitting[-1]
    return readings[0] if len(readings) == 1 else None


def _declarations(reader: LogReader, topic: str) -> Iterator[tuple[int, ApplyModel | StartRollout]]:
    for record in read_to_end(reader, topic, timeout_s=600.0):
        if record.value is None or not any(mark in record.value[:64] for mark in MARKS):
            continue
        try:
            command = decode_cluster(record.value)
        except CodecError:
            continue
        if isinstance(command, ApplyModel | StartRollout):
            yield record.timestamp_ms, command


def _write(path: Path, row: ModelRow) -> None:
    """`path` without its ending, which a version may hold dots for."""
    text = msgspec.json.format(msgspec.json.encode(row), indent=2) + b"\n"
    path.with_name(f"{path.name}.json").write_bytes(text)
    card = _card_of(row)
    if card.is_absolute() and card.is_file():
        path.with_name(f"{path.name}.{MODEL_CARD}").write_bytes(card.read_bytes())


def _card_of(row: ModelRow) -> Path:
    """In the package's folder; where the declaration names a file of weights, beside it."""
    declared = msgspec.json.decode(row.spec).get("source")
    uri = declared.get("uri", "") if isinstance(declared, dict) else ""
    source = Path(str(uri).removeprefix("file://"))
    return (source.parent if source.suffix in WEIGHT_SUFFIXES else source) / MODEL_CARD
