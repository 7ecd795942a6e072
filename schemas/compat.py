"""Whether records written with one schema can be read with another: Avro's resolution rules, with reasons.

Levels as in Confluent's registry: BACKWARD, the new schema reads what the old one wrote; FORWARD, the old one reads
what the new one writes; FULL, both. The rules are those of the Avro specification 1.12, "Schema Resolution", strictly:
a value that fits only by luck (a union branch the reader lacks) is incompatible.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from sie_stream.errors import ConfigError

Level = Literal["NONE", "BACKWARD", "FORWARD", "FULL"]

_PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_NAMED = ("record", "error", "enum", "fixed")


def incompatibilities(new: str, old: str, level: Level) -> tuple[str, ...]:
    """What breaks at this level, one sentence each; empty: compatible. Raises ConfigError for what is no JSON."""
    new_schema, old_schema = _schema(new), _schema(old)
    found: list[str] = []
    if level in ("BACKWARD", "FULL"):
        found += (f"backward: {reason}" for reason in unreadable(new_schema, old_schema))
    if level in ("FORWARD", "FULL"):
        found += (f"forward: {reason}" for reason in unreadable(old_schema, new_schema))
    return tuple(found)


def unreadable(reader: Any, writer: Any) -> tuple[str, ...]:
    """Why `reader` cannot read everything that `writer` writes (plain JSON forms); empty when it can."""
    return tuple(_Check(reader, writer).differences(reader, writer, ""))


def _schema(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not an Avro schema: {error}") from error


class _Check:
    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader_names = _names(reader)
        self._writer_names = _names(writer)
        self._under_way: list[tuple[str, str]] = []

    def differences(self, reader: Any, writer: Any, path: str) -> list[str]:
        reader, writer = self._resolve(reader, self._reader_names), self._resolve(writer, self._writer_names)
        if isinstance(writer, list):
            return [reason for branch in writer for reason in self.differences(reader, branch, path)]
        if isinstance(reader, list):
            return self._into_union(reader, writer, path)
        reader_kind, writer_kind = reader["type"], writer["type"]
        if reader_kind != writer_kind:
            if reader_kind in _PROMOTIONS.get(writer_kind, ()):
                return []
            return [f"{_at(path)}: {writer_kind} cannot be read as {reader_kind}"]
        match reader_kind:
            case "record" | "error":
                return self._records(reader, writer, path)
            case "enum":
                return self._enums(reader, writer, path)
            case "array":
                return self.differences(reader["items"], writer["items"], f"{path}[]")
            case "map":
                return self.differences(reader["values"], writer["values"], f"{path}{{}}")
            case "fixed":
                same = _short(reader) == _short(writer) and reader["size"] == writer["size"]
                return [] if same else [f"{_at(path)}: fixed {_short(writer)} changed its name or size"]
            case _:
                return []

    def _resolve(self, schema: Any, names: dict[str, Any]) -> Any:
        """A union as a list, anything else as an object with `type`."""
        while True:
            if isinstance(schema, str):
                schema = names.get(schema, {"type": schema})
            elif isinstance(schema, dict) and isinstance(schema["type"], dict | list):
                schema = schema["type"]
            elif isinstance(schema, dict) and schema["type"] in names and schema["type"] not in _NAMED:
                schema = names[schema["type"]]
            else:
                return schema

    def _into_union(self, reader: list[Any], writer: Any, path: str) -> list[str]:
        for branch in reader:
            if not self.differences(branch, writer, path):
                return []
        return [f"{_at(path)}: {writer['type']} is none of the branches that the reader knows"]

    def _records(self, reader: Any, writer: Any, path: str) -> list[str]:
        names = (_short(reader), *(alias.rpartition(".")[2] for alias in reader.get("aliases", ())))
        if _short(writer) not in names:
            return [f"{_at(path)}: record {_short(writer)!r} was expected to be called {_short(reader)!r}"]
        pair = (str(reader["name"]), str(writer["name"]))
        if pair in self._under_way:  # a recursive type: what is asked here is being answered further up
            return []
        self._under_way.append(pair)
        written = {field["name"]: field for field in writer["fields"]}
        found: list[str] = []
        for field in reader["fields"]:
            spellings = (field["name"], *field.get("aliases", ()))
            source = next((written[name] for name in spellings if name in written), None)
            inner = f"{path}.{field['name']}" if path else field["name"]
            if source is not None:
                found += self.differences(field["type"], source["type"], inner)
            elif "default" not in field:
                found.append(f"{inner}: the writer has no such field and it has no default")
        self._under_way.pop()
        return found

    def _enums(self, reader: Any, writer: Any, path: str) -> list[str]:
        if _short(reader) != _short(writer):
            return [f"{_at(path)}: enum {_short(writer)!r} was expected to be called {_short(reader)!r}"]
        unknown = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
        if unknown and "default" not in reader:
            return [f"{_at(path)}: symbols {', '.join(unknown)} are unknown to the reader, which has no default"]
        return []


def _at(path: str) -> str:
    return path or "the record"


def _short(schema: Any) -> str:
    return str(schema["name"]).rpartition(".")[2]


def _names(schema: Any) -> dict[str, Any]:
    """Named types by their short and their full names."""
    found: dict[str, Any] = {}
    pending: list[tuple[Any, str]] = [(schema, "")]
    while pending:
        part, namespace = pending.pop()
        if isinstance(part, list):
            pending += ((branch, namespace) for branch in part)
        elif isinstance(part, dict):
            if part.get("type") in _NAMED:
                namespace = part.get("namespace", namespace)
                name = str(part["name"])
                found[name] = part
                found.setdefault(_short(part), part)
                found.setdefault(f"{namespace}.{name}", part)
            pending += ((field["type"], namespace) for field in part.get("fields", ()))
            pending += ((part[key], namespace) for key in ("items", "values") if key in part)
            if isinstance(part.get("type"), dict | list):
                pending.append((part["type"], namespace))
    return found
