"""Three written forms, one ModelSpec; and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sie_stream.spec import (
    FORMS,
    BackendSpec,
    Baseline,
    BatchSizes,
    Form,
    Gates,
    KafkaInput,
    KafkaOutput,
    Lora,
    ModelSpec,
    PagedAttention,
    Probe,
    Probes,
    Quota,
    Replicas,
    Requires,
    Rollout,
    Slas,
    Source,
    SpecError,
    Tokenizer,
    Toleration,
    from_json,
    parse_documents,
    parse_object,
    text_field,
    to_document,
    to_json,
)
from sie_stream.spec.checks import findings
from tests.examples import examples

EXAMPLES = Path(__file__).parents[3] / "examples" / "declarations"
MINIMAL: dict[str, Any] = {"model_id": "churn", "version": "1.0", "source": "m.skops", "min_gpu_memory_mb": 64}

KUBERNETES = """
apiVersion: sie.lmsys.org/v1
kind: ModelService
metadata:
  name: churn
  namespace: risk
  labels: {team: risk}
  annotations: {note: ignored}
spec:
  version: "1.4"
  source: s3://models/churn
  backend: {name: sklearn, config: {numThreads: 2}}
  serviceType: classification
  minGpuMemoryGb: 0.5
  priorityLevel: P0
  minReplicas: 1
  max_replicas: 3
  slas: {p99LatencyMs: 50, max_queue_time_ms: 20}
  batchSizes: {preferred: [8], max: 32}
  inputSchema: {properties: {maxAge: {type: integer}}, required: [maxAge]}
status: {ready: true}
"""
FLAT = """
model_id: churn
version: "1.4"
labels: {team: risk}
source: {uri: "s3://models/churn"}
backend: sklearn
backend_config: {numThreads: 2}
service_type: classification
min_gpu_memory_mb: 512
priority_level: P0
replicas: {min: 1, max: 3}
p99_latency_ms: 50
slas: {max_queue_time_ms: 20}
max_batch_size: 32
batch_sizes: {preferred: 8}
input_schema: {properties: {maxAge: {type: integer}}, required: [maxAge]}
"""
DESCRIPTOR = """
{"name": "churn", "version": "1.4", "labels": {"team": "risk"}, "source": {"s3": "models/churn"},
 "backend": {"name": "sklearn", "config": {"numThreads": 2}}, "service_type": "classification",
 "min_gpu_memory_gb": 0.5, "priority_level": "P0", "max_replicas": 3, "batch_sizes": {"preferred": [8], "max": 32},
 "slas": {"p99_latency_ms": 50, "max_queue_time_ms": 20},
 "input_schema": {"properties": {"maxAge": {"type": "integer"}}, "required": ["maxAge"]}}
