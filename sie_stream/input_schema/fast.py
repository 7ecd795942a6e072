"""Turns a schema into one msgspec type, so that a good row is parsed and checked in one call into C.

It may refuse rows only for reasons that `exact` can name, and must never accept a row that `exact` refuses; a
property test holds both. Where msgspec cannot say what the schema says, `fast_type` returns None and the exact
checker does all the work.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, Optional, assert_never

import msgspec

from sie_stream.input_schema.language import (
    DEPTH_MAX,
    Anything,
    Array,
    Boolean,
    Choice,
    Integer,
    Node,
    Number,
    Object,
    Text,
)

# An integer of 309 digits or more is infinite as a double, which msgspec does not mind where any value may stand.
_LONG_NUMBER = re.compile(rb"[0-9]{300}")


class FastPlan(NamedTuple):
    """How to check a row quickly.

    decoder: of the schema's type. free: somewhere any value may stand, so depth and long numbers need a look first.
    skips: msgspec skips unknown members without reading them, so the row must be read once more in full.
    """

    decoder: msgspec.json.Decoder[Any]
    free: bool
    skips: bool


def plan(root: Object) -> FastPlan | None:
    """None when msgspec cannot express the schema."""
    found = fast_type(root)
    if found is None:
        return None
    nodes = list(_walk(root))
    skips = any(isinstance(node, Object) and bool(node.members) and node.extra is not None for node in nodes)
    free = skips or any(isinstance(node, Anything) for node in nodes)
    return FastPlan(msgspec.json.Decoder(found), free, skips)


def needs_exact(raw: bytes) -> bool:
    """True when a row with free parts may be too deep or hold a number without a double: the exact checker decides."""
    return raw.count(b"[") + raw.count(b"{") > DEPTH_MAX or _LONG_NUMBER.search(raw) is not None


def fast_type(node: Node) -> Any:
    """The msgspec type that accepts what `node` accepts, or None."""
    bare = _bare_type(node)
    if bare is None or isinstance(node, Anything):
        return bare
    return Optional[bare] if node.nullable else bare  # noqa: UP045 - `|` does not take every form built here


def _bare_type(node: Node) -> Any:
    match node:
        case Anything():
            return Any
        case Number():
            return Annotated[float, _number_meta(node)]
        case Integer():
            return Annotated[int, msgspec.Meta(ge=node.low, le=node.high)]
        case Text():
            meta = msgspec.Meta(min_length=node.length_min, max_length=node.length_max, pattern=node.pattern)
            return Annotated[str, meta]
        case Boolean():
            return bool
        case Choice():
            # Literal takes no floats, and would not take 1.0 for 1.
            return None if node.kind == "number" else Literal[node.values]
        case Array():
            items = fast_type(node.items)
            meta = msgspec.Meta(min_length=node.items_min, max_length=node.items_max)
            return None if items is None else Annotated[list[items], meta]
        case Object():
            return _object_type(node)
        case _:
            assert_never(node)


def _number_meta(node: Number) -> msgspec.Meta:
    bounds = {}
    if node.low is not None:
        bounds["gt" if node.low_open else "ge"] = node.low
    if node.high is not None:
        bounds["lt" if node.high_open else "le"] = node.high
    return msgspec.Meta(**bounds)


def _object_type(node: Object) -> Any:
    if not node.members and node.extra is not None:
        extra = fast_type(node.extra)
        return None if extra is None else dict[str, extra]
    if node.extra is not None and not isinstance(node.extra, Anything):
        return None  # a struct cannot type its unknown members
    fields: list[Any] = []
    for index, member in enumerate(node.members):
        inner = fast_type(member.node)
        if inner is None:
            return None
        if member.required:
            fields.append((f"f{index}", inner, msgspec.field(name=member.name)))
        else:
            optional = inner | msgspec.UnsetType if inner is not Any else Any
            fields.append((f"f{index}", optional, msgspec.field(name=member.name, default=msgspec.UNSET)))
    # kw_only: optional members may stand before required ones. gc=False: rows are dropped at once and hold no cycle.
    return msgspec.defstruct("Row", fields, forbid_unknown_fields=node.extra is None, kw_only=True, gc=False)


def _walk(node: Node) -> list[Node]:
    match node:
        case Array():
            return [node, *_walk(node.items)]
        case Object():
            inner = [deep for member in node.members for deep in _walk(member.node)]
            return [node, *inner, *([] if node.extra is None else _walk(node.extra))]
        case _:
            return [node]
