"""The slow, exact checker: says which field is wrong, what it holds, what is allowed, and the nearest spelling.

It runs only on rows that the fast check refused, or could not judge. Outcomes worth knowing:
NaN, Infinity and numbers too large for a double are `not_finite`; integers outside 64 bits are `out_of_range`; a
byte order mark is `not_json`; a broken or unpaired UTF-8/UTF-16 sequence is `bad_utf8`; more than 32 levels are
`too_deep`; a repeated key counts with its last value, as everywhere in JSON, but each of its values must be allowed.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, assert_never

from sie_stream.errors import InvalidRequest, nearest
from sie_stream.input_schema.language import (
    DEPTH_MAX,
    Anything,
    Array,
    Boolean,
    Choice,
    Integer,
    Member,
    Node,
    Number,
    Object,
    Text,
)
from sie_stream.problems import shown

CODES = (
    "missing_field",
    "unknown_field",
    "wrong_type",
    "out_of_range",
    "too_long",
    "too_short",
    "not_allowed",
    "not_finite",
    "too_deep",
    "not_json",
    "bad_utf8",
)
_FAULTS_MAX = 20
_NAMES_MAX = 12
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_INT_CHARS_MAX = 20  # a sign and the 19 digits of 2**63
_BOM = b"\xef\xbb\xbf"


class InvalidInput(InvalidRequest):
    """The inputs do not fit the model's schema. `code` is one of CODES; `field` is a dotted path, '' for the whole."""


class Fault(NamedTuple):
    code: str
    field: str
    message: str


class _Unreal(str):
    """The text of a number that no finite double can hold."""


class _LongInt(str):
    """The text of an integer longer than any 64-bit one. Not converted: Python's own limit on digits would raise."""


class _Pairs(list):
    """An object's members in order, repeated names included."""


def check_exact(root: Object, raw: bytes) -> None:
    """Raises InvalidInput for the first fault, in the order of the document, and says how many more there are."""
    value = parse(raw)
    faults: list[Fault] = []
    _check(root, value, "", faults, False)
    if not faults:
        return
    first, more = faults[0], len(faults) - 1
    suffix = f" ({more} more problem{'s' if more > 1 else ''} in this row.)" if more else ""
    raise InvalidInput(first.code, first.message + suffix, first.field)