"""


def one(text: str, filename: str = "x.yaml") -> ModelSpec:
    (spec,) = parse_documents(text, filename)
    return spec


def test_the_three_forms_say_the_same() -> None:
    spec = one(KUBERNETES)
    assert one(FLAT) == spec
    assert one(DESCRIPTOR, "x.json") == spec
    assert spec.name == spec.model_id == "churn"
    assert spec.at_version == "churn@1.4"
    assert spec.min_gpu_memory_mb == 512
    assert spec.source.kind == "s3"
    assert spec.replicas == Replicas(min=1, max=3)
    assert spec.slas == Slas(p99_latency_ms=50, max_queue_time_ms=20)
    assert spec.batch_sizes == BatchSizes(preferred=(8,), max=32)
    assert spec.backend.config == {"numThreads": 2}, "the user's own keys keep their spelling"
    assert spec.input_schema == {"properties": {"maxAge": {"type": "integer"}}, "required": ["maxAge"]}


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"preferred_precision": "fp16"}, "preferred_precision", ("fp16",)),
        ({"tier": 1}, "tier", "tier-1"),
        ({"paged_attention": True}, "paged_attention", PagedAttention()),
        ({"batch_sizes": [1, 8]}, "batch_sizes", BatchSizes(preferred=(1, 8), max=8)),
        ({"batch_sizes": 16}, "batch_sizes", BatchSizes(max=16)),
        ({"quota": 10}, "quota", Quota(requests_per_second=10)),
        ({"kafka_input": "orders"}, "kafka_input", KafkaInput(topic="orders")),
        ({"tokenizer": "t.json"}, "tokenizer", Tokenizer(path="t.json")),
        ({"source": {"hf": "org/repo"}}, "source", Source(uri="hf://org/repo")),
        ({"source": {"path": "."}}, "source", Source(uri=".")),
        ({"source": {"package": "p/f"}}, "source", Source(uri="package://p/f")),
        ({"source": {"oci": "oci://r/i:1"}}, "source", Source(uri="oci://r/i:1")),
        ({"maxSeqLen": 8}, "max_seq_len", 8),
    ],
)
def test_short_spellings(extra: dict, field: str, value: object) -> None:
    assert getattr(parse_object(MINIMAL | extra), field) == value


def test_memory_in_gib_is_rounded_up_to_mib() -> None:
    body = {key: value for key, value in MINIMAL.items() if key != "min_gpu_memory_mb"}
    assert parse_object(body | {"min_gpu_memory_gb": 0.0001}).min_gpu_memory_mb == 1
    assert parse_object(body | {"minGpuMemoryGb": 16}).min_gpu_memory_mb == 16 * 1024


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"min_gpu_memory_gb": 1}, "min_gpu_memory_gb"),
        ({"name": "other"}, "name"),
        ({"minGpuMemoryMb": 64}, "minGpuMemoryMb"),
        ({"min_replicas": 1, "replicas": {"min": 2}}, "replicas.min"),
        ({"min_replicas": 1, "replicas": 3}, "replicas"),
        ({"backend_config": {}, "backend": {"config": {}}}, "backend.config"),
        ({"max_batch_size": 8, "batch_sizes": 16}, "batch_sizes"),
        ({"batch_sizes": 16, "max_batch_size": 8}, "max_batch_size"),
        ({"replicas": 3, "min_replicas": 1}, "replicas"),
        ({"backend": {"config": {}}, "backend_config": {}}, "backend_config"),
    ],
)
def test_a_field_given_twice_is_refused(extra: dict, path: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_object(MINIMAL | extra)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_name_kubernetes_refuses_is_kept_in_model_id() -> None:
    spec = parse_object(MINIMAL | {"model_id": "churn_eu"})
    written = yaml.safe_load(to_document(spec, "modelservice"))
    assert written["metadata"]["name"] == "churn-eu"
    assert written["spec"]["modelId"] == "churn_eu"
    assert parse_object(written) == spec


def test_specs_are_frozen_and_strict() -> None:
    spec = parse_object(MINIMAL)
    with pytest.raises(ValidationError):
        spec.name = "other"
    with pytest.raises(SpecError):
        parse_object(MINIMAL | {"max_seq_len": "8"})
    with pytest.raises(SpecError):
        parse_object(MINIMAL | {"tensor_parallel_size": True})


def test_the_field_that_plain_text_fills() -> None:
    assert text_field(parse_object(MINIMAL)) is None
    assert text_field(parse_object(MINIMAL | {"service_type": "text-generation"})) == "prompt"
    assert text_field(parse_object(MINIMAL | {"service_type": "embedding"})) == "text"
    schema = {"properties": {"body": {"type": "string"}}, "required": ["body"]}
    assert text_field(parse_object(MINIMAL | {"input_schema": schema})) == "body"


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_are_valid_and_round_trip(path: Path) -> None:
    for spec in parse_documents(path.read_text(), path.name):
        for form in FORMS:
            assert one(to_document(spec, form)) == spec
        assert from_json(to_json(spec)) == spec


def test_the_json_of_equal_specs_is_equal() -> None:
    assert to_json(one(FLAT)) == to_json(one(KUBERNETES)) == to_json(one(DESCRIPTOR))
    assert json.loads(to_json(parse_object(MINIMAL)))["name"] == "churn"


NAME = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,12}", fullmatch=True)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=5,
)
MS = st.integers(1, 86_400_000)
DIGEST = st.none() | st.just("sha256:" + "ab" * 32)
PROBE = st.none() | st.builds(Probe, period_ms=st.just(9_000), timeout_ms=st.integers(1, 9_000))
SERVERS = st.sampled_from([None, "kafka:9092", "a:1,b:2"])
SCHEMA = st.sampled_from(
    [None, {}, {"properties": {"text": {"type": "string", "title": "no"}}, "required": ["text"]}, {"type": "object"}]
)
SPECS = st.builds(
    ModelSpec,
    name=NAME,
    version=st.sampled_from(["1", "1.0", "1.10", "v2.3.4-rc.1+b7"]),
    source=st.builds(Source, uri=st.sampled_from(["m", "hf://a/b@c", "no: 1", "s3://x"]), digest=DIGEST),
    min_gpu_memory_mb=st.integers(1, 10**6),
    description=WORDS,
    labels=st.dictionaries(WORDS, WORDS, max_size=2),
    backend=st.builds(
        BackendSpec, name=st.sampled_from(["torch", "sklearn", "vllm"]), config=st.dictionaries(WORDS, JSON, max_size=2)
    ),
    service_type=st.sampled_from(["text-generation", "embedding", "scoring"]),
    requires=st.builds(Requires, cuda=st.sampled_from([None, ">=12.1, <13"])),
    preferred_precision=st.sampled_from([(), ("fp16",), ("bf16", "int8")]),
    supported_context_length=st.none() | st.integers(100, 200),
    max_seq_len=st.none() | st.integers(1, 100),
    shared_kv_cache=st.booleans(),
    max_concurrent_requests=st.none() | st.integers(1, 9),
    batch_sizes=st.builds(BatchSizes, preferred=st.sampled_from([(), (4,), (1, 8)]), max=st.integers(8, 64)),
    paged_attention=st.none()
    | st.builds(PagedAttention, enabled=st.booleans(), block_tokens=st.sampled_from([8, 16, 32, 64, 128])),
    lora=st.none() | st.builds(Lora, base=NAME, rank=st.integers(1, 64), sharing=st.booleans()),
    tensor_parallel_size=st.integers(1, 8),
    tokenizer=st.none() | st.builds(Tokenizer, path=st.just("t.json"), digest=DIGEST),
    input_schema=SCHEMA,
    output_schema=SCHEMA,
    priority_level=st.sampled_from(["P0", "P1", "P2"]),
    deadline_ms=st.none() | MS,
    slas=st.builds(Slas, p99_latency_ms=st.none() | MS, max_queue_time_ms=st.none() | MS),
    replicas=st.builds(Replicas, min=st.integers(0, 3), max=st.integers(3, 5)),
    tags=st.lists(st.sampled_from(["high-sla", "batch-job", "a/b-test"]), unique=True, max_size=2).map(tuple),
    node_selector=st.dictionaries(WORDS, WORDS, max_size=2),
    tolerations=st.lists(st.builds(Toleration, key=WORDS, value=WORDS), max_size=2).map(tuple),
    tier=st.sampled_from([None, "tier-1"]),
    quota=st.none() | st.builds(Quota, requests_per_second=st.floats(0.5, 1e6), burst=st.none() | st.integers(1, 9)),
    pre_warmup=st.lists(st.just({"text": "a"}) | st.dictionaries(WORDS, JSON, max_size=1), max_size=2).map(tuple),
    baselines=st.sampled_from(
        [(), tuple(Baseline(batch_size=size, latency_ms=0.5, memory_mb=2) for size in (1, 2, 3))]
    ),
    kafka_input=st.none()
    | st.builds(
        KafkaInput,
        topic=st.just("in"),
        bootstrap_servers=SERVERS,
        value_deserializer=st.sampled_from(["json", "avro", "request-json"]),
    ),
    kafka_output=st.none() | st.builds(KafkaOutput, topic=st.just("out"), bootstrap_servers=SERVERS),
    fusion=st.sampled_from(["auto", "fused", "pooled"]),
    ordering=st.sampled_from(["none", "key"]),
    rollout=st.builds(
        Rollout, steps=st.sampled_from([(100,), (10, 100)]), gates=st.builds(Gates, ks_max=st.floats(0, 1))
    ),
    probes=st.builds(Probes, startup=PROBE, liveness=PROBE),
)


@settings(examples(60), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(SPECS, st.sampled_from(FORMS))
def test_every_spec_survives_every_form(spec: ModelSpec, form: Form) -> None:
    assume(not findings(spec, ("torch", "sklearn", "vllm")))
    assert one(to_document(spec, form)) == spec
    assert from_json(to_json(spec)) == spec
