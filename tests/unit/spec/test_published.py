"""The published JSON Schema says what the parser does; `describe` says what is not enforced yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sie_stream.spec import ENFORCED, FORMS, Form, ModelSpec, json_schema, not_enforced, parse_documents, parse_object
from sie_stream.spec.forms import FLAT, SHORT, to_camel
from sie_stream.spec.published import DRAFT

EXAMPLES = Path(__file__).parents[3] / "examples" / "declarations"
MINIMAL: dict[str, Any] = {"model_id": "churn", "version": "1.0", "source": "m.skops", "min_gpu_memory_mb": 64}


def spec_schema(form: Form) -> dict[str, Any]:
    schema = json_schema(form)
    return schema["properties"]["spec"] if form == "modelservice" else schema


@pytest.mark.parametrize("form", FORMS)
def test_every_field_is_published_with_words_and_examples(form: Form) -> None:
    schema = json_schema(form)
    assert schema["$schema"] == DRAFT
    spell = to_camel if form == "modelservice" else str
    spec = spec_schema(form)
    assert set(spec["properties"]) == {spell(name) for name in [*ModelSpec.model_fields, *FLAT]}
    for owner in (spec, *schema["$defs"].values()):
        for name, body in owner["properties"].items():
            assert body.get("description"), name
            assert body.get("examples") or "pattern" in str(body), name


@pytest.mark.parametrize("form", FORMS)
def test_every_reference_resolves(form: Form) -> None:
    schema = json_schema(form)

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [found for inner in value.values() for found in references(inner)]
        return [found for inner in value for found in references(inner)] if isinstance(value, list) else []

    assert references(schema)
    for reference in references(schema):
        assert reference.removeprefix("#/$defs/") in schema["$defs"]


def test_required_fields_in_each_form() -> None:
    assert set(json_schema()["required"]) == {"version", "source"}
    assert json_schema()["allOf"][0] == {"oneOf": [{"required": ["model_id"]}, {"required": ["name"]}]}
    assert spec_schema("modelservice")["allOf"] == [
        {"oneOf": [{"required": ["minGpuMemoryGb"]}, {"required": ["minGpuMemoryMb"]}]}
    ]


def test_short_spellings_are_published() -> None:
    for name in SHORT:
        options = json_schema()["properties"][name]["anyOf"]
        assert len(options) >= 2, name


@pytest.mark.parametrize("name", [name for name in ModelSpec.model_fields if name != "name"])
def test_the_examples_of_each_field_parse(name: str) -> None:
    base: dict[str, Any] = MINIMAL | {
        "service_type": "text-generation",
        "priority_level": "P0",
        "supported_context_length": 8192,
    }
    example: Any
    for example in ModelSpec.model_fields[name].examples or ():
        if name == "baselines":
            example = [{**example[0], "batch_size": size} for size in (1, 2, 3)]
        if name == "privacy":
            subject = example["subject"]
            base |= {"input_schema": {"properties": {subject: {"type": "string"}}, "required": [subject]}}
        parse_object({**base, name: example})


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_use_only_published_names(path: Path) -> None:
    for body in yaml.safe_load_all(path.read_text()):
        form: Form = "modelservice" if "spec" in body else "model-spec"
        spec = spec_schema(form)
        written = body.get("spec", body)
        assert set(written) <= set(spec["properties"])
        assert set(spec["required"]) <= set(written)


def test_fields_nothing_acts_on_are_named() -> None:
    assert set(ENFORCED) <= set(ModelSpec.model_fields)
    assert not_enforced(parse_object(MINIMAL)) == []
    quiet = {"description": "x", "labels": {"a": "b"}, "quota": 3, "tensor_parallel_size": 1}
    assert not_enforced(parse_object(MINIMAL | quiet)) == []
    loud = {"slas": {"p99_latency_ms": 5}, "shared_kv_cache": True, "probes": {"liveness": {}}}
    assert not_enforced(parse_object(MINIMAL | loud)) == ["shared_kv_cache", "probes"]


def test_the_example_directory_shows_all_three_forms() -> None:
    texts = [path.read_text() for path in EXAMPLES.iterdir()]
    assert any("kind: ModelService" in text for text in texts)
    assert any(text.lstrip().startswith("{") for text in texts)
    assert sum(len(parse_documents(text)) for text in texts) >= 4
    lora = {"lora": {"base": "chat", "rank": 8}}
    assert not_enforced(parse_object(MINIMAL | lora | {"backend": "torch"})) == []
    assert not_enforced(parse_object(MINIMAL | lora | {"backend": "vllm"})) == ["lora"]
