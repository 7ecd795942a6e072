"""From a declaration to what workers load (ModelLaunch) and what ingress routes by (RouteRow)."""

from __future__ import annotations

import posixpath
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from scheduler.adapter_bases import Known, resolved
from scheduler.autoscale import ScalePolicy, policy_of
from scheduler.capability import device_bytes
from scheduler.rules import PlacementRules, rules_of
from sie_stream.control import GoldenRequest, ModelLaunch, RouteRow, VariantRow
from sie_stream.ids import LANES, TopicNames, instance_id
from sie_stream.problems import Problem, SpecError, shown
from sie_stream.rollout_records import STABLE
from sie_stream.routing import SHARES
from sie_stream.spec import ModelSpec, from_json, not_enforced, text_field, to_json

MIB = 1024 * 1024
PRIORITIES = {"P0": 0, "P1": 1, "P2": 2}
WEIGHT_SUFFIXES = (".skops", ".onnx", ".safetensors", ".gguf", ".bin", ".pt")
"""A source that ends like this is a file; other files of the model lie beside it."""

ConfigValue = str | int | float | bool | list[str] | None


class Accepted(Struct, frozen=True):
    """A valid declaration, taken apart."""

    model: str
    spec: Raw
    """Canonical JSON: equal declarations have equal bytes."""
    launch: ModelLaunch
    route: RouteRow
    """Epoch 0; the width is that of the declaration."""
    replicas_wanted: int
    width: int
    not_enforced: tuple[str, ...]
    rules: PlacementRules
    scaling: ScalePolicy | None
    """None when the declaration fixes the number of replicas."""


def accept(spec_json: bytes, names: TopicNames, known: Known | None = None) -> Accepted:
    """known: the models that an adapter may name as its base; None: what names one stays as it is.

    Raises ConfigError (mostly SpecError) that names the field, the value and what is allowed.
    """
    spec = from_json(spec_json)
    if known is not None:
        spec = resolved(spec, known)
    launch = launch_of(spec)
    return Accepted(
        model=spec.name,
        spec=Raw(to_json(spec)),
        launch=launch,
        route=route_of(spec, launch, names),
        replicas_wanted=max(1, spec.replicas.min),
        width=spec.replicas.max,
        not_enforced=tuple(not_enforced(spec)),
        rules=rules_of(spec),
        scaling=_scaling(spec),
    )


def _scaling(spec: ModelSpec) -> ScalePolicy | None:
    policy = policy_of(spec)
    return policy if policy.floor < policy.replicas_max else None


def claimed_name(spec_json: bytes) -> str:
    """The name that a declaration gives itself, valid or not; empty when it has none."""
    try:
        body = msgspec.json.decode(spec_json)
    except (msgspec.DecodeError, RecursionError):
        return ""
    if not isinstance(body, dict):
        return ""
    metadata = body.get("metadata")
    for found in (body.get("name"), body.get("model_id"), metadata.get("name") if isinstance(metadata, dict) else None):
        if isinstance(found, str):
            return found[:100]
    return ""


def launch_of(spec: ModelSpec) -> ModelLaunch:
    """What a worker needs to load this version.

    Raises SpecError for a backend option that no launch can carry, and ConfigError as `device_bytes` does.
    """
    return ModelLaunch(
        model=spec.name,
        version=spec.version,
        instance=instance_id(spec.name),
        backend=spec.backend.name,
        source=spec.source.uri.removeprefix("file://"),
        weights_digest=spec.source.digest or "",
        config=_backend_config(spec),
        service_type=spec.service_type,
        priority=PRIORITIES[spec.priority_level],
        memory_bytes=device_bytes(spec),
        batch_max=spec.batch_sizes.max,
        ordering=spec.ordering,
        fusion=_fusion(spec),
        input_schema=_schema(spec.input_schema),
        output_schema=_schema(spec.output_schema),
        tokenizer=_tokenizer_path(spec),
        pre_warmup=tuple(_warmup_inputs(spec, item) for item in spec.pre_warmup),
        golden=tuple(
            GoldenRequest(_warmup_inputs(spec, one.inputs), msgspec.json.encode(one.outputs).decode(), one.tolerance)
            for one in spec.golden
        ),
        output_serializer=spec.kafka_output.value_serializer if spec.kafka_output else "avro",
        tensor_parallel=spec.tensor_parallel_size,
        privacy_subject=(spec.privacy.subject or "") if spec.privacy else "",
    )


