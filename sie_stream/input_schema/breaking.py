"""What a new version's schemas break for those who use the old one: every difference that matters, with its reason.

Inputs are written by clients of the old version, so the new one must take what the old one took. Outputs are read by
them, so the new one must not say what the old one could not say. A changed range is a break in either direction: a
value that moved from 0..1 to 0..100 is still a number, and means something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from sie_stream.input_schema.language import (
    INT64_MAX,
    INT64_MIN,
    Anything,
    Array,
    Choice,
    Integer,
    Node,
    Number,
    Object,
    Reader,
    Text,
)

Side = Literal["input", "output"]


class Break(Struct, frozen=True):
    """One thing that clients of the old version would stumble over. `path`: e.g. `input.address.zip`."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def schema_breaks(old: bytes, new: bytes, side: Side) -> tuple[Break, ...]:
    """Breaks between two schemas as JSON (`{}`: anything goes), in the order of the old one; empty: compatible."""
    before, after = _read(old), _read(new)
    return tuple(_differences(before, after, side, side))


def _read(schema: bytes) -> Object:
    body = msgspec.json.decode(schema, type=dict[str, object])
    return Reader().root(body, "")


def _differences(old: Node, new: Node, path: str, side: Side) -> Iterator[Break]:
    if type(old) is not type(new):
        yield from _retyped(old, new, path, side)
        return
    if isinstance(old, Anything):
        return
    yield from _nulls(old, new, path, side)
    match old, new:
        case (Number() | Integer(), Number() | Integer()):
            yield from _ranges(old, new, path)
        case (Text(), Text()):
            yield from _texts(old, new, path, side)
        case (Choice(), Choice()):
            yield from _choices(old, new, path, side)
        case (Array(), Array()):
            lengths = (old.items_min, old.items_max), (new.items_min, new.items_max)
            if lengths[0] != lengths[1]:
                yield Break(path, f"its length changed from {_span(*lengths[0])} to {_span(*lengths[1])} items")
            yield from _differences(old.items, new.items, f"{path}[]", side)
        case (Object(), Object()):
            yield from _members(old, new, path, side)
        case _:
            return


def _retyped(old: Node, new: Node, path: str, side: Side) -> Iterator[Break]:
    """A whole number is a number, and anything takes everything: one direction of each is no break."""
    narrow, wide = (old, new) if side == "input" else (new, old)
    if isinstance(wide, Anything):
        return
    if isinstance(narrow, Integer) and isinstance(wide, Number):
        yield from _ranges(old, new, path)
        return
    verb = "narrowed" if side == "input" and isinstance(old, Number | Anything) else "changed"
    yield Break(path, f"its type {verb} from {_name(old)} to {_name(new)}")


def _nulls(old: Node, new: Node, path: str, side: Side) -> Iterator[Break]:
    was, is_now = getattr(old, "nullable", True), getattr(new, "nullable", True)
    if side == "input" and was and not is_now:
        yield Break(path, "null was allowed and is refused now")
    if side == "output" and is_now and not was:
        yield Break(path, "it was never null and may be now")


def _ranges(old: Node, new: Node, path: str) -> Iterator[Break]:
    before, after = _range(old), _range(new)
    if before != after:
        yield Break(path, f"its range changed from {before} to {after}")


def _range(node: Node) -> str:
    if isinstance(node, Integer):
        low = None if node.low == INT64_MIN else node.low
        high = None if node.high == INT64_MAX else node.high
        return _span(low, high)
    assert isinstance(node, Number), node
    return _span(_bound(node.low), _bound(node.high), node.low_open, node.high_open)


def _bound(value: float | None) -> float | int | None:
    """10.0 and 10 are one bound."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _span(low: float | None, high: float | None, low_open: bool = False, high_open: bool = False) -> str:
    if low is None and high is None:
        return "unlimited"
    left = "(-inf" if low is None else f"{'(' if low_open else '['}{low}"
    right = "inf)" if high is None else f"{high}{')' if high_open else ']'}"
    return f"{left}, {right}"


def _texts(old: Text, new: Text, path: str, side: Side) -> Iterator[Break]:
    before, after = (old.length_min, old.length_max), (new.length_min, new.length_max)
    if before != after:
        yield Break(path, f"its length changed from {_span(*before)} to {_span(*after)} characters")
    tighter, wider = (new, old) if side == "input" else (old, new)
    if tighter.pattern is not None and tighter.pattern != wider.pattern:
        yield Break(path, f"its pattern changed from {old.pattern or 'none'!r} to {new.pattern or 'none'!r}")


def _choices(old: Choice, new: Choice, path: str, side: Side) -> Iterator[Break]:
    gone = [value for value in old.values if value not in new.values]
    come = [value for value in new.values if value not in old.values]
    if side == "input" and gone:
        yield Break(path, f"values {', '.join(map(str, gone))} were allowed and are refused now")
    if side == "output" and come:
        yield Break(path, f"values {', '.join(map(str, come))} are new; readers of the old version do not know them")


def _members(old: Object, new: Object, path: str, side: Side) -> Iterator[Break]:
    known = {member.name: member for member in new.members}
    for member in old.members:
        inner = f"{path}.{member.name}"
        now = known.get(member.name)
        if now is None:
            yield from _removed(member.required, new, inner, side)
            continue
        if side == "input" and now.required and not member.required:
            yield Break(inner, "it was optional and is required now")
        if side == "output" and member.required and not now.required:
            yield Break(inner, "it was always there and may be missing now")
        if side == "output" and member.protection != now.protection:
            before, after = member.protection or "plain", now.protection or "plain"
            yield Break(inner, f"its value is written in another way (pii: {before} before, {after} now)")
        yield from _differences(member.node, now.node, inner, side)
    before = {member.name for member in old.members}
    for member in new.members:
        if member.name not in before and side == "input" and member.required:
            yield Break(f"{path}.{member.name}", "a new required field; requests of today do not have it")
    if side == "input" and old.extra is not None and new.extra is None:
        yield Break(path, "fields that are not named were allowed and are refused now")


def _removed(required: bool, new: Object, path: str, side: Side) -> Iterator[Break]:
    if side == "output":
        if required:
            yield Break(path, "a required field was removed; readers of the old version rely on it")
        return
    if new.extra is None:
        what = "a required field" if required else "a field"
        yield Break(path, f"{what} was removed, and requests that still send it would be refused")
    elif required:
        yield Break(path, "a required field was removed; what it said would be ignored")


_NAMES: Mapping[str, str] = {"Text": "string", "Choice": "enum", "Anything": "anything"}


def _name(node: Node) -> str:
    kind = type(node).__name__
    return _NAMES.get(kind, kind.lower())