def parse(raw: bytes) -> object:
    """The JSON value, with stand-ins for what a plain parse would lose. Raises InvalidInput."""
    if raw.startswith(_BOM):
        raise InvalidInput("not_json", "the inputs start with a byte order mark; send plain UTF-8 without one.")
    if _depth(raw) > DEPTH_MAX:
        raise InvalidInput("too_deep", f"the inputs are nested more than {DEPTH_MAX} levels deep; flatten them.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            "bad_utf8", f"byte {error.start} of the inputs is not valid UTF-8; encode as UTF-8."
        ) from None
    if not text.strip():
        raise InvalidInput("not_json", "the inputs are empty; send one JSON object.")
    try:
        return json.loads(text, object_pairs_hook=_Pairs, parse_constant=_Unreal, parse_float=_real, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise InvalidInput("not_json", f"the inputs are not JSON: {error.msg} at character {error.pos}.") from None


def _real(text: str) -> float | _Unreal:
    value = float(text)
    return _Unreal(text) if value in (float("inf"), float("-inf")) else value


def _whole(text: str) -> int | _LongInt:
    return int(text) if len(text) <= _INT_CHARS_MAX else _LongInt(text)


def _depth(raw: bytes) -> int:
    if raw.count(b"[") + raw.count(b"{") <= DEPTH_MAX:
        return 0  # cannot be too deep, and most rows end here
    depth = deepest = 0
    for token in _STRUCTURE.finditer(raw):
        char = token.group()
        if char in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif char in (b"]", b"}"):
            depth -= 1
    return deepest


def _check(node: Node, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    """Appends what is wrong with `value`. `secret`: personal data, whose value no message may repeat."""
    if len(faults) >= _FAULTS_MAX:
        return
    if isinstance(value, _Unreal):
        _add(faults, "not_finite", path, value, secret, "is not a finite number.")
    elif value is None and not isinstance(node, Anything):
        if not node.nullable:
            faults.append(Fault("wrong_type", path, f"{_name(path)} is null; {_wanted(node)} is expected."))
    elif isinstance(value, str) and not isinstance(value, _LongInt) and not _encodes(value):
        faults.append(Fault("bad_utf8", path, f"{_name(path)} holds half of a surrogate pair, which is no character."))
    else:
        _check_present(node, value, path, faults, secret)


def _check_present(node: Node, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    match node:
        case Anything():
            _anything(value, path, faults, secret)
        case Number():
            _number(node, value, path, faults, secret)
        case Integer():
            _integer(node, value, path, faults, secret)
        case Text():
            _text(node, value, path, faults, secret)
        case Boolean():
            if not isinstance(value, bool):
                _wrong_type(node, value, path, faults, secret)
        case Choice():
            _choice(node, value, path, faults, secret)
        case Array():
            _array(node, value, path, faults, secret)
        case Object():
            _object(node, value, path, faults, secret)
        case _:
            assert_never(node)


def _anything(value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if isinstance(value, _LongInt):
        _as_double(value, path, faults, secret)
    elif isinstance(value, _Pairs):
        for name, inner in value:
            if _good_name(name, path, faults):
                _check(Anything(), inner, _below(path, name, secret), faults, secret)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check(Anything(), inner, f"{path}[{index}]", faults, secret)


def _as_double(value: object, path: str, faults: list[Fault], secret: bool) -> float | None:
    """The number as the double a model will see; None when it is no number, or has no double (then noted)."""
    if isinstance(value, bool) or not isinstance(value, int | float | _LongInt):
        return None
    number = float(value)
    if number in (float("inf"), float("-inf")):
        _add(faults, "not_finite", path, value, secret, "is too large for a 64-bit float.")
        return None
    return number


def _number(node: Number, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | _LongInt):
        _wrong_type(node, value, path, faults, secret)
        return
    number = _as_double(value, path, faults, secret)
    if number is None:
        return
    low_ok = node.low is None or number > node.low or (number == node.low and not node.low_open)
    high_ok = node.high is None or number < node.high or (number == node.high and not node.high_open)
    if not (low_ok and high_ok):
        _add(faults, "out_of_range", path, value, secret, f"is outside the allowed range: {_range(node)}.")


def _integer(node: Integer, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        hint = f"an integer has no fraction or exponent: send {int(value)}."
        _add(faults, "wrong_type", path, value, secret, f"is a float; {hint if not secret else 'send an integer.'}")
    elif isinstance(value, bool) or not isinstance(value, int | _LongInt):
        _wrong_type(node, value, path, faults, secret)
    elif isinstance(value, _LongInt) or not node.low <= value <= node.high:
        message = f"is outside the allowed range: {node.low} to {node.high}."
        _add(faults, "out_of_range", path, value, secret, message)


def _text(node: Text, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if not isinstance(value, str) or isinstance(value, _LongInt):
        _wrong_type(node, value, path, faults, secret)
    elif len(value) < node.length_min:
        _add(faults, "too_short", path, value, secret, f"has {len(value)} characters; at least {node.length_min}.")
    elif node.length_max is not None and len(value) > node.length_max:
        _add(faults, "too_long", path, value, secret, f"has {len(value)} characters; at most {node.length_max}.")
    elif node.pattern is not None and re.search(node.pattern, value) is None:
        _add(faults, "not_allowed", path, value, secret, f"does not match the pattern {node.pattern!r}.")


def _choice(node: Choice, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if isinstance(value, _LongInt):
        value = _as_double(value, path, faults, secret) if node.kind == "number" else value
        if value is None:
            return
    typed = {"string": str, "integer": int}.get(node.kind, int | float)
    if isinstance(value, bool) or not isinstance(value, typed) or isinstance(value, _LongInt):
        _wrong_type(node, value, path, faults, secret)
        return
    number = _as_double(value, path, faults, secret) if node.kind == "number" else value
    options = [float(option) for option in node.values] if node.kind == "number" else node.values
    if number not in options:
        guess = nearest(value, [str(option) for option in node.values]) if isinstance(value, str) else None
        hint = f" Did you mean {guess!r}?" if guess and not secret else ""
        _add(faults, "not_allowed", path, value, secret, f"is not one of {_listed(node.values)}.{hint}")


def _array(node: Array, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if not isinstance(value, list) or isinstance(value, _Pairs):
        _wrong_type(node, value, path, faults, secret)
        return
    if len(value) < node.items_min:
        faults.append(Fault("too_short", path, f"{_name(path)} has {len(value)} items; at least {node.items_min}."))
    elif node.items_max is not None and len(value) > node.items_max:
        faults.append(Fault("too_long", path, f"{_name(path)} has {len(value)} items; at most {node.items_max}."))
    for index, item in enumerate(value):
        if len(faults) >= _FAULTS_MAX:
            return
        _check(node.items, item, f"{path}[{index}]", faults, secret)


def _object(node: Object, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    if not isinstance(value, _Pairs):
        _wrong_type(node, value, path, faults, secret)
        return
    members = {member.name: member for member in node.members}
    seen = frozenset(name for name, _ in value)
    for name, inner in value:
        if not _good_name(name, path, faults):
            continue
        if (member := members.get(name)) is not None:
            _check(member.node, inner, _join(path, name), faults, secret or member.pii)
        elif node.extra is not None:
            _check(node.extra, inner, _below(path, name, secret), faults, secret)
        elif secret:
            faults.append(Fault("unknown_field", path, f"{_name(path)} holds an unknown field."))
        else:
            faults.append(_unknown(name, node.members, path))
    for member in node.members:
        if member.required and member.name not in seen:
            message = f"{_name(_join(path, member.name))} is missing; {_wanted(member.node)} is expected."
            faults.append(Fault("missing_field", _join(path, member.name), message))


def _unknown(name: str, members: tuple[Member, ...], path: str) -> Fault:
    names = [member.name for member in members]
    guess = nearest(name, names)
    hint = f"Did you mean {guess!r}?" if guess else f"Known fields: {_listed(names)}."
    return Fault("unknown_field", _join(path, name), f"unknown field {shown(name)}. {hint}")


def _good_name(name: str, path: str, faults: list[Fault]) -> bool:
    if _encodes(name):
        return True
    faults.append(Fault("bad_utf8", path, "a field name holds half of a surrogate pair, which is no character."))
    return False


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _wrong_type(node: Node, value: object, path: str, faults: list[Fault], secret: bool) -> None:
    # A list or an object says more by its kind than by its start. What stands where marked fields belong may be theirs.
    hide = secret or isinstance(value, list) or _holds_marks(node)
    _add(faults, "wrong_type", path, value, hide, f"is {_kind(value)}; {_wanted(node)} is expected.")


def _holds_marks(node: Node) -> bool:
    """Whether a property anywhere in it is marked `pii`."""
    if isinstance(node, Array):
        return _holds_marks(node.items)
    return isinstance(node, Object) and any(member.pii or _holds_marks(member.node) for member in node.members)


def _add(faults: list[Fault], code: str, path: str, value: object, hide: bool, message: str) -> None:
    """One fault about a present value, which is shown unless `hide`."""
    show = shown(value) if not isinstance(value, _Unreal | _LongInt) else shown(str(value)).strip("'")
    faults.append(Fault(code, path, f"{_name(path)} {message}" if hide else f"{_name(path)} = {show} {message}"))


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float | _LongInt):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, _Pairs) else "an array"


def _wanted(node: Node) -> str:
    match node:
        case Anything():
            return "a value"
        case Number():
            return "a number" if node.low is None and node.high is None else f"a number ({_range(node)})"
        case Integer():
            return "an integer"
        case Text():
            return "a string"
        case Boolean():
            return "true or false"
        case Choice():
            return f"one of {_listed(node.values)}"
        case Array():
            return "an array"
        case Object():
            return "an object"
        case _:
            assert_never(node)


def _range(node: Number) -> str:
    low = None if node.low is None else f"{'above' if node.low_open else 'at least'} {node.low:g}"
    high = None if node.high is None else f"{'below' if node.high_open else 'at most'} {node.high:g}"
    return " and ".join(part for part in (low, high) if part)


def _listed(values: object) -> str:
    items = [shown(value) for value in values] if isinstance(values, tuple | list) else []
    return ", ".join(items[:_NAMES_MAX]) + (f" and {len(items) - _NAMES_MAX} more" if len(items) > _NAMES_MAX else "")


def _join(path: str, name: str) -> str:
    short = name if len(name) <= 60 else name[:57] + "..."
    return f"{path}.{short}" if path else short


def _below(path: str, name: str, secret: bool) -> str:
    """Where a value is whose name no schema lists. Below personal data such a name is personal data, too."""
    return path if secret else _join(path, name)


def _name(path: str) -> str:
    return path or "the inputs object"
