"""Validates a canonical document and turns every complaint into a Problem that says how to mend it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sie_stream.problems import Problem, shown, wrong_choice
from sie_stream.spec import model
from sie_stream.spec.checks import Finding, findings
from sie_stream.spec.forms import Canonical, Location, part_of, to_camel, to_snake
from sie_stream.spec.model import ModelSpec, Part

# Stand-ins for required fields that are wrong, so that the rest can still be checked.
_STAND_INS: Mapping[str, Any] = {"name": "x", "version": "0", "source": {"uri": "x"}, "min_gpu_memory_mb": 1}
_QUOTED = re.compile(r"'([^']*)'")


def _slug(value: str) -> str | None:
    found = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("-._")[:100]
    return found or None


def _padded_version(value: str) -> str | None:
    found = re.search(r"[0-9]+(\.[0-9]+){0,2}", value)
    return found.group() if found else None


# Each pattern in words, and how to guess what was meant.
_PATTERNS: Mapping[str, tuple[str, Callable[[str], str | None] | None]] = {
    model.NAME_PATTERN: (
        "a name has 1 to 100 of a-z, 0-9, '.', '_' and '-', and starts with a letter or digit "
        "(it is a part of a Kafka topic's name).",
        _slug,
    ),
    model.VERSION_PATTERN: ("a version looks like 1, 1.4 or 1.4.2, and may end in -rc.1 or +build.", _padded_version),
    model.TOPIC_PATTERN: ("a Kafka topic has 1 to 249 of letters, digits, '.', '_' and '-'.", None),
    model.SERVERS_PATTERN: ("bootstrap servers look like host:9092,host2:9092.", None),
    model.BACKEND_PATTERN: ("a backend is named with a-z, 0-9, '_' and '-'.", _slug),
    model.DIGEST_PATTERN: ("a digest is 'sha256:' and 64 hexadecimal digits.", None),
    model.RANGE_PATTERN: ("a version range looks like >=2.6,<3.", None),
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge", "is too small"),
    "greater_than": (">", "gt", "is too small"),
    "less_than_equal": ("<=", "le", "is too large"),
    "less_than": ("<", "lt", "is too large"),
}
_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}


def validated(document: Canonical, backends: tuple[str, ...] | None) -> tuple[ModelSpec | None, list[Problem]]:
    """The spec, or every problem of the document: names, types, limits, and how fields go together."""
    problems = list(document.problems)
    if document.body is None:
        return None, problems
    broken: set[str] = set()
    try:
        spec = ModelSpec.model_validate(document.body)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems.extend(_problem(document, detail) for detail in details if not _misspelt(detail, problems))
        broken = {str(detail["loc"][0]) for detail in details if detail["loc"]}
        spec = _salvaged(document.body, broken)
    if spec is None:
        return None, problems
    together = [finding for finding in findings(spec, backends) if broken.isdisjoint(finding.reads)]
    problems.extend(_located(document, finding) for finding in together)
    return (None if problems else spec), problems


def _misspelt(detail: ErrorDetails, problems: list[Problem]) -> bool:
    """A field is only missing because its name is misspelt, which is said already."""
    return detail["type"] == "missing" and any(
        to_snake(problem.nearest or "") == detail["loc"][-1] for problem in problems
    )


def _salvaged(body: dict[str, Any], broken: set[str]) -> ModelSpec | None:
    """The spec without its broken fields: enough to check how the others go together."""
    rest = {name: value for name, value in body.items() if name not in broken}
    rest.update({name: value for name, value in _STAND_INS.items() if name not in rest})
    try:
        return ModelSpec.model_validate(rest)
    except ValidationError:
        return None


def written_path(document: Canonical, location: Location) -> str:
    """How the document spells `location`, or would spell it."""
    for cut in range(len(location), 0, -1):
        known = document.written.get(location[:cut])
        if known is not None:
            path, rest = known, location[cut:]
            break
    else:
        path, rest = document.prefix, location
        if rest == ("name",):
            return "metadata.name" if document.prefix else ("modelId" if document.camel else "model_id")
    for step in rest:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            name = to_camel(step) if document.camel else step
            path = f"{path}.{name}" if path else name
    return path


def _located(document: Canonical, finding: Finding) -> Problem:
    path = written_path(document, finding.location)
    if finding.within:
        path += finding.within
    return Problem(path, shown(finding.value), finding.message, finding.allowed, finding.nearest)


def _problem(document: Canonical, detail: ErrorDetails) -> Problem:
    location, kind, value = detail["loc"], detail["type"], detail["input"]
    path = written_path(document, location)
    context = detail.get("ctx", {})
    if kind == "missing":
        return Problem(path, "", f"is missing. {_description(location)}")
    if kind == "literal_error":
        return wrong_choice(path, value, _QUOTED.findall(context["expected"]) or [context["expected"]], _what(location))
    if kind == "string_pattern_mismatch":
        words, guess = _PATTERNS[context["pattern"]]
        return Problem(path, shown(value), f"{shown(value)}: {words}", (), guess(str(value)) if guess else None)
    if kind in _BOUNDS:
        sign, key, words = _BOUNDS[kind]
        return Problem(path, shown(value), f"{shown(value)} {words}.", (f"{sign} {context[key]:.12g}",))
    if location == ("min_gpu_memory_mb",) and kind in ("int_type", "int_from_float"):
        return Problem(
            path, shown(value), f"{shown(value)}: a plain number is expected; the unit is in the field's name."
        )
    if kind in ("model_type", "model_attributes_type") and (names := _fields_at(location)):
        options = tuple(to_camel(name) for name in names) if document.camel else names
        return Problem(path, shown(value), f"{shown(value)}: an object with fields is expected.", options)
    if kind in _WANTED:
        hint = ' Put it in quotes: "' + str(value) + '".' if _is_scalar(value) and kind == "string_type" else ""
        return Problem(path, shown(value), f"{shown(value)}: {_WANTED[kind]} is expected.{hint}")
    message = detail["msg"]
    return Problem(path, shown(value), f"{shown(value)}: {message[:1].lower()}{message[1:]}.")


def _fields_at(location: Location) -> tuple[str, ...]:
    """Names of the fields of the object that should be there."""
    part: type[Part] = ModelSpec
    for step in location:
        if isinstance(step, int):
            continue
        info = part.model_fields.get(step)
        inner = part_of(info.annotation) if info is not None else None
        if inner is None:
            return ()
        part = inner
    return tuple(part.model_fields)


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _what(location: Location) -> str:
    names = [str(step) for step in location if isinstance(step, str)]
    return names[-1].replace("_", " ").removesuffix("s") if names else "value"


def _description(location: Location) -> str:
    """What the missing field is for, from its schema."""
    if len(location) == 1 and (info := ModelSpec.model_fields.get(str(location[0]))) is not None:
        examples = f" Example: {info.examples[0]!r}." if info.examples else ""
        return f"{info.description}{examples}"
    return ""
