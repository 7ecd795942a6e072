"""Every built model loads through its declaration and gives its golden answers."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.backends.base import Backend, EngineInput, EngineOutput, LoadedModel, load_backend
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from sie_stream.spec import ModelSpec, parse_documents

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".models"
MAGIKA = ROOT / "tests" / "libraries" / "backends" / "magika_golden.jsonl"
FOLDERS = sorted(file.parent for file in MODELS.glob("*/model-spec.yaml"))

pytestmark = pytest.mark.integration

# On import, skops looks through every module that is loaded, and transformers breaks when it is looked through. Engine
# processes hold one backend each and never meet this; this session also collects test_smollm2, so skops comes first.
load_backend("sklearn", SystemClock())


@cache
def backend(name: str) -> Backend:
    return load_backend(name, SystemClock())


def loaded(folder: Path) -> tuple[ModelSpec, LoadedModel]:
    (spec,) = parse_documents((folder / "model-spec.yaml").read_text())
    launch = ModelLaunch(
        model=spec.name,
        version=spec.version,
        instance="mi-test",
        backend=spec.backend.name,
        source=str(folder / spec.source.uri),
        weights_digest=spec.source.digest or "",
        config=spec.backend.config,
        service_type=spec.service_type,
        priority=1,
        memory_bytes=spec.min_gpu_memory_mb << 20,
        batch_max=spec.batch_sizes.max,
    )
    return spec, backend(spec.backend.name).load(launch)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def as_input(place: int, line: dict[str, Any]) -> EngineInput:
    parameters = msgspec.json.encode(line["parameters"]) if "parameters" in line else None
    inputs = msgspec.json.encode(line["inputs"])
    return EngineInput(f"r{place}", inputs, line.get("token_ids"), parameters, line.get("seed"))


def close(found: Any, wanted: Any, tolerance: float) -> bool:
    """Equal in shape and text, and in numbers within `tolerance` (relative above 1)."""
    match wanted:
        case dict():
            return found.keys() == wanted.keys() and all(close(found[key], wanted[key], tolerance) for key in wanted)
        case list():
            pairs = zip(found, wanted, strict=True)
            return len(found) == len(wanted) and all(close(*pair, tolerance) for pair in pairs)
        case float():
            return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
        case _:
            return found == wanted


def agrees(answer: EngineOutput, line: dict[str, Any]) -> bool:
    if "output_token_ids" in line:
        return answer.token_ids == line["output_token_ids"] and answer.finish_reason == line["finish_reason"]
    return close(json.loads(answer.outputs or b"null"), line["outputs"], line["tolerance"])


@pytest.mark.skipif(not FOLDERS, reason="no models are built: run `make models`")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_answers(folder: Path) -> None:
    spec, model = loaded(folder)
    golden = lines(folder / "golden.jsonl")
    answers = model.run([as_input(place, line) for place, line in enumerate(golden)])
    wrong = [(line, answer) for line, answer in zip(golden, answers, strict=True) if not agrees(answer, line)]
    assert not wrong, wrong[0]
    assert model.weights_digest == spec.source.digest
    assert model.memory_bytes <= spec.min_gpu_memory_mb << 20
    backend(spec.backend.name).unload(model)


def test_all_models_are_built_or_none() -> None:
    assert not FOLDERS or len(FOLDERS) >= 117, "a build was interrupted: run `make models`"


@pytest.mark.skipif(not (MODELS / "magika-file-type").exists(), reason="run `make models`")
def test_file_types_are_those_of_the_original_package() -> None:
    """magika_golden.jsonl was written by magika 1.0.3's own identify_bytes."""
    _, model = loaded(MODELS / "magika-file-type")
    golden = lines(MAGIKA)
    assert len(golden) >= 20
    inputs = [{"inputs": {"content_base64": line["content_base64"]}} for line in golden]
    items = [as_input(place, line) for place, line in enumerate(inputs)]
    alone = [answer for item in items for answer in model.run([item])]
    # Rows run in blocks of eight, where the runtime sums in another order than for the single row of the package.
    for answers in (alone, model.run(items)):
        for line, answer in zip(golden, answers, strict=True):
            found = json.loads(answer.outputs or b"")
            assert (found["label"], found["raw_label"]) == (line["label"], line["raw_label"])
            assert found["score"] == pytest.approx(line["score"], abs=1e-3)
