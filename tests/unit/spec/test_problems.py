"""What is wrong is said all at once, with path, value, allowed values and nearest spelling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sie_stream.backend_facts import KINDS_OF_BACKEND
from sie_stream.errors import ConfigError, SieError
from sie_stream.spec import Problem, SpecError, colliding, from_json, parse_documents, parse_object

MINIMAL: dict[str, Any] = {"model_id": "churn", "version": "1.0", "source": "m.skops", "min_gpu_memory_mb": 64}


def problems(body: dict) -> dict[str, Problem]:
    with pytest.raises(SpecError) as caught:
        parse_object(body)
    found = {problem.path: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "one problem at each place"
    return found


def only(extra: dict) -> Problem:
    (problem,) = problems(MINIMAL | extra).values()
    return problem


BROKEN = """
apiVersion: sie.lmsys.org/v1
kind: ModelService
metadata: {name: Churn EU, lables: {}}
spec:
  version: 1.0
  sorce: x
  backend: {name: sklern, confg: {}}
  serviceType: text-genration
  minGpuMemoryGb: lots
  priorityLevel: p0
  slas: {p99LatencyMs: -5, maxQueTimeMs: 3}
  minReplicas: 4
  maxReplicas: 2
  batchSizes: {preferred: [4, 200], max: 64}
  tags: [high_sla]
  baselines: [{batchSize: 1, latencyMs: 0, memoryMb: 1}]
  inputSchema: {properties: {a: {type: nmber}}}
  fusion: poled
  kafkaInput: {topic: "a b"}
  rollout: {steps: [50, 20]}
