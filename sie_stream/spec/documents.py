"""From the text of a file to plain JSON-like documents: YAML or JSON, one or many, with nothing silently lost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from sie_stream.problems import Problem, SpecError, shown

TEXT_CHARS_MAX = 16 * 1024 * 1024
VALUES_MAX = 100_000  # YAML aliases can make a short text hold billions of values
DEPTH_MAX = 64


LISTS = ("List", "ModelServiceList")
"""Kinds of objects whose `items` are documents."""


class Document(NamedTuple):
    where: str
    body: object


class _TwiceError(Exception):
    """A key stands twice in one object."""

    def __init__(self, key: str, place: str) -> None:
        super().__init__(f"{key!r} is given twice{place}.")
        self.key = key


# libyaml, where PyYAML was built with it, reads a hundred declarations in half a second instead of ten.
_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """SafeLoader that refuses repeated keys, of which PyYAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise _TwiceError(key.value, f" (line {key.start_mark.line + 1})")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_documents(text: str, filename: str) -> list[Document]:
    """Every document in `text`. Lists of documents and Kubernetes `kind: List` objects are taken apart.

    Raises SpecError when the text cannot be read, holds no document, or holds values that JSON has no words for.
    """
    if len(text) > TEXT_CHARS_MAX:
        raise SpecError([Problem("", f"{len(text)} characters", "larger than 16 MiB; split the file.", where=filename)])
    bodies = [item for body in _load(text.removeprefix("\ufeff"), filename) for item in _items(body)]
    if not bodies:
        raise SpecError([Problem("", "", "no declaration in it.", where=filename)])
    if len(bodies) == 1:
        documents = [Document(filename, bodies[0])]
    else:
        documents = [Document(f"{filename}, document {index + 1}", body) for index, body in enumerate(bodies)]
    problems = [problem for document in documents for problem in _foreign(document)]
    if problems:
        raise SpecError(problems)
    return documents


def _load(text: str, filename: str) -> list[object]:
    """Parsed documents, the empty ones left out. JSON is tried first where the file looks like it."""
    if filename.endswith((".json", ".jsonl", ".ndjson")):
        try:
            return _load_json(text)
        except (json.JSONDecodeError, _TwiceError, RecursionError) as error:
            raise SpecError([_unreadable("JSON", error, filename)]) from error
    if text.lstrip()[:1] in ("{", "["):
        try:
            return _load_json(text)
        except (json.JSONDecodeError, RecursionError):
            pass  # YAML may start with a brace as well, and its error then names the better place
        except _TwiceError as error:
            raise SpecError([_unreadable("JSON", error, filename)]) from error
    try:
        return [body for body in yaml.load_all(text, _Loader) if body is not None]
    except (yaml.YAMLError, _TwiceError, RecursionError, ValueError) as error:  # ValueError: impossible dates
        raise SpecError([_unreadable("YAML", error, filename)]) from error


def _load_json(text: str) -> list[object]:
    decoder = json.JSONDecoder(object_pairs_hook=_no_repeats)
    found, at = [], 0
    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at == len(text):
            return found
        body, at = decoder.raw_decode(text, at)
        found.append(body)


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    body: dict[str, object] = {}
    for key, value in pairs:
        if key in body:
            raise _TwiceError(key, "")
        body[key] = value
    return body


def _unreadable(language: str, error: Exception, filename: str) -> Problem:
    if isinstance(error, RecursionError):
        return Problem("", "", f"nested too deep to be read as {language}.", where=filename)
    if isinstance(error, _TwiceError):
        return Problem(error.key, shown(error.key), str(error), where=filename)
    words = " ".join(str(error).split()).replace(
        'in "<unicode string>", ', "at "
    )  # PyYAML names the text, not the file
    return Problem("", "", f"not valid {language}: {words}.", where=filename)


def _items(body: object) -> list[object]:
    if isinstance(body, list):
        return body
    if isinstance(body, Mapping) and body.get("kind") in LISTS:
        items = body.get("items")
        return items if isinstance(items, list) else []
    return [body]


def _foreign(document: Document) -> list[Problem]:
    """Values that YAML knows and JSON does not, and documents that are too large once their aliases are resolved."""
    problems: list[Problem] = []
    stack: list[tuple[str, object, int]] = [("", document.body, 0)]
    count = 0
    while stack:
        path, value, depth = stack.pop()
        count += 1
        if count > VALUES_MAX or depth > DEPTH_MAX:
            message = f"more than {VALUES_MAX} values or {DEPTH_MAX} levels; a declaration is small."
            return [Problem(path[:200], "...", message, where=document.where)]
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(key, str):
                    stack.append((f"{path}.{key}" if path else key, inner, depth + 1))
                else:
                    message = f"the key {shown(key)} is not text; put it in quotes."
                    problems.append(Problem(path, shown(key), message, where=document.where))
        elif isinstance(value, list):
            stack.extend((f"{path}[{index}]", inner, depth + 1) for index, inner in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(Problem(path, shown(value), "not a finite number.", where=document.where))
        elif not isinstance(value, str | int | float | None):
            message = f"YAML reads this as a {type(value).__name__}; put it in quotes to make it text."
            problems.append(Problem(path, str(value), message, where=document.where))
    return problems