def route_of(spec: ModelSpec, launch: ModelLaunch, names: TopicNames) -> RouteRow:
    """The route of this version, all traffic to it."""
    route = RouteRow(
        instance=launch.instance,
        model=spec.name,
        route_epoch=0,
        topic=names.work(spec.name),
        lanes=LANES,
        width=spec.replicas.max,
        variants=(VariantRow(STABLE, spec.version, SHARES),),
        service_type=spec.service_type,
        priority=launch.priority,
        input_schema=launch.input_schema,
        tokenizer=launch.tokenizer,
        tokenizer_digest=(spec.tokenizer.digest or "") if spec.tokenizer else "",
        context_tokens_max=spec.max_seq_len or spec.supported_context_length or 0,
        deadline_ms=spec.deadline_ms or 0,
        output_schema=launch.output_schema,
        fusion=launch.fusion,
    )
    return msgspec.structs.replace(route, **_quota(spec), **_bindings(spec, names))


def _quota(spec: ModelSpec) -> dict[str, float]:
    if spec.quota is None:
        return {}
    rate = spec.quota.requests_per_second
    return {"quota_per_s": rate, "quota_burst": float(spec.quota.burst or max(1.0, rate))}


def _bindings(spec: ModelSpec, names: TopicNames) -> dict[str, str]:
    bound: dict[str, str] = {}
    if spec.kafka_input is not None:
        bound |= {
            "input_topic": spec.kafka_input.topic,
            "input_bootstrap": spec.kafka_input.bootstrap_servers or "",
            "input_group": spec.kafka_input.group_id or f"{names.prefix}input.{spec.name}",
            "input_offset_reset": spec.kafka_input.auto_offset_reset,
            "input_deserializer": spec.kafka_input.value_deserializer,
        }
    if spec.kafka_output is not None:
        bound |= {
            "output_topic": spec.kafka_output.topic,
            "output_bootstrap": spec.kafka_output.bootstrap_servers or "",
            "output_serializer": spec.kafka_output.value_serializer,
        }
    return bound


def _fusion(spec: ModelSpec) -> Literal["fused", "pooled"]:
    """auto is fused: two hops. A later placement decision may pool models whose Stage 2 is heavy."""
    return "fused" if spec.fusion == "auto" else spec.fusion


def _schema(schema: dict[str, object] | None) -> Raw:
    return Raw(b"{}" if schema is None else msgspec.json.encode(schema))


def _backend_config(spec: ModelSpec) -> dict[str, ConfigValue]:
    problems = []
    config: dict[str, ConfigValue] = {}
    for name, value in spec.backend.config.items():
        try:
            config[name] = msgspec.convert(value, ConfigValue)
        except msgspec.ValidationError:
            message = "a backend option is a text, a number, a boolean, a list of texts, or null."
            problems.append(Problem(f"backend.config.{name}", shown(value), message))
    if problems:
        raise SpecError(problems)
    if spec.lora is not None and spec.backend.name == "torch":
        config |= {"lora_rank": spec.lora.rank, "lora_sharing": spec.lora.sharing}
    return config


def _tokenizer_path(spec: ModelSpec) -> str:
    """Beside the weights, unless the path is absolute."""
    if spec.tokenizer is None:
        return ""
    source = spec.source.uri.removeprefix("file://")
    folder = posixpath.dirname(source) if source.endswith(WEIGHT_SUFFIXES) else source
    return posixpath.join(folder, spec.tokenizer.path)


def _warmup_inputs(spec: ModelSpec, item: object) -> str:
    """An inputs object as JSON text; plain text fills the model's text field."""
    if isinstance(item, str):
        item = {text_field(spec) or "text": item}
    return msgspec.json.encode(item).decode()
