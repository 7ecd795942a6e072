"""Checks a row of inputs (or outputs) against a model's schema: one call into C for good rows, words for bad ones.

    validator = compile_schema({"properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]})
    validator.check(b'{"age": 41}')      # returns None
    validator.check(b'{"agee": 41}')     # raises InvalidInput: unknown_field, field "agee", did you mean 'age'?

The language is described in `language`, the outcomes of odd input in `exact`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from sie_stream.input_schema.exact import CODES, InvalidInput, check_exact
from sie_stream.input_schema.fast import needs_exact, plan
from sie_stream.input_schema.language import Array, Object, Protection, Reader, Text
from sie_stream.problems import Problem, SpecError, shown

__all__ = ["CODES", "InputValidator", "InvalidInput", "compile_schema", "schema_problems"]


class InputValidator:
    """One compiled schema. Holds no state between rows; may be shared between threads.

    fields:     names of the top-level properties, in the schema's order (the order of a scorer's features)
    required:   those that must be present
    defaults:   the `default` of each top-level property that has one
    pii_fields: dotted paths of the properties marked `pii`, `people[].name` inside arrays
    protected:  {path: how} of those among them that are marked `hash` or `encrypt`
    text_field: the one property that plain text can fill: the only string among the required ones, or the only
                string there is; None when there is no such single one
    """

    def __init__(self, root: Object, schema: Mapping[str, object]) -> None:
        self._root = root
        self._plan = plan(root)
        self._untyped = msgspec.json.Decoder()
        self.fields = tuple(member.name for member in root.members)
        self.required = tuple(member.name for member in root.members if member.required)
        self.defaults = _defaults(schema)
        marks = tuple(_marks(root, ""))
        self.pii_fields = tuple(path for path, _ in marks)
        self.protected: dict[str, Protection] = {path: how for path, how in marks if how is not None}
        self.text_field = _text_field(root)

    def check(self, raw: bytes | msgspec.Raw) -> None:
        """Returns when the row fits. Raises InvalidInput, which names the field, its value and what is allowed."""
        fast = self._plan
        if fast is None or (fast.free and needs_exact(bytes(raw))):
            check_exact(self._root, bytes(raw))
            return
        try:
            fast.decoder.decode(raw)
            if fast.skips:
                self._untyped.decode(raw)
            return
        except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            refusal = str(error)
        # Outside the handler: the exact error stands alone in a traceback, without msgspec's shorter one above it.
        check_exact(self._root, bytes(raw))
        said = "" if self.pii_fields else f": {refusal}"  # it may quote a value
        raise InvalidInput("not_json", f"the inputs cannot be read{said}.")

    def check_exact(self, raw: bytes) -> None:
        """The slow twin of `check`: same verdict, no fast path."""
        check_exact(self._root, raw)


def compile_schema(schema: Mapping[str, object]) -> InputValidator:
    """Raises SpecError with every unsupported or contradictory keyword, each with its nearest spelling."""
    problems = schema_problems(schema, "schema")
    if problems:
        raise SpecError(problems)
    return InputValidator(Reader().root(schema, "schema"), schema)


def schema_problems(schema: object, path: str) -> list[Problem]:
    """Everything wrong with a schema; `path` is where it stands in its document, as in `spec.input_schema`."""
    reader = Reader()
    root = reader.root(schema, path)
    if reader.problems or not isinstance(schema, Mapping):
        return reader.problems
    return _default_problems(root, schema, path)


def _defaults(schema: Mapping[str, object]) -> dict[str, object]:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: body["default"] for name, body in properties.items() if isinstance(body, Mapping) and "default" in body
    }


def _default_problems(root: Object, schema: Mapping[str, object], path: str) -> list[Problem]:
    """A default that its own property would refuse."""
    problems = []
    nodes = {member.name: member for member in root.members}
    for name, value in _defaults(schema).items():
        only = Object((nodes[name],), None)
        try:
            check_exact(only, msgspec.json.encode({name: value}))
        except (InvalidInput, TypeError, msgspec.MsgspecError) as error:
            problems.append(Problem(f"{path}.properties.{name}.default", shown(value), f"not allowed here: {error}"))
    return problems


def _marks(node: Object, path: str) -> Iterator[tuple[str, Protection | None]]:
    for member in node.members:
        here = f"{path}.{member.name}" if path else member.name
        if member.pii:
            yield here, member.protection
            continue
        inner = member.node
        while isinstance(inner, Array):
            inner, here = inner.items, f"{here}[]"
        if isinstance(inner, Object):
            yield from _marks(inner, here)


def _text_field(root: Object) -> str | None:
    texts = [member for member in root.members if isinstance(member.node, Text)]
    required = [member for member in root.members if member.required]
    if len(required) == 1 and required[0] in texts:
        return required[0].name
    return texts[0].name if len(texts) == 1 and not required else None