"""


def test_all_problems_of_a_document_come_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_documents(BROKEN, "broken.yaml")
    found = {problem.path: problem.nearest for problem in caught.value.problems}
    assert found == {
        "metadata.lables": "labels",
        "metadata.name": "churn-eu",
        "spec.version": None,
        "spec.sorce": "source",
        "spec.backend.name": "sklearn",
        "spec.backend.confg": "config",
        "spec.serviceType": "text-generation",
        "spec.minGpuMemoryGb": None,
        "spec.priorityLevel": "P0",
        "spec.slas.p99LatencyMs": None,
        "spec.slas.maxQueTimeMs": "maxQueueTimeMs",
        "spec.minReplicas": None,
        "spec.batchSizes.preferred[1]": None,
        "spec.tags[0]": "high-sla",
        "spec.baselines[0].latencyMs": None,
        "spec.inputSchema.properties.a.type": "number",
        "spec.fusion": "pooled",
        "spec.kafkaInput.topic": None,
        "spec.rollout.steps": None,
    }
    assert all(problem.where == "broken.yaml" for problem in caught.value.problems)
    assert isinstance(caught.value, ConfigError | SieError)
    assert "19 problems" in str(caught.value)


def test_problems_of_all_documents_come_together() -> None:
    with pytest.raises(SpecError) as caught:
        parse_documents("model_id: a\n---\nmodel_id: B\n", "two.yaml")
    wheres = {problem.where for problem in caught.value.problems}
    assert wheres == {"two.yaml, document 1", "two.yaml, document 2"}


def test_a_wrong_choice_lists_what_is_allowed() -> None:
    problem = only({"service_type": "chat"})
    assert problem.allowed[0] == "text-generation"
    assert "audio" in str(problem)
    assert "'chat'" in str(problem)
    assert only({"priority_level": "p1"}).nearest == "P1"
    assert only({"slas": {"p99_latency_ms": 0}}).allowed == (">= 1",)


def test_a_missing_field_says_what_it_is_for() -> None:
    found = problems({"model_id": "a"})
    assert set(found) == {"version", "source", "min_gpu_memory_mb"}
    assert "Example: '1.0.0'" in str(found["version"])
    assert set(problems({"version": "1", "source": "x", "min_gpu_memory_mb": 1})) == {"model_id"}


@pytest.mark.parametrize("version", ["1", "1.0", "1.2.3", "v1.2.3-rc.1+build.5", "2024.05.01"])
def test_versions_that_pass(version: str) -> None:
    assert parse_object(MINIMAL | {"version": version}).version == version


@pytest.mark.parametrize("version", ["", "latest", "1.2.3.4", "1..2", "1.0\n", 1.0, 2, None])
def test_versions_that_do_not(version: object) -> None:
    assert only({"version": version}).path == "version"


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-d", "a" * 100])
def test_names_that_pass(name: str) -> None:
    assert parse_object(MINIMAL | {"model_id": name}).name == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "a@1", "é", "a" * 101, "a\n"])
def test_names_that_do_not(name: str) -> None:
    assert only({"model_id": name}).path == "model_id"


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"tier": "tier-0"}, "tier"),
        ({"replicas": {"min": 2}}, "replicas.min"),
        ({"min_replicas": 2}, "min_replicas"),
        ({"max_replicas": 65}, "max_replicas"),
        ({"batch_sizes": {"preferred": [8, 4]}}, "batch_sizes.preferred[1]"),
        ({"tags": ["high-sla", "high-sla"]}, "tags[1]"),
        ({"preferred_precision": ["fp16", "fp16"]}, "preferred_precision[1]"),
        ({"supported_context_length": 10, "max_seq_len": 11}, "max_seq_len"),
        ({"fusion": "pooled"}, "fusion"),
        ({"kafka_input": "t", "kafka_output": "t"}, "kafka_output"),
        ({"kafka_input": {"topic": "t", "value_deserializer": "string"}}, "kafka_input.value_deserializer"),
        ({"kafka_input": {"topic": "t", "bootstrap_servers": "kafka"}}, "kafka_input.bootstrap_servers"),
        ({"output_schema": {"properties": {"a": {"typ": "number"}}}}, "output_schema.properties.a.typ"),
        ({"pre_warmup": ["hello"]}, "pre_warmup[0]"),
        ({"pre_warmup": [{"a": 1}], "input_schema": {"properties": {"b": {}}}}, "pre_warmup[0]"),
        ({"rollout": {"steps": [10, 50]}}, "rollout.steps"),
        ({"lora": {"base": "churn", "rank": 8}}, "lora.base"),
        ({"lora": {"rank": 8}}, "lora.base"),
        ({"probes": {"liveness": {"period_ms": 10, "timeout_ms": 20}}}, "probes.liveness.timeout_ms"),
        ({"source": "hff://a/b"}, "source"),
        ({"source": "s3://"}, "source"),
        ({"source": {"uri": "x", "digest": "abc"}}, "source.digest"),
        ({"source": {"s3": "a", "hf": "b"}}, "source.s3"),
        ({"requires": {"cuda": "12"}}, "requires.cuda"),
        ({"quota": {"requests_per_second": 0}}, "quota.requests_per_second"),
        ({"node_selector": {"a": True}}, "node_selector.a"),
        ({"deadline_ms": 0.5}, "deadline_ms"),
    ],
)
def test_fields_that_do_not_go_together_or_stand_alone(extra: dict, path: str) -> None:
    assert path in problems(MINIMAL | extra)


INPUTS = {
    "input_schema": {
        "properties": {
            "age": {"type": "integer"},
            "plan": {"type": "string", "enum": ["gold", "basic"]},
            "eu": {"type": "boolean"},
        }
    }
}


@pytest.mark.parametrize(
    ("pin", "path", "nearest"),
    [
        ({"by": "field", "name": "aeg", "equals": "1"}, "name", "age"),
        ({"by": "field", "name": "age", "equals": "abc"}, "equals", None),
        ({"by": "field", "name": "plan", "equals": "Gold"}, "equals", "gold"),
        ({"by": "field", "name": "eu", "equals": "1"}, "equals", None),
        ({"by": "tenant", "name": "x", "equals": "beta"}, "name", None),
        ({"by": "header", "equals": "1"}, "name", None),
    ],
)
def test_a_pin_that_fits_no_request_is_refused(pin: dict, path: str, nearest: str | None) -> None:
    found = problems(MINIMAL | INPUTS | {"rollout": {"pins": [pin]}})
    assert list(found) == [f"rollout.pins[0].{path}"]
    assert found[f"rollout.pins[0].{path}"].nearest == nearest


def test_pins_that_may_fit_are_taken_and_what_is_on_the_log_stays_valid() -> None:
    fits = [("age", "30"), ("plan", "gold"), ("eu", "true")]
    pins = [{"by": "field", "name": name, "equals": text} for name, text in fits]
    parse_object(MINIMAL | INPUTS | {"rollout": {"pins": [*pins, {"by": "tenant", "equals": "beta"}]}})
    free = {"properties": {"age": {}}, "additionalProperties": True}
    anything = {"rollout": {"pins": [{"by": "field", "name": "other", "equals": "1"}]}}
    parse_object(MINIMAL | {"input_schema": free} | anything)
    parse_object(MINIMAL | anything)
    parse_object(MINIMAL | INPUTS | anything, backends=None)


def test_baselines_are_three_or_none() -> None:
    def measured(*sizes: int) -> dict:
        return {"baselines": [{"batch_size": size, "latency_ms": 1, "memory_mb": 1} for size in sizes]}

    assert only(measured(1, 8)).path == "baselines"
    assert set(problems(MINIMAL | measured(1, 8, 8))) == {"baselines", "baselines[2].batch_size"}
    assert len(parse_object(MINIMAL | measured(1, 8, 32)).baselines) == 3


def test_a_check_is_not_made_on_a_field_that_is_wrong_itself() -> None:
    assert set(problems(MINIMAL | {"tier": "tier-0", "priority_level": "p0"})) == {"priority_level"}


def test_plug_in_backends_are_named_by_the_caller() -> None:
    body = MINIMAL | {"backend": "mine"}
    assert problems(body)["backend"].allowed[0] == "torch"
    assert parse_object(body, backends=("mine",)).backend.name == "mine"
    assert parse_object(body, backends=None).backend.name == "mine"


def test_declarations_of_one_file_must_go_together() -> None:
    def document(name: str, version: str = "1") -> str:
        return f'---\nmodel_id: {name}\nversion: "{version}"\nsource: x\nmin_gpu_memory_mb: 1\n'

    assert len(parse_documents(document("a", "1") + document("a", "2"), "f")) == 2
    with pytest.raises(SpecError, match=r"a@1 is declared twice, also in f, document 1"):
        parse_documents(document("a") + document("a"), "f")
    with pytest.raises(SpecError, match="Kafka"):
        parse_documents(document("a.b") + document("a_b"), "f")
    assert colliding("a.b", ["a-b", "a.b", "a_b"]) == "a_b"
    assert colliding("a.b", ["a-b", "a.b"]) is None


@pytest.mark.parametrize("raw", [b"", b"[", b"3", b"[]", b"{}", b"[" * 100_000, b"\xff"])
def test_json_that_is_no_declaration(raw: bytes) -> None:
    with pytest.raises(SpecError):
        from_json(raw)


@pytest.mark.parametrize(
    ("backend", "kind", "nearest"),
    [("torch", "text-generation", "text_generation"), ("onnx", "filetype", "file_type"), ("sklearn", 3, None)],
)
def test_a_kind_of_model_that_the_backend_does_not_serve_is_told_before_anything_is_loaded(
    backend: str, kind: object, nearest: str | None
) -> None:
    problem = only({"backend": {"name": backend, "config": {"kind": kind}}})
    assert problem.path == "backend.config.kind"
    assert problem.allowed == KINDS_OF_BACKEND[backend]
    assert problem.nearest == nearest
    spec = from_json(msgspec.json.encode(MINIMAL | {"backend": {"name": backend, "config": {"kind": kind}}}))
    assert spec.backend.config == {"kind": kind}, "what is on the log already stays valid"


@pytest.mark.parametrize(
    ("preferred", "config", "path", "allowed"),
    [
        (["int8"], {"kind": "embedding"}, "preferred_precision", ("fp32", "bf16", "fp16")),
        (["fp8"], {"kind": "text_generation"}, "preferred_precision", ("fp32", "bf16", "fp16", "int8", "int4")),
        (["fp8", "int8"], {"kind": "text_generation", "precision": "int4"}, "backend.config.precision", ("int8",)),
    ],
)
def test_a_precision_that_no_engine_would_load_is_told_at_once(
    preferred: list[str], config: dict, path: str, allowed: tuple[str, ...]
) -> None:
    problem = only({"preferred_precision": preferred, "backend": {"name": "torch", "config": config}})
    assert (problem.path, problem.allowed) == (path, allowed)
    given = {"kind": "text_generation", "precision": "int8"}
    assert parse_object(MINIMAL | {"preferred_precision": ["int8"], "backend": {"name": "torch", "config": given}})


def test_other_backends_decide_themselves_what_a_kind_is() -> None:
    assert parse_object(MINIMAL | {"backend": {"name": "triton", "config": {"kind": "anything"}}})


def test_what_is_wrong_inside_a_misspelt_field_is_told_with_the_misspelling() -> None:
    broken = {"input_shema": {"properties": {"a": {"type": "nmber"}}}, "priorty_level": "P7"}
    with pytest.raises(SpecError) as caught:
        parse_object(MINIMAL | broken)
    told = [(problem.path, problem.nearest or problem.allowed) for problem in caught.value.problems]
    assert sorted(told, key=str) == [
        ("input_shema", "input_schema"),
        ("input_shema.properties.a.type", "number"),
        ("priorty_level", "priority_level"),
        ("priorty_level", ("P0", "P1", "P2")),
    ]


def test_a_misspelt_field_beside_the_right_one_is_only_misspelt() -> None:
    assert only({"priorty_level": "P7", "priority_level": "P0"}).path == "priorty_level"
    found = problems(MINIMAL | {"privacy": {"subjct": "a", "subject": "b"}})
    assert set(found) == {"privacy.subjct", "privacy.subject"}
    assert "'b'" in found["privacy.subject"].message


def test_a_misspelt_backend_and_a_kind_that_the_one_meant_does_not_serve_are_told_together() -> None:
    found = problems(MINIMAL | {"backend": {"name": "sklern", "config": {"kind": "clasifier"}}})
    assert found["backend.name"].nearest == "sklearn"
    assert found["backend.config.kind"].nearest == "classifier"


PEOPLE = {
    "properties": {
        "customer": {"type": "string"},
        "account": {"type": "integer"},
        "amount": {"type": "number"},
        "maybe": {"type": "string", "nullable": True},
        "country": {"type": "string", "enum": ["de", "fr"]},
        "email": {"type": "string"},
    },
    "required": ["customer", "account", "amount", "maybe", "country"],
}


@pytest.mark.parametrize(
    ("subject", "words", "nearest"),
    [
        ("custmer", "'custmer' is no property of input_schema", "customer"),
        ("email", "'email' is not in input_schema.required", None),
        ("amount", "'amount' cannot name a person: only a string or an integer", None),
        ("maybe", "'maybe' cannot name a person", None),
        ("country", "'country' cannot name a person", None),
    ],
)
def test_a_subject_that_names_nobody_is_told_with_those_that_would(
    subject: str, words: str, nearest: str | None
) -> None:
    problem = only({"input_schema": PEOPLE, "privacy": {"subject": subject}})
    assert (problem.path, problem.value) == ("privacy.subject", repr(subject))
    assert problem.message.startswith(words)
    assert problem.allowed == ("customer", "account"), "whichever is chosen is accepted"
    assert problem.nearest == nearest
    for allowed in problem.allowed:
        parse_object(MINIMAL | {"input_schema": PEOPLE, "privacy": {"subject": allowed}})


def test_where_no_input_can_name_a_person_it_is_said_what_to_add() -> None:
    numbers = {"properties": {"amount": {"type": "number"}}, "required": ["amount"]}
    for given in ({}, {"input_schema": numbers}):
        problem = only({**given, "privacy": {"subject": "amount"}})
        assert "No required property of input_schema can name a person: add one" in problem.message


def test_a_wrong_output_schema_does_not_hide_a_wrong_subject() -> None:
    outputs = {"properties": {"score": {"type": "nmber"}}}
    found = problems(MINIMAL | {"input_schema": PEOPLE, "output_schema": outputs, "privacy": {"subject": "amount"}})
    assert set(found) == {"output_schema.properties.score.type", "privacy.subject"}


def test_a_value_where_an_object_should_be_is_told_with_its_fields() -> None:
    problem = only({"privacy": "customer"})
    assert (problem.path, problem.allowed) == ("privacy", ("subject",))
    assert "p99_latency_ms" in only({"slas": 5}).allowed


LORA = {"base": "chat", "rank": 8}


@pytest.mark.parametrize(
    ("config", "lora", "path", "value"),
    [
        ({"kind": "text_generation"}, LORA, "backend.config.base", "None"),
        ({"kind": "text_generation", "base": ""}, LORA, "backend.config.base", "''"),
        ({"kind": "text_generation", "base": 3}, LORA, "backend.config.base", "3"),
        ({"kind": "embedding", "base": "models/chat"}, LORA, "backend.config.kind", "embedding"),
        ({"kind": "text_generation", "base": "models/chat"}, None, "lora", "None"),
    ],
)
def test_an_adapter_for_our_decoder_says_where_its_base_is(
    config: dict[str, object], lora: dict[str, object] | None, path: str, value: str
) -> None:
    given = {"backend": {"name": "torch", "config": config}, "service_type": "text-generation"}
    problem = only(given if lora is None else given | {"lora": lora})
    assert problem.path == path
    assert value in problem.value


@pytest.mark.parametrize(
    ("base", "said", "nearest"),
    [
        ("model:caht", "lora.base names another model, 'chat'", "model:chat"),
        ("model:", "lora.base names another model, 'chat'", "model:chat"),
        ("model:chat@", "'' is no version", "model:chat"),
        ("model:chat@newest", "'newest' is no version: `model:NAME` is the one that serves", "model:chat"),
        (None, "its folder, or `model:NAME`", "model:chat"),
    ],
)
def test_a_base_by_name_is_the_model_of_lora_base(base: str | None, said: str, nearest: str) -> None:
    config = {"kind": "text_generation", "base": base}
    problem = only({"lora": LORA, "backend": {"name": "torch", "config": config}})
    assert (problem.path, problem.nearest) == ("backend.config.base", nearest)
    assert said in problem.message


def test_an_adapter_with_its_base_is_declared_and_other_backends_decide_themselves() -> None:
    for base in ("models/chat", "model:chat", "model:chat@1.0.0", "model:chat@v2"):
        config = {"kind": "text_generation", "base": base}
        assert parse_object(MINIMAL | {"lora": LORA, "backend": {"name": "torch", "config": config}})
    assert parse_object(MINIMAL | {"lora": LORA, "backend": {"name": "vllm", "config": {"server": "python"}}})
