"""Declarations: what a user writes about a model, in three forms, read into one ModelSpec.

    specs = parse_documents(text, "models.yaml")     # YAML or JSON, one document or many
    text = to_document(specs[0], "modelservice")     # and back, in any form
    raw = to_json(specs[0])                          # the form on the control log; from_json(raw) reads it

Errors are one SpecError that lists every problem of every document: its path as the document spells it, the value,
what is allowed and the nearest spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sie_stream.problems import Problem, SpecError
from sie_stream.spec.checks import colliding, set_problems, text_field, topic_key
from sie_stream.spec.documents import read_documents
from sie_stream.spec.enforcement import ENFORCED, not_enforced
from sie_stream.spec.explain import validated
from sie_stream.spec.forms import API_VERSION, FORMS, KIND, Form, canonical, to_document
from sie_stream.spec.model import (
    BUILT_IN_BACKENDS,
    BackendSpec,
    Baseline,
    BatchSizes,
    Gates,
    Golden,
    KafkaInput,
    KafkaOutput,
    Lora,
    ModelSpec,
    PagedAttention,
    Pin,
    Probe,
    Probes,
    Quota,
    Replicas,
    Requires,
    Rollout,
    Slas,
    Source,
    Tokenizer,
    Toleration,
)
from sie_stream.spec.published import json_schema

__all__ = [
    "API_VERSION",
    "BUILT_IN_BACKENDS",
    "ENFORCED",
    "FORMS",
    "KIND",
    "BackendSpec",
    "Baseline",
    "BatchSizes",
    "Form",
    "Gates",
    "Golden",
    "KafkaInput",
    "KafkaOutput",
    "Lora",
    "ModelSpec",
    "PagedAttention",
    "Pin",
    "Probe",
    "Probes",
    "Problem",
    "Quota",
    "Replicas",
    "Requires",
    "Rollout",
    "Slas",
    "Source",
    "SpecError",
    "Tokenizer",
    "Toleration",
    "colliding",
    "from_json",
    "json_schema",
    "not_enforced",
    "parse_documents",
    "parse_object",
    "text_field",
    "to_document",
    "to_json",
    "topic_key",
]


def parse_documents(
    text: str, filename: str = "declaration", backends: Iterable[str] | None = BUILT_IN_BACKENDS
) -> list[ModelSpec]:
    """Every declaration in `text`, in order. `backends`: names that may be used (built in, and plug-ins); None: any.

    Raises SpecError with the problems of all documents.
    """
    allowed = None if backends is None else tuple(backends)
    problems: list[Problem] = []
    found: list[tuple[str, ModelSpec]] = []
    for document in read_documents(text, filename):
        spec, faults = validated(canonical(document.body), allowed)
        problems.extend(msgspec.structs.replace(fault, where=document.where) for fault in faults)
        if spec is not None:
            found.append((document.where, spec))
    problems.extend(set_problems(found))
    if problems:
        raise SpecError(problems)
    return [spec for _, spec in found]


def parse_object(
    body: Mapping[str, object], where: str = "", backends: Iterable[str] | None = BUILT_IN_BACKENDS
) -> ModelSpec:
    """One declaration that is already an object, in any of the three forms. Raises SpecError."""
    spec, problems = validated(canonical(body), None if backends is None else tuple(backends))
    if spec is None:
        raise SpecError([msgspec.structs.replace(problem, where=where) for problem in problems])
    return spec


def to_json(spec: ModelSpec) -> bytes:
    """The declaration as one JSON object, only with what differs from the defaults; equal specs give equal bytes."""
    return spec.model_dump_json(exclude_defaults=True).encode()


def from_json(raw: bytes | msgspec.Raw) -> ModelSpec:
    """Reads `to_json`, or any form as one JSON object, with every check but whether the backend is installed here.

    Raises SpecError.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SpecError([Problem("", "", f"not valid JSON: {error}.")]) from error
    return parse_object(body, backends=None)
