"""How the fields of one declaration, and the declarations of one file, must go together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sie_stream.backend_facts import KINDS_OF_BACKEND, PRECISIONS_OF_KIND
from sie_stream.input_schema import InputValidator, InvalidInput, compile_schema, schema_problems
from sie_stream.problems import Problem, closest, shown
from sie_stream.spec.bases import MODEL_BASE, named_base
from sie_stream.spec.model import SOURCE_SCHEMES, VERSION_PATTERN, ModelSpec

BASELINES_MIN = 3
TEXT_FIELDS = {"text-generation": "prompt", "embedding": "text"}
"""The input that plain text fills, for service types whose inputs need no schema."""


class Finding(NamedTuple):
    """A problem at a canonical location. `reads`: top-level fields it depends on. `within`: path below the field."""

    location: tuple[str | int, ...]
    value: object
    message: str
    reads: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    nearest: str | None = None
    within: str = ""


def findings(spec: ModelSpec, backends: tuple[str, ...] | None) -> list[Finding]:
    """Everything that is wrong with fields that are each fine alone. `backends`: names that may be used; None: any."""
    found = [finding for check in _CHECKS for finding in check(spec)]
    if backends is None:
        return found
    backend: str | None = spec.backend.name
    if spec.backend.name not in backends:
        message = f"{spec.backend.name!r} is not an installed backend."
        backend = closest(spec.backend.name, backends)
        found.append(Finding(("backend", "name"), spec.backend.name, message, ("backend",), backends, backend))
    if backend is not None:  # what was meant, where the name is misspelt: so that one round tells everything
        found += [*_kind(spec, backend), *_precision(spec, backend), *_adapter(spec, backend)]
    return [*found, *_pins(spec)]


def _kind(spec: ModelSpec, backend: str) -> Iterator[Finding]:
    """Only where the backend must be installed, too: what is on the log already stays valid, and fails to load."""
    allowed, kind = KINDS_OF_BACKEND.get(backend), spec.backend.config.get("kind")
    if allowed is not None and kind is not None and kind not in allowed:
        message = f"{shown(kind)} is not a kind of model that the backend {backend} serves."
        at = ("backend", "config")
        yield Finding(at, kind, message, ("backend",), allowed, closest(str(kind), allowed), ".kind")


def _precision(spec: ModelSpec, backend: str) -> Iterator[Finding]:
    """What is preferred can be loaded, and is what backend.config names, if it names one."""
    loads = PRECISIONS_OF_KIND.get(backend, {}).get(str(spec.backend.config.get("kind")))
    preferred, reads = spec.preferred_precision, ("backend", "preferred_precision")
    if loads is None or not preferred:
        return
    if not any(one in loads for one in preferred):
        message = f"the backend {backend} loads a model of this kind in none of these."
        yield Finding(("preferred_precision",), list(preferred), message, reads, loads)
        return
    given = spec.backend.config.get("precision")
    if given is not None and given not in preferred:
        message = f"{shown(given)} is none of preferred_precision: leave it out, or prefer it."
        allowed = tuple(one for one in preferred if one in loads)
        guess = closest(str(given), allowed)
        yield Finding(("backend", "config"), given, message, reads, allowed, guess, ".precision")


def _adapter(spec: ModelSpec, backend: str) -> Iterator[Finding]:
    """Our decoder finds the base of an adapter where backends of served models do: in backend.config.base."""
    kind, base = spec.backend.config.get("kind"), spec.backend.config.get("base")
    at, reads = ("backend", "config"), ("lora", "backend")
    if backend != "torch" or kind is None or (spec.lora is None and base is None):
        return
    if kind != "text_generation":
        message = f"a model of kind {shown(kind)} takes no adapter. Leave out lora and backend.config.base."
        yield Finding(at, kind, message, reads, ("text_generation",), None, ".kind")
    elif not isinstance(base, str) or not base:
        message = (
            "it is the model that lora.base names: its folder, or `model:NAME` (`model:NAME@VERSION`) where it is "
            "declared, too. `source` is the folder of the adapter."
        )
        nearest = f"{MODEL_BASE}{spec.lora.base}" if spec.lora is not None else None
        yield Finding(at, base, message, reads, (), nearest, ".base")
    elif spec.lora is None:
        message = "a model with backend.config.base is an adapter: say `lora: {base: MODEL, rank: RANK}`, too."
        yield Finding(("lora",), None, message, reads)


def _pins(spec: ModelSpec) -> Iterator[Finding]:
    """Only where the backend must be installed, too: a pin on the log that fits no request harms nobody."""
    schema = spec.input_schema
    if spec.rollout is None or schema is None or schema_problems(schema, ""):
        return
    properties, reads = schema.get("properties", {}), ("rollout", "input_schema")
    for index, pin in enumerate(spec.rollout.pins):
        at = ("rollout", "pins", index)
        if pin.by == "tenant" and pin.name:
            message = "a tenant is told by `equals` alone: leave the name out, or say `by: header` or `by: field`."
            yield Finding((*at, "name"), pin.name, message, ("rollout",))
        elif pin.by == "field" and pin.name in properties:
            message, allowed = _never_equal(properties[pin.name], pin.equals)
            if message:
                nearest = closest(pin.equals, allowed)
                yield Finding((*at, "equals"), pin.equals, f"{pin.name} {message}", reads, allowed, nearest)
        elif pin.by == "field" and pin.name and not schema.get("additionalProperties", not properties):
            message = f"{pin.name!r} is no property of input_schema (top-level ones count only), so it fits no request."
            yield Finding((*at, "name"), pin.name, message, reads, tuple(properties), closest(pin.name, properties))


def _never_equal(schema: Mapping[str, object], text: str) -> tuple[str, tuple[str, ...]]:
    """Why no value of this property is written so, and how values are; empty: one may be."""
    values = schema.get("enum")
    if isinstance(values, list):
        allowed = tuple(one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in values)
        return ("" if text in allowed else "is never this."), allowed
    kind = schema.get("type")
    if kind == "boolean":
        return ("" if text in ("true", "false") else "is a boolean."), ("true", "false")
    if kind in ("number", "integer"):
        try:
            msgspec.json.decode(text, type=float)
        except msgspec.MsgspecError:
            return f"is a {kind}, which is never written so.", ()
    return "", ()


def text_field(spec: ModelSpec) -> str | None:
    """The input that plain text fills (`value_deserializer: string`, warm-up prompts), or None."""
    if spec.input_schema is not None and not schema_problems(spec.input_schema, ""):
        return compile_schema(spec.input_schema).text_field
    return TEXT_FIELDS.get(spec.service_type)


def _source(spec: ModelSpec) -> Iterator[Finding]:
    scheme, separator, rest = spec.source.uri.partition("://")
    if separator and scheme not in SOURCE_SCHEMES:
        message = f"{scheme!r} is not a kind of source; plain paths need no scheme."
        allowed = tuple(f"{known}://" for known in SOURCE_SCHEMES)
        guess = closest(f"{scheme}://", allowed)
        yield Finding(("source", "uri"), spec.source.uri, message, ("source",), allowed, guess)
    elif separator and not rest:
        yield Finding(("source", "uri"), spec.source.uri, f"names nothing after {scheme}://.", ("source",))


def _replicas(spec: ModelSpec) -> Iterator[Finding]:
    low, high = spec.replicas.min, spec.replicas.max
    if low > high:
        message = f"the least number of replicas ({low}) is above the most ({high}); raise one or lower the other."
        yield Finding(("replicas", "min"), low, message, ("replicas",), (f"<= {high}",))


def _tier(spec: ModelSpec) -> Iterator[Finding]:
    if spec.tier == "tier-0" and spec.priority_level != "P0":
        message = (
            f"409 Conflict: tier-0 takes only P0, and model {spec.name} is {spec.priority_level}; "
            "set priority_level P0 or another tier."
        )
        yield Finding(("tier",), spec.tier, message, ("tier", "priority_level"), ("tier-1", "tier-2"))


def _batches(spec: ModelSpec) -> Iterator[Finding]:
    sizes = spec.batch_sizes.preferred
    for index, size in enumerate(sizes):
        at = ("batch_sizes", "preferred", index)
        if size > spec.batch_sizes.max:
            message = f"a preferred batch of {size} is above the largest batch, {spec.batch_sizes.max}."
            yield Finding(at, size, message, ("batch_sizes",), (f"<= {spec.batch_sizes.max}",))
        if index and size <= sizes[index - 1]:
            yield Finding(at, size, "preferred sizes must rise, each once.", ("batch_sizes",))


def _baselines(spec: ModelSpec) -> Iterator[Finding]:
    sizes = [baseline.batch_size for baseline in spec.baselines]
    distinct = len(dict.fromkeys(sizes))
    for index, size in enumerate(sizes):
        if size in sizes[:index]:
            message = f"batch size {size} is measured twice."
            yield Finding(("baselines", index, "batch_size"), size, message, ("baselines",))
    if sizes and distinct < BASELINES_MIN:
        message = f"measured at {distinct} batch size(s); at least {BASELINES_MIN} different ones, or none at all."
        yield Finding(("baselines",), sizes, message, ("baselines",))


def _repeats(spec: ModelSpec) -> Iterator[Finding]:
    for name in ("tags", "preferred_precision"):
        values = getattr(spec, name)
        for index, value in enumerate(values):
            if value in values[:index]:
                yield Finding((name, index), value, f"{value!r} is listed twice.", (name,))


def _lengths(spec: ModelSpec) -> Iterator[Finding]:
    longest, context = spec.max_seq_len, spec.supported_context_length
    if longest is not None and context is not None and longest > context:
        message = f"longer than the supported context of {context} tokens."
        reads = ("max_seq_len", "supported_context_length")
        yield Finding(("max_seq_len",), longest, message, reads, (f"<= {context}",))


def _pooled(spec: ModelSpec) -> Iterator[Finding]:
    if spec.fusion == "pooled" and spec.output_schema is None and spec.service_type != "text-generation":
        message = "pooled needs something for Stage 2 to do: an output_schema to check, or text to detokenise."
        reads = ("fusion", "output_schema", "service_type")
        yield Finding(("fusion",), spec.fusion, message, reads, ("auto", "fused"))


def _topics(spec: ModelSpec) -> Iterator[Finding]:
    source, target = spec.kafka_input, spec.kafka_output
    if source and target and (source.topic, source.bootstrap_servers) == (target.topic, target.bootstrap_servers):
        message = "results would be read back as requests, without end; use another topic."
        yield Finding(("kafka_output", "topic"), target.topic, message, ("kafka_input", "kafka_output"))
    if source and source.value_deserializer == "string" and text_field(spec) is None:
        message = "'string' needs a model with one text input: input_schema with a single (required) string property."
        at = ("kafka_input", "value_deserializer")
        reads = ("kafka_input", "input_schema", "service_type")
        yield Finding(at, "string", message, reads, ("json", "avro", "request-json", "request-avro"))


def _schemas(spec: ModelSpec) -> Iterator[Finding]:
    for name in ("input_schema", "output_schema"):
        schema = getattr(spec, name)
        for problem in schema_problems(schema, "") if schema is not None else ():
            yield Finding(
                (name,), problem.value, problem.message, (name,), problem.allowed, problem.nearest, problem.path
            )


def _privacy(spec: ModelSpec) -> Iterator[Finding]:
    schema = spec.output_schema
    if schema is None or schema_problems(schema, "") or spec.fusion != "pooled":
        return
    if compile_schema(schema).protected:
        message = "pooled writes outputs in plain between the worker and Stage 2; protected fields need fused."
        yield Finding(("fusion",), spec.fusion, message, ("fusion", "output_schema"), ("auto", "fused"))


def _subject(spec: ModelSpec) -> Iterator[Finding]:
    subject = spec.privacy.subject if spec.privacy is not None else None
    schema = spec.input_schema
    if subject is None or (schema is not None and schema_problems(schema, "")):
        return
    properties = {} if schema is None else schema.get("properties", {})
    required = () if schema is None else compile_schema(schema).required
    allowed = tuple(name for name in required if _names_somebody(properties.get(name, {})))
    if subject in allowed:
        return
    message = f"{subject!r} {_no_subject(subject, properties, required)}"
    if not allowed:
        message += (
            " No required property of input_schema can name a person: add one that is a string or an integer, "
            "without enum and never null, or leave privacy.subject out."
        )
    guess = None if subject in properties else closest(subject, allowed)
    yield Finding(("privacy", "subject"), subject, message, ("privacy", "input_schema"), allowed, guess)


def _no_subject(subject: str, properties: Mapping[str, Mapping[str, object]], required: Sequence[str]) -> str:
    """Why requests cannot be told apart by this property."""
    if subject not in properties:
        return "is no property of input_schema (top-level ones count only), so requests would have no subject."
    if not _names_somebody(properties[subject]):
        return "cannot name a person: only a string or an integer, without enum and never null, can."
    assert subject not in required
    return "is not in input_schema.required, so some requests would have no subject: list it there."


def _names_somebody(schema: Mapping[str, object]) -> bool:
    return schema.get("type") in ("string", "integer") and not schema.get("nullable") and "enum" not in schema


def _warmups(spec: ModelSpec) -> Iterator[Finding]:
    if spec.input_schema is not None and schema_problems(spec.input_schema, ""):
        return
    validator = None if spec.input_schema is None else compile_schema(spec.input_schema)
    given = [(("pre_warmup", index), inputs) for index, inputs in enumerate(spec.pre_warmup)]
    given += [(("golden", index, "inputs"), golden.inputs) for index, golden in enumerate(spec.golden)]
    for at, inputs in given:
        message = _warmup_fault(spec, validator, inputs)
        if message:
            yield Finding(at, inputs, message, (at[0], "input_schema", "service_type"))


def _warmup_fault(spec: ModelSpec, validator: InputValidator | None, inputs: object) -> str:
    if isinstance(inputs, str):
        return "" if text_field(spec) else "this model has no single text input; give an inputs object."
    if validator is None:
        return ""
    try:
        validator.check(msgspec.json.encode(inputs))
    except InvalidInput as error:
        return f"does not fit input_schema: {error}"
    return ""


def _rollout(spec: ModelSpec) -> Iterator[Finding]:
    if spec.rollout is None:
        return
    steps = spec.rollout.steps
    for index, pin in enumerate(spec.rollout.pins):
        if pin.by != "tenant" and not pin.name:
            yield Finding(("rollout", "pins", index, "name"), "", f"which {pin.by}? Give its name.", ("rollout",))
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)) or steps[-1] != 100:
        message = "steps are percentages that rise and end at 100, such as [10, 20, 50, 100]."
        yield Finding(("rollout", "steps"), list(steps), message, ("rollout",))


def _lora(spec: ModelSpec) -> Iterator[Finding]:
    if spec.lora is not None and spec.lora.base == spec.name:
        yield Finding(("lora", "base"), spec.lora.base, "a model cannot be an adapter over itself.", ("lora", "name"))
    named = named_base(spec)
    if named is None:
        return
    (name, version), given = named, spec.backend.config.get("base")
    at, reads = ("backend", "config"), ("lora", "backend")
    meant = f"{MODEL_BASE}{spec.lora.base}" if spec.lora is not None else None
    if spec.lora is not None and name != spec.lora.base:
        message = f"lora.base names another model, {spec.lora.base!r}: both are the base of this adapter."
        yield Finding(at, given, message, reads, (), meant, ".base")
    elif "@" in str(given) and not re.match(VERSION_PATTERN, version):
        message = f"{version!r} is no version: `model:NAME` is the one that serves, `model:NAME@1.0.0` that one."
        yield Finding(at, given, message, reads, (), meant, ".base")


def _probes(spec: ModelSpec) -> Iterator[Finding]:
    for name in ("startup", "readiness", "liveness"):
        probe = getattr(spec.probes, name)
        if probe is not None and probe.timeout_ms > probe.period_ms:
            message = (
                f"a check may take {probe.timeout_ms} ms, longer than the {probe.period_ms} ms between two checks."
            )
            yield Finding(("probes", name, "timeout_ms"), probe.timeout_ms, message, ("probes",))


_CHECKS: Sequence[Callable[[ModelSpec], Iterable[Finding]]] = (
    _source, _replicas, _tier, _batches, _baselines, _repeats, _lengths, _pooled, _topics, _schemas, _privacy, _subject,
    _warmups, _rollout, _lora, _probes,
)  # fmt: skip


def topic_key(name: str) -> str:
    """Kafka's metrics cannot tell `.` from `_`, so two names with one key must not both become topics."""
    return name.replace(".", "_")


def colliding(name: str, others: Iterable[str]) -> str | None:
    """The first other name that Kafka would confuse with `name`."""
    key = topic_key(name)
    return next((other for other in others if other != name and topic_key(other) == key), None)


def set_problems(specs: Sequence[tuple[str, ModelSpec]]) -> list[Problem]:
    """Declarations, with where each stands, that cannot be applied together."""
    problems: list[Problem] = []
    names: dict[str, str] = {}
    places: dict[str, str] = {}
    for where, spec in specs:
        if spec.at_version in places:
            message = f"{spec.at_version} is declared twice, also in {places[spec.at_version]}."
            problems.append(Problem("model_id", spec.name, message, where=where))
        places.setdefault(spec.at_version, where)
        other = names.setdefault(topic_key(spec.name), spec.name)
        if other != spec.name:
            message = (
                f"{spec.name!r} and {other!r} differ only in '.' and '_', which Kafka's metrics cannot tell apart."
            )
            problems.append(Problem("model_id", spec.name, message, nearest=spec.name.replace(".", "-"), where=where))
    return problems
