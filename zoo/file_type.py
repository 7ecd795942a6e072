"""Magika's file-type classifier as an ONNX model."""

from __future__ import annotations

import base64
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from gpu_worker.backends.base import EngineOutput
from gpu_worker.backends.onnx_backend import OnnxBackend
from zoo.package import Package, Sample, write_package
from zoo.recipes import Recipe
from zoo.weights import fetched, pins

KINDS_OF_FILE = {".py": "python", ".csv": "csv", ".rst": "rst", ".jpg": "jpeg", ".gz": "gzip", ".build": "", ".tp": ""}
"""Files inside the scikit-learn package; an empty name: no truth known."""
FILES_OF_A_KIND = 16
CONTENT_BYTES = 6_000

SNIPPETS = {
    "json": '{\n  "orders": [\n    {"id": 17, "items": ["tea", "milk"]},\n    {"id": 18, "items": []}\n  ]\n}\n',
    "html": "<!DOCTYPE html>\n<html><head><title>Orders</title></head>\n<body><p>Two new orders.</p></body></html>\n",
    "xml": '<?xml version="1.0" encoding="UTF-8"?>\n<orders>\n  <order id="17"><item>tea</item></order>\n</orders>\n',
    "sql": "SELECT customer, SUM(total) AS spent\nFROM orders\nWHERE day >= '2024-01-01'\nGROUP BY customer;\n",
    "shell": '#!/bin/sh\nset -eu\nfor file in "$@"; do\n  gzip -9 "$file"\ndone\necho "packed $# files"\n',
    "c": '#include <stdio.h>\n\nint main(void) {\n    printf("%d\\n", 42);\n    return 0;\n}\n',
    "rust": "use std::io;\n\nfn main() -> io::Result<()> {\n    let mut total: u64 = 0;\n    Ok(())\n}\n",
    "go": 'package main\n\nimport "fmt"\n\nfunc main() {\n\tfor i := 0; i < 3; i++ {\n\t\tfmt.Println(i)\n\t}\n}\n',
    "yaml": "services:\n  api:\n    image: example/api:1.0\n    ports:\n      - 8080:8080\n    restart: always\n",
    "dockerfile": 'FROM python:3.11-slim\nWORKDIR /app\nCOPY . .\nRUN pip install .\nENTRYPOINT ["serve"]\n',
    "java": "package shop;\n\npublic final class Order {\n    final long id;\n    Order(long i) { id = i; }\n}\n",
    "ini": "[server]\nhost = 127.0.0.1\nport = 8080\n\n[log]\nlevel = info\n",
}
"""Small contents of our own, by their true kind."""

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "content_base64": {"type": "string", "maxLength": 200_000, "description": "Any bytes, in base64."},
        "text": {"type": "string", "maxLength": 200_000, "description": "Or a text; give exactly one."},
    },
}


def output_schema(labels: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "label": {"type": "string", "description": "The answer, or txt or unknown when the score is low."},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "raw_label": {"type": "string", "enum": [*labels, "undefined"]},
        },
        "required": ["label", "score", "raw_label"],
    }


def build(recipe: Recipe, folder: Path) -> None:
    pin = pins()[recipe.weights[0]]
    files = fetched(recipe.weights[0])
    shutil.copyfile(files["model.onnx"], folder / "model.onnx")
    config = network_config(json.loads(files["config.min.json"].read_text()), files["content_types_kb.min.json"])
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    truths, samples = contents()
    package = Package(
        version="1.0.0",
        service_type="classification",
        config={"kind": "file_type", "threads": 1},
        input_schema=INPUT_SCHEMA,
        output_schema=output_schema(config["labels"]),
        samples=samples,
        batches=(1, 4, 16),
        tolerance=1e-3,
        p99_latency_ms=200,
        queue_ms=100,
        title=f"{pin.title}: what kind of file some bytes are, among 214.",
        data="Trained by its authors on some 100 million files; see the model's own card. The samples are files of the "
        "scikit-learn package (BSD-3-Clause), cut after 6,000 bytes, and small contents of our own.",
        algorithm="A small network over the first and last 1,024 bytes; labels below their threshold become txt or "
        "unknown.",
        metrics={},
        judge=lambda answers: judge(truths, answers),
        metrics_about="Measured at build time on the samples whose kind is known.",
        licence=f"{pin.licence} ({pin.title}).",
        limits="Contents below 8 bytes are not looked at: they are txt or unknown. Only both ends of a file are "
        "read. A score moves in the fourth digit with the batch it is computed in.",
        replicas=1,
    )
    write_package(recipe, folder, package, OnnxBackend)


def network_config(published: dict[str, Any], knowledge: Path) -> dict[str, Any]:
    """config.json of our folder (see gpu_worker.backends.filetype) from the package's two files."""
    kinds = json.loads(knowledge.read_text())
    labels = published["target_labels_space"]
    named = sorted({*labels, *published["overwrite_map"].values()})
    if published["mid_size"] or published["use_inputs_at_offsets"]:
        raise ValueError("this model reads the middle of a file, which the feature extraction here does not do")
    same = ("thresholds", "overwrite_map", "medium_confidence_threshold", "beg_size", "end_size", "block_size")
    same += ("min_file_size_for_dl", "padding_token")
    return {
        "labels": labels,
        "text_labels": [label for label in named if kinds.get(label, {}).get("is_text")],
        **{key: published[key] for key in same},
    }


def contents() -> tuple[list[str], list[Sample]]:
    """(true kinds, samples), small contents first. An empty kind: not known."""
    truths = list(SNIPPETS)
    samples = [Sample({"text": text}) for text in SNIPPETS.values()]
    root = resources.files("sklearn")
    taken: dict[str, int] = {}
    for folder in ("datasets/data", "datasets/descr", "datasets/images", "linear_model", "tree"):
        for file in sorted(root.joinpath(folder).iterdir(), key=lambda entry: entry.name):
            suffix = Path(file.name).suffix
            if suffix not in KINDS_OF_FILE or not file.is_file() or taken.get(suffix, 0) >= FILES_OF_A_KIND:
                continue
            content = file.read_bytes()[:CONTENT_BYTES]
            if len(content) >= 64:
                taken[suffix] = taken.get(suffix, 0) + 1
                truths.append(KINDS_OF_FILE[suffix])
                samples.append(Sample({"content_base64": base64.b64encode(content).decode()}))
    return truths, samples


def judge(truths: list[str], answers: list[EngineOutput]) -> dict[str, float]:
    told = [json.loads(answer.outputs or b"{}")["label"] for answer in answers]
    known = [(truth, label) for truth, label in zip(truths, told, strict=True) if truth]
    return {
        "accuracy": sum(truth == label for truth, label in known) / len(known),
        "contents judged": float(len(known)),
    }
