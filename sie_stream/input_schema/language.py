"""The language of `input_schema` and `output_schema`: the part of JSON Schema that can be checked quickly.

    schema   = {"type": "object", "properties": {NAME: property, ...}, "required": [NAME, ...],
                "additionalProperties": false | true | property}
    property = any of these types, with `nullable: true` (or `type: [T, "null"]`) to allow null
      number    minimum, maximum, exclusiveMinimum, exclusiveMaximum
      integer   the same; without them the range of a signed 64-bit integer
      string    minLength, maxLength (characters), pattern (unanchored, as in JSON Schema)
      boolean
      array     items, minItems, maxItems
      object    as above
      enum      a list of strings or numbers instead of any other limit
      (none)    any JSON value

Two defaults differ from JSON Schema: an object that lists `properties` takes no others (a misspelt feature must not
pass), and an integer must be written without fraction or exponent. `default` is kept for the model's own use. Anything
else is refused here, so that nobody believes in a limit that nothing checks.

`pii` marks personal data of a property. `true`: never in an error message, a keyed hash in audit bundles. `hash` and
`encrypt`: besides, nothing that SIE-Stream writes after scoring holds the plain value (sie_stream/privacy).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Literal, cast

import msgspec

from sie_stream.errors import nearest
from sie_stream.problems import Problem, shown, unknown_name, wrong_choice

DEPTH_MAX = 32
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

Protection = Literal["hash", "encrypt"]
PROTECTIONS: tuple[Protection, ...] = ("hash", "encrypt")
TYPES = ("number", "integer", "string", "boolean", "array", "object")
ANNOTATIONS = frozenset({"title", "description", "examples", "default", "pii", "deprecated", "$comment"})
ROOT_ANNOTATIONS = frozenset({"$schema", "$id"})
_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
LIMITS: Mapping[str, frozenset[str]] = {
    "number": _RANGE,
    "integer": _RANGE,
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "boolean": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
KEYWORDS = tuple(
    sorted({"type", "enum", "nullable"} | ANNOTATIONS | {word for words in LIMITS.values() for word in words})
)


class Anything(msgspec.Struct, frozen=True):
    """Any JSON value, null included."""


class Number(msgspec.Struct, frozen=True):
    """A finite double. `low`/`high` are inclusive unless `low_open`/`high_open`."""

    nullable: bool = False
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False


class Integer(msgspec.Struct, frozen=True):
    nullable: bool = False
    low: int = INT64_MIN
    high: int = INT64_MAX


class Text(msgspec.Struct, frozen=True):
    """Lengths in Unicode characters."""

    nullable: bool = False
    length_min: int = 0
    length_max: int | None = None
    pattern: str | None = None


class Boolean(msgspec.Struct, frozen=True):
    nullable: bool = False


class Choice(msgspec.Struct, frozen=True):
    """One of `values`, which are all strings, all integers, or all numbers (`kind`)."""

    kind: str
    values: tuple[str | int | float, ...]
    nullable: bool = False


class Array(msgspec.Struct, frozen=True):
    items: Node
    nullable: bool = False
    items_min: int = 0
    items_max: int | None = None


class Member(msgspec.Struct, frozen=True):
    name: str
    node: Node
    required: bool
    pii: bool
    protection: Protection | None = None


class Object(msgspec.Struct, frozen=True):
    """`extra` is what other names may hold; None means that there may be none."""

    members: tuple[Member, ...]
    extra: Node | None
    nullable: bool = False


Node = Anything | Number | Integer | Text | Boolean | Choice | Array | Object


class Reader:
    """Reads one schema and notes every problem it meets; unreadable parts become `Anything` so that reading goes on."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def root(self, schema: object, path: str) -> Object:
        if not isinstance(schema, Mapping):
            self._note(path, schema, "a schema is an object such as {type: object, properties: {...}}.")
            return Object((), Anything())
        body = {key: value for key, value in schema.items() if key not in ROOT_ANNOTATIONS}
        body.setdefault("type", "object")
        if body["type"] != "object":
            self._note(f"{path}.type", body["type"], "the inputs of a model are one object, so this must be 'object'.")
            return Object((), Anything())
        node = self.node(body, path, 1)
        if not isinstance(node, Object):
            return Object((), Anything())
        if node.nullable:
            self._note(path, True, "the inputs object itself may not be null.")
        return node

    def node(self, schema: object, path: str, depth: int) -> Node:
        if not isinstance(schema, Mapping):
            self._note(path, schema, "a property is described by an object such as {type: number}.")
            return Anything()
        if depth > DEPTH_MAX:
            self._note(path, "...", f"nested more than {DEPTH_MAX} levels deep.")
            return Anything()
        kind, nullable = self._type(schema, path)
        self._keywords(schema, path, kind)
        if "enum" in schema:
            return self._choice(schema, path, kind, nullable)
        build = self._builders().get(kind)
        return build(schema, path, nullable, depth) if build else Anything()

    def _builders(self) -> dict[str, Callable[[Mapping[str, object], str, bool, int], Node]]:
        return {
            "number": self._number,
            "integer": self._integer,
            "string": self._text,
            "boolean": lambda _schema, _path, nullable, _depth: Boolean(nullable),
            "array": self._array,
            "object": self._object,
        }

    def _note(self, path: str, value: object, message: str) -> None:
        self.problems.append(Problem(path, shown(value), message))

    def _type(self, schema: Mapping[str, object], path: str) -> tuple[str, bool]:
        """The type word ('' = any value), and whether null is allowed."""
        kind = schema.get("type", "")
        nullable = self._flag(schema, "nullable", path)
        if isinstance(kind, list | tuple):
            names = [name for name in kind if name != "null"]
            nullable = nullable or len(names) < len(kind)
            if len(names) != 1:
                self._note(f"{path}.type", kind, "a property has one type, and may have 'null' beside it.")
                return "", nullable
            kind = names[0]
        if kind != "" and kind not in TYPES:
            self.problems.append(wrong_choice(f"{path}.type", kind, TYPES, "type"))
            return "", nullable
        return str(kind), nullable

    def _keywords(self, schema: Mapping[str, object], path: str, kind: str) -> None:
        allowed = {"type", "enum", "nullable"} | ANNOTATIONS | LIMITS.get(kind, frozenset())
        self._mark(schema, path)
        for word in schema:
            if word in allowed or str(word).startswith("x-"):
                continue
            if word not in KEYWORDS:
                problem = unknown_name(f"{path}.{word}", str(word), KEYWORDS, "or unsupported keyword")
                self.problems.append(problem)
            elif kind or "type" not in schema:  # with an unreadable type, its limits are not wrong as well
                owners = [name for name in TYPES if word in LIMITS[name]]
                self._note(f"{path}.{word}", schema[word], f"{word!r} needs type {' or '.join(owners)}.")

    def _flag(self, schema: Mapping[str, object], word: str, path: str) -> bool:
        value = schema.get(word, False)
        if not isinstance(value, bool):
            self._note(f"{path}.{word}", value, f"{word!r} is true or false.")
            return False
        return value

    def _mark(self, schema: Mapping[str, object], path: str) -> None:
        value = schema.get("pii", False)
        if not isinstance(value, bool) and value not in PROTECTIONS:
            self.problems.append(wrong_choice(f"{path}.pii", value, ("true", "false", *PROTECTIONS), "mark"))

    def _unmarked(self, schema: object, path: str, *, below: bool) -> None:
        """A protection that no path leads to would protect nothing. `below`: nor may any part of the schema have it."""
        if not isinstance(schema, Mapping):
            return
        if schema.get("pii") in PROTECTIONS:
            self._note(f"{path}.pii", schema["pii"], "mark the named property that holds it; here it has no name.")
        if below:
            properties = schema.get("properties")
            inner = dict(properties) if isinstance(properties, Mapping) else {}
            for name, part in (*inner.items(), ("items", schema.get("items"))):
                self._unmarked(part, f"{path}.{name}", below=True)

    def _count(self, schema: Mapping[str, object], word: str, path: str) -> int | None:
        value = schema.get(word)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INT64_MAX:
            self._note(f"{path}.{word}", value, f"{word!r} is a whole number, 0 or more.")
            return None
        return value

    def _bounds(self, schema: Mapping[str, object], low: str, high: str, path: str) -> tuple[int, int | None]:
        least, most = self._count(schema, low, path) or 0, self._count(schema, high, path)
        if most is not None and least > most:
            self._note(f"{path}.{low}", least, f"{low!r} is above {high!r} ({most}), so nothing could pass.")
            return 0, None
        return least, most

    def _limit(self, schema: Mapping[str, object], word: str, path: str) -> int | float | None:
        value = schema.get(word)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
            self._note(f"{path}.{word}", value, f"{word!r} is a finite number.")
            return None
        return value

    def _number(self, schema: Mapping[str, object], path: str, nullable: bool, depth: int) -> Node:
        low, low_open = _tighter(
            self._limit(schema, "minimum", path), self._limit(schema, "exclusiveMinimum", path), max
        )
        high, high_open = _tighter(
            self._limit(schema, "maximum", path), self._limit(schema, "exclusiveMaximum", path), min
        )
        if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
            self._note(path, low, f"the lower bound {low} leaves nothing below the upper bound {high}.")
            return Number(nullable)
        return Number(nullable, low, high, low_open, high_open)

    def _integer(self, schema: Mapping[str, object], path: str, nullable: bool, depth: int) -> Node:
        low, high = INT64_MIN, INT64_MAX
        if (value := self._limit(schema, "minimum", path)) is not None:
            low = max(low, math.ceil(value))
        if (value := self._limit(schema, "exclusiveMinimum", path)) is not None:
            low = max(low, math.floor(value) + 1)
        if (value := self._limit(schema, "maximum", path)) is not None:
            high = min(high, math.floor(value))
        if (value := self._limit(schema, "exclusiveMaximum", path)) is not None:
            high = min(high, math.ceil(value) - 1)
        if low > high:
            self._note(path, low, f"no integer lies between {low} and {high}.")
            return Integer(nullable)
        return Integer(nullable, low, high)

    def _text(self, schema: Mapping[str, object], path: str, nullable: bool, depth: int) -> Node:
        least, most = self._bounds(schema, "minLength", "maxLength", path)
        pattern = schema.get("pattern")
        if pattern is not None:
            try:
                re.compile(cast(str, pattern))
            except (re.error, TypeError) as error:
                self._note(f"{path}.pattern", pattern, f"not a regular expression: {error}.")
                pattern = None
        return Text(nullable, least, most, cast("str | None", pattern))

    def _array(self, schema: Mapping[str, object], path: str, nullable: bool, depth: int) -> Node:
        least, most = self._bounds(schema, "minItems", "maxItems", path)
        items = self.node(schema["items"], f"{path}.items", depth + 1) if "items" in schema else Anything()
        self._unmarked(schema.get("items"), f"{path}.items", below=False)
        return Array(items, nullable, least, most)

    def _object(self, schema: Mapping[str, object], path: str, nullable: bool, depth: int) -> Node:
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            self._note(f"{path}.properties", properties, "'properties' maps each name to its schema.")
            properties = {}
        required = self._required(schema.get("required", ()), properties, f"{path}.required")
        members = tuple(
            Member(
                str(name),
                self.node(body, f"{path}.properties.{name}", depth + 1),
                name in required,
                isinstance(body, Mapping) and bool(body.get("pii")),
                _protection(body),
            )
            for name, body in properties.items()
            if self._is_name(name, f"{path}.properties")
        )
        rest = schema.get("additionalProperties", "properties" not in schema)
        if isinstance(rest, bool):
            extra = Anything() if rest else None
        else:
            extra = self.node(rest, f"{path}.additionalProperties", depth + 1)
            self._unmarked(rest, f"{path}.additionalProperties", below=True)
        return Object(members, extra, nullable)

    def _is_name(self, name: object, path: str) -> bool:
        if isinstance(name, str) and not any(ord(char) < 32 or char in '"\\' or _is_surrogate(char) for char in name):
            return True
        self._note(path, name, "a property name is text without quotes, backslashes or control characters.")
        return False

    def _required(self, names: object, properties: Mapping[str, object], path: str) -> frozenset[str]:
        if not isinstance(names, list | tuple):
            self._note(path, names, "'required' is a list of property names.")
            return frozenset()
        known = tuple(str(name) for name in properties)
        for index, name in enumerate(names):
            if name not in known:
                guess = nearest(str(name), known)
                self.problems.append(
                    Problem(f"{path}[{index}]", shown(name), f"{shown(name)} is not a property.", known, guess)
                )
        return frozenset(name for name in names if isinstance(name, str))

    def _choice(self, schema: Mapping[str, object], path: str, kind: str, nullable: bool) -> Node:
        values = schema["enum"]
        for word in schema:
            if word in LIMITS.get(kind, frozenset()):
                self._note(f"{path}.{word}", schema[word], f"'enum' already says what is allowed; drop {word!r}.")
        if not isinstance(values, list | tuple) or not [value for value in values if value is not None]:
            self._note(f"{path}.enum", values, "'enum' is a list with at least one value.")
            return Anything()
        nullable = nullable or None in values
        options = [value for value in values if value is not None]
        found = _kind_of(options)
        if not found or (kind and kind != found and (kind, found) != ("number", "integer")):
            wanted = {"": "strings or numbers", "string": "strings"}.get(kind, f"{kind}s")
            self._note(f"{path}.enum", values, f"'enum' holds only {wanted}, all of one type and in range.")
            return Anything()
        return Choice(kind or found, tuple(dict.fromkeys(options)), nullable)


def _protection(body: object) -> Protection | None:
    mark = body.get("pii") if isinstance(body, Mapping) else None
    return cast(Protection, mark) if mark in PROTECTIONS else None


def _kind_of(values: list[object]) -> str:
    """The one type of all values, or ''."""
    if all(isinstance(value, str) and not any(_is_surrogate(char) for char in value) for value in values):
        return "string"
    if any(not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value) for value in values):
        return ""
    if all(isinstance(value, int) and INT64_MIN <= value <= INT64_MAX for value in values):
        return "integer"
    return "number"


def _tighter(
    closed: int | float | None, opened: int | float | None, pick: Callable[[float, float], float]
) -> tuple[float | None, bool]:
    """The stricter of an inclusive and an exclusive bound, and whether it is exclusive."""
    if opened is None:
        return (None if closed is None else float(closed)), False
    if closed is None or float(closed) == float(opened):
        return float(opened), True
    stricter = pick(float(closed), float(opened))
    return stricter, stricter == float(opened)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_surrogate(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"
