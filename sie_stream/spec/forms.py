"""The three written forms of a declaration, and the way from each of them to the canonical shape and back.

modelservice   the Kubernetes object: apiVersion sie.lmsys.org/v1, kind ModelService, metadata, spec (camelCase)
model-spec     model-spec.yaml: the same fields flat, in snake_case
descriptor     a short JSON object: as model-spec, with `backend_config` beside `backend`

Every form accepts camelCase and snake_case keys, the short spellings of SHORT and the flat names of FLAT.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import yaml

from sie_stream.problems import Problem, shown, unknown_name, wrong_choice
from sie_stream.spec.documents import LISTS
from sie_stream.spec.model import ModelSpec, Part

API_VERSION = "sie.lmsys.org/v1"
KIND = "ModelService"
Form = Literal["modelservice", "model-spec", "descriptor"]
FORMS: tuple[Form, ...] = get_args(Form)

# Names at the top of a declaration that stand for a field elsewhere.
FLAT: Mapping[str, tuple[str, ...]] = {
    "model_id": ("name",),
    "min_replicas": ("replicas", "min"),
    "max_replicas": ("replicas", "max"),
    "backend_config": ("backend", "config"),
    "p99_latency_ms": ("slas", "p99_latency_ms"),
    "max_queue_time_ms": ("slas", "max_queue_time_ms"),
    "max_batch_size": ("batch_sizes", "max"),
    "preferred_batch_sizes": ("batch_sizes", "preferred"),
    "min_gpu_memory_gb": ("min_gpu_memory_mb",),
}
_METADATA = ("name", "labels")
# What the Kubernetes API server adds to an object, and says nothing about the model.
_METADATA_OF_SERVER = frozenset(
    {
        "namespace", "annotations", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields",
        "finalizers", "ownerReferences", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds", "generateName",
    }
)  # fmt: skip
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

Location = tuple[str | int, ...]


# `source: {hf: ORG/REPO}` says the same as `source: {uri: "hf://ORG/REPO"}`.
SOURCE_KEYS: Mapping[str, str] = {
    "path": "", "url": "", "package": "package://", "s3": "s3://", "hf": "hf://", "oci": "oci://"
}  # fmt: skip


def _source(value: object) -> object:
    if isinstance(value, str):
        return {"uri": value}
    if not isinstance(value, Mapping) or "uri" in value:
        return value
    found = [key for key in value if key in SOURCE_KEYS]
    if len(found) != 1 or not isinstance(value[found[0]], str):
        return value
    place, scheme = value[found[0]], SOURCE_KEYS[found[0]]
    uri = place if place.startswith(scheme) else scheme + place
    return {"uri": uri} | {key: inner for key, inner in value.items() if key != found[0]}


def _sizes(value: object) -> object:
    """`preferred` may be one size."""
    if isinstance(value, Mapping) and isinstance(value.get("preferred"), int):
        return {**value, "preferred": [value["preferred"]]}
    return _batch_sizes(value)


def _batch_sizes(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(size, int) for size in value):
        return {"preferred": value, "max": max(value)}
    return {"max": value} if isinstance(value, int) and not isinstance(value, bool) else value


def _wrap(kind: type, key: str) -> Callable[[object], object]:
    return lambda value: {key: value} if isinstance(value, kind) else value


# Short spellings of a field's value.
SHORT: Mapping[str, Callable[[object], object]] = {
    "source": _source,
    "backend": _wrap(str, "name"),
    "tokenizer": _wrap(str, "path"),
    "kafka_input": _wrap(str, "topic"),
    "kafka_output": _wrap(str, "topic"),
    "paged_attention": lambda value: {"enabled": value} if isinstance(value, bool) else value,
    "batch_sizes": _sizes,
    "preferred_precision": lambda value: [value] if isinstance(value, str) else value,
    "tier": lambda value: f"tier-{value}" if isinstance(value, int) and not isinstance(value, bool) else value,
    "quota": lambda value: (
        {"requests_per_second": value} if isinstance(value, int | float) and not isinstance(value, bool) else value
    ),
}


def to_camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def to_snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def part_of(annotation: object) -> type[Part] | None:
    """The object type inside a field's annotation (`Lora | None`, `tuple[Baseline, ...]`), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    for inner in get_args(annotation):
        if (found := part_of(inner)) is not None:
            return found
    return None


