"""The JSON Schema (draft 2020-12) of a declaration, for editors and CI of the people who write them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from sie_stream.spec.forms import API_VERSION, FLAT, KIND, SOURCE_KEYS, Form, to_camel
from sie_stream.spec.model import ModelSpec

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER = {"type": "number", "exclusiveMinimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 1}
# The short spellings of `forms.SHORT`, as schemas.
_SHORT: Mapping[str, dict[str, Any]] = {
    "source": _TEXT,
    "backend": _TEXT,
    "tokenizer": _TEXT,
    "kafka_input": _TEXT,
    "kafka_output": _TEXT,
    "paged_attention": {"type": "boolean"},
    "batch_sizes": {"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 1}]},
    "preferred_precision": {"enum": ["fp32", "bf16", "fp16", "fp8", "int8", "int4"]},
    "tier": {"enum": [0, 1, 2]},
    "quota": _NUMBER,
}
# Fields that may be written under either of two names; one of them is required.
_EITHER = (("model_id", "name"), ("min_gpu_memory_gb", "min_gpu_memory_mb"))


def json_schema(form: Form = "model-spec") -> dict[str, Any]:
    """The schema of one written form: `modelservice` in camelCase, the other two in snake_case."""
    schema = ModelSpec.model_json_schema()
    parts = schema.pop("$defs")
    properties = schema["properties"]
    flat = {name: _flat(name, target, properties, parts) for name, target in FLAT.items()}
    for name, short in _SHORT.items():
        properties[name] = _either(properties[name], short)
    _allow_source_keys(parts["Source"])
    _allow_one_size(parts["BatchSizes"])
    schema["properties"] = {"model_id": flat.pop("model_id"), **properties, **flat}
    twins = {name for pair in _EITHER for name in pair}
    schema["required"] = [name for name in schema["required"] if name not in twins]
    schema["allOf"] = [{"oneOf": [{"required": [name]} for name in pair]} for pair in _EITHER]
    schema["description"] = "One model, as SIE-Stream serves it."
    head = {"$schema": DRAFT, "$id": f"https://{API_VERSION}/{form}.json", "title": KIND}
    if form != "modelservice":
        return head | {key: value for key, value in schema.items() if key != "title"} | {"$defs": parts}
    parts = {name: _camel(part) for name, part in parts.items()}
    return head | _object(_camel(schema)) | {"$defs": parts}


def _flat(name: str, target: tuple[str, ...], properties: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of a flat name: that of the field it stands for."""
    if name == "min_gpu_memory_gb":
        about = "Device memory one replica needs, in GiB (1,024 MiB)."
        return {**_NUMBER, "description": about, "examples": [16, 0.5]}
    found = properties[target[0]]
    if len(target) == 2:
        part = parts[_reference(found)]
        found = part["properties"][target[1]]
    return copy.deepcopy(found)


def _reference(schema: Mapping[str, Any]) -> str:
    """The name of the object type that a field's schema refers to, directly or beside null."""
    options = [schema, *schema.get("anyOf", ()), *schema.get("allOf", ())]
    return next(option["$ref"] for option in options if "$ref" in option).rsplit("/", 1)[-1]


def _either(schema: dict[str, Any], short: dict[str, Any]) -> dict[str, Any]:
    words = {key: value for key, value in schema.items() if key in ("description", "examples", "default", "title")}
    rest = {key: value for key, value in schema.items() if key not in words}
    options = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return words | {"anyOf": [short, *options]}


def _allow_source_keys(part: dict[str, Any]) -> None:
    uri = part["properties"]["uri"]
    for key, scheme in SOURCE_KEYS.items():
        about = f"Instead of `uri`; {scheme} may be left out." if scheme else "Instead of `uri`."
        part["properties"][key] = _TEXT | {"description": about, "examples": uri["examples"][:1]}
    part.pop("required")
    part["oneOf"] = [{"required": [key]} for key in ("uri", *SOURCE_KEYS)]


def _allow_one_size(part: dict[str, Any]) -> None:
    part["properties"]["preferred"] = _either(part["properties"]["preferred"], _COUNT)


def _camel(schema: dict[str, Any]) -> dict[str, Any]:
    """The object schema with camelCase names, also where they are required."""
    renamed = dict(schema)
    renamed["properties"] = {to_camel(name): value for name, value in schema["properties"].items()}
    for key in ("required",):
        if key in schema:
            renamed[key] = [to_camel(name) for name in schema[key]]
    for key in ("oneOf", "allOf"):
        if key in schema:
            renamed[key] = [_camel_choice(option) for option in schema[key]]
    return renamed


def _camel_choice(option: dict[str, Any]) -> dict[str, Any]:
    if "required" in option:
        return {"required": [to_camel(name) for name in option["required"]]}
    return {"oneOf": [_camel_choice(inner) for inner in option["oneOf"]]}


def _object(spec: dict[str, Any]) -> dict[str, Any]:
    """The Kubernetes object around the spec. Its name may come from metadata, so the spec need not repeat it."""
    named = [choice for choice in spec["allOf"] if {"required": ["modelId"]} not in choice["oneOf"]]
    inner = {key: value for key, value in spec.items() if key != "title"} | {"allOf": named}
    labels = {"type": "object", "additionalProperties": {"type": "string"}, "description": "For people and selectors."}
    name = {
        "type": "string",
        "description": "Name of the model, unless spec.modelId gives it.",
        "examples": ["churn-eu"],
    }
    return {
        "type": "object",
        "description": "The Kubernetes object of one model.",
        "properties": {
            "apiVersion": {"const": API_VERSION, "description": "Always this.", "examples": [API_VERSION]},
            "kind": {"const": KIND, "description": "Always this.", "examples": [KIND]},
            "metadata": {"type": "object", "properties": {"name": name, "labels": labels}, "required": ["name"]},
            "spec": inner,
            "status": {"type": "object", "description": "Written by the operator."},
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    }
