"""all-MiniLM-L6-v2 as a torch model."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpu_worker.backends.torch_backend import TorchBackend
from zoo import embedder
from zoo.package import Package, write_package
from zoo.recipes import Recipe
from zoo.weights import fetched, pins


def build(recipe: Recipe, folder: Path) -> None:
    pin = pins()[recipe.weights[0]]
    files = fetched(recipe.weights[0])
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(files[name], folder / name)
    tokenizer_digest = embedder.write_tokenizer(files["tokenizer.json"], folder)
    package = Package(
        version="1.0.0",
        service_type="embedding",
        config={"kind": "embedding", "dtype": "float32", "threads": 1, "max_tokens": embedder.TOKENS_MAX},
        input_schema=embedder.INPUT_SCHEMA,
        output_schema=embedder.OUTPUT_SCHEMA,
        samples=embedder.samples(folder),
        batches=(1, 8, 32),
        tolerance=1e-4,
        p99_latency_ms=1_000,
        queue_ms=500,
        title=f"{pin.title}: sentence embeddings of 384 numbers, float32.",
        data="Trained by its authors on more than a billion sentence pairs; see the model's own card. The samples are "
        "sentences of the data set descriptions in scikit-learn (BSD-3-Clause).",
        algorithm="BERT with 6 layers of width 384; mean of the last hidden states over real tokens, then length 1.",
        metrics={},
        metrics_about="Measured at build time on the samples, whose documents are known.",
        judge=lambda answers: {
            "nearest sentence is of the same document": embedder.same_document_share(embedder.vectors(answers))
        },
        licence=f"{pin.licence} ({pin.title}).",
        limits=f"English. Texts are cut after {embedder.TOKENS_MAX} tokens.",
        extra={
            "tokenizer": {"path": "tokenizer.json", "digest": tokenizer_digest},
            "preferred_precision": ["fp32", "bf16"],
            "max_seq_len": embedder.TOKENS_MAX,
        },
    )
    write_package(recipe, folder, package, TorchBackend)