class Canonical(NamedTuple):
    """A document in the canonical shape, not yet validated.

    body: None when it is no declaration at all.
    written: how the document spells the path of each canonical location. camel: how to spell paths it lacks.
    """

    body: dict[str, Any] | None
    written: dict[Location, str]
    prefix: str
    camel: bool
    problems: list[Problem]


def canonical(document: object) -> Canonical:
    """Brings any of the three forms into the canonical shape; unknown and repeated names become problems."""
    if not isinstance(document, Mapping):
        problem = Problem("", shown(document), "a declaration is an object such as {model_id: ..., version: ...}.")
        return Canonical(None, {}, "", False, [problem])
    if not any(key in document for key in ("apiVersion", "kind", "metadata", "spec")):
        reader = _Reader(camel=_speaks_camel(document))
        reader.part(ModelSpec, document, (), "", reader.body)
        return reader.result("")
    spec = document.get("spec", {})
    reader = _Reader(camel=not isinstance(spec, Mapping) or not any("_" in str(key) for key in spec))
    reader.envelope(document)
    if any(problem.path == "kind" and problem.value and problem.nearest != KIND for problem in reader.problems):
        return Canonical(None, {}, "", False, reader.problems)
    if isinstance(spec, Mapping):
        reader.part(ModelSpec, spec, (), "spec", reader.body)
    else:
        reader.problems.append(Problem("spec", shown(spec), "an object with the model's fields is expected."))
    if isinstance(metadata := document.get("metadata", {}), Mapping):
        reader.metadata(metadata)
    else:
        reader.problems.append(Problem("metadata", shown(metadata), "an object with a name is expected."))
    return reader.result("spec")


def _speaks_camel(body: Mapping[str, object]) -> bool:
    return any(key != key.lower() for key in map(str, body)) and not any("_" in str(key) for key in body)


class _Reader:
    def __init__(self, camel: bool) -> None:
        self.camel = camel
        self.body: dict[str, Any] = {}
        self.written: dict[Location, str] = {}
        self.problems: list[Problem] = []

    def result(self, prefix: str) -> Canonical:
        return Canonical(self.body, self.written, prefix, self.camel, self.problems)

    def envelope(self, document: Mapping[str, object]) -> None:
        for key, allowed in (("apiVersion", (API_VERSION,)), ("kind", (KIND, *LISTS))):
            if key not in document:
                self.problems.append(Problem(key, "", "is missing.", allowed[:1]))
            elif document[key] != allowed[0]:
                self.problems.append(wrong_choice(key, document[key], allowed, key))
        known = ("apiVersion", "kind", "metadata", "spec", "status")
        self.problems.extend(unknown_name(key, key, known, "field") for key in document if key not in known)

    def metadata(self, metadata: Mapping[str, object]) -> None:
        for key, value in metadata.items():
            location: Location = (key,)
            if key in _METADATA and location not in self.written:
                self.body[key] = value
                self.written[location] = f"metadata.{key}"
            elif key == "labels":
                self.problems.append(Problem("metadata.labels", shown(value), "also given as spec.labels; keep one."))
            elif key != "name" and key not in _METADATA_OF_SERVER:
                self.problems.append(unknown_name(f"metadata.{key}", key, _METADATA, "field"))

    def part(self, model: type[Part], body: Mapping[str, object], at: Location, path: str, into: dict) -> None:
        """Reads one object of type `model` into `into`, which other names may have filled in part."""
        flat = FLAT if model is ModelSpec else {}
        for key, value in body.items():
            here = f"{path}.{key}" if path else key
            name = self._meant(model, key, body, here)
            if name is None:
                continue
            if name == "min_gpu_memory_gb":
                self.field(model, "min_gpu_memory_mb", self._mebibytes(value, here), at, here, into)
            elif len(target := flat.get(name, (name,))) == 2:
                outer = into.setdefault(target[0], {})
                inner = part_of(model.model_fields[target[0]].annotation)
                if isinstance(outer, dict) and inner is not None:
                    self.field(inner, target[1], value, (*at, target[0]), here, outer)
            else:
                self.field(model, target[0], value, at, here, into)

    def _meant(self, model: type[Part], key: str, body: Mapping[str, object], path: str) -> str | None:
        """The field that `key` names; None: none of them. One that is misspelt is told, and read as the nearest unless
        that is given, too: so what is wrong inside it is told in the same round.
        """
        flat = FLAT if model is ModelSpec else {}
        name = key if key in model.model_fields or key in flat else to_snake(key)
        if (name in model.model_fields or name in flat) and key in (name, to_camel(name)):
            return name
        problem = unknown_name(path, key, self._names(model, flat), "field")
        self.problems.append(problem)
        if problem.nearest is None or any(to_snake(other) == to_snake(problem.nearest) for other in body):
            return None
        return to_snake(problem.nearest)

    def field(self, model: type[Part], name: str, value: object, at: Location, path: str, into: dict) -> None:
        location = (*at, name)
        inner = part_of(model.model_fields[name].annotation)
        written = value
        if model is ModelSpec and name in SHORT:
            value = SHORT[name](written)
        if location in self.written or (name in into and not (inner and isinstance(value, Mapping))):
            earlier = self.written.get(location) or self._first_part(location)
            self.problems.append(Problem(path, shown(value), f"given twice, also as {earlier}; keep one."))
            return
        self.written[location] = path
        if isinstance(value, Mapping) and inner is not None and not isinstance(written, Mapping):
            for key, part in value.items():  # a short spelling: its parts have no place of their own
                self.field(inner, key, part, location, path, into.setdefault(name, {}))
        elif inner is not None and isinstance(value, Mapping):
            self.part(inner, value, location, path, into.setdefault(name, {}))
        elif inner is not None and isinstance(value, list):
            into[name] = [self._item(inner, item, (*location, index), path) for index, item in enumerate(value)]
        else:
            into[name] = value

    def _first_part(self, location: Location) -> str:
        return next(path for known, path in self.written.items() if known[: len(location)] == location)

    def _item(self, model: type[Part], item: object, location: Location, path: str) -> object:
        here = f"{path}[{location[-1]}]"
        self.written[location] = here
        if not isinstance(item, Mapping):
            return item
        fresh: dict[str, Any] = {}
        self.part(model, item, location, here, fresh)
        return fresh

    def _names(self, model: type[Part], flat: Mapping[str, object]) -> list[str]:
        names = [*model.model_fields, *flat]
        return [to_camel(name) for name in names] if self.camel else names

    def _mebibytes(self, value: object, path: str) -> object:
        """GiB to whole MiB, rounded up. Anything but a number is left for the validator, under its own path."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return math.ceil(value * 1024)
        return value


def to_document(spec: ModelSpec, form: Form) -> str:
    """The declaration as text, only with what differs from the defaults. `parse_documents` reads it back equal."""
    body = spec.model_dump(mode="json", exclude_defaults=True)
    body = {"model_id": body.pop("name"), **body}
    if set(body["source"]) == {"uri"}:
        body["source"] = body["source"]["uri"]
    body.update({f"{bound}_replicas": value for bound, value in body.pop("replicas", {}).items()})
    if body.get("paged_attention") == {}:
        body["paged_attention"] = True
    backend = body.get("backend", {})
    if backend:
        body["backend"] = backend = {"name": spec.backend.name, **backend}
    if form == "descriptor" and "config" in backend:
        body["backend_config"] = backend.pop("config")
    if set(backend) == {"name"}:
        body["backend"] = spec.backend.name
    if form == "descriptor":
        return json.dumps(body, ensure_ascii=False, indent=2) + "\n"
    if form == "model-spec":
        return yaml.safe_dump(body, sort_keys=False, width=100)
    return yaml.safe_dump(_as_object(spec, body), sort_keys=False, width=100)


def _as_object(spec: ModelSpec, body: dict[str, Any]) -> dict[str, Any]:
    """The Kubernetes object. Names that Kubernetes does not allow keep the model's own name in spec.modelId."""
    metadata: dict[str, Any] = {"name": spec.name}
    if _DNS_NAME.fullmatch(spec.name):
        body.pop("model_id")
    else:
        metadata["name"] = re.sub(r"[^a-z0-9]+", "-", spec.name).strip("-")
    if labels := body.pop("labels", None):
        metadata["labels"] = labels
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": camel_keys(ModelSpec, body)}


def camel_keys(model: type[Part], body: Mapping[str, Any]) -> dict[str, Any]:
    """Field names in camelCase, at every level; the user's own keys (config, schemas, labels) stay as they are."""
    result: dict[str, Any] = {}
    for name, value in body.items():
        info = model.model_fields.get(name)
        inner = part_of(info.annotation) if info is not None else None
        if inner is not None and isinstance(value, Mapping):
            value = camel_keys(inner, value)
        elif inner is not None and isinstance(value, list):
            value = [camel_keys(inner, item) for item in value]
        result[to_camel(name)] = value
    return result
