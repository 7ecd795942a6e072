"""all-MiniLM-L6-v2 with int8 weights as an ONNX model."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpu_worker.backends.base import EngineOutput
from gpu_worker.backends.onnx_backend import OnnxBackend
from gpu_worker.backends.torch_backend import TorchBackend
from sie_stream.edge.clock import SystemClock
from zoo import embedder
from zoo.package import Package, engine_input, launch_of, write_package
from zoo.recipes import Recipe
from zoo.weights import fetched, pins


def build(recipe: Recipe, folder: Path) -> None:
    pin = pins()[recipe.weights[0]]
    shutil.copyfile(fetched(recipe.weights[0])["model.onnx"], folder / "model.onnx")
    full = fetched(recipe.weights[1])
    tokenizer_digest = embedder.write_tokenizer(full["tokenizer.json"], folder)
    samples = embedder.samples(folder)

    def judge(answers: list[EngineOutput]) -> dict[str, float]:
        mine = embedder.vectors(answers)
        theirs = embedder.vectors(_full_precision(recipe, package, full["model.safetensors"].parent))
        return {
            "nearest sentence is of the same document": embedder.same_document_share(mine),
            "smallest cosine to the float32 model": float((mine * theirs).sum(axis=1).min()),
            "mean cosine to the float32 model": float((mine * theirs).sum(axis=1).mean()),
        }

    package = Package(
        version="1.0.0",
        service_type="embedding",
        config={"kind": "embedding", "threads": 1, "max_tokens": embedder.TOKENS_MAX, "pad_token_id": 0},
        input_schema=embedder.INPUT_SCHEMA,
        output_schema=embedder.OUTPUT_SCHEMA,
        samples=samples,
        batches=(1, 8, 32),
        tolerance=0.05,
        p99_latency_ms=1_000,
        queue_ms=500,
        title=f"{pin.title}: sentence embeddings of 384 numbers.",
        data="Quantised by its publisher from all-MiniLM-L6-v2. The samples are sentences of the data set descriptions "
        "in scikit-learn (BSD-3-Clause).",
        algorithm="BERT with 6 layers of width 384, int8 weights; mean over real tokens, then length 1. The tokenizer "
        "is that of the float32 model.",
        metrics={},
        metrics_about="Measured at build time on the samples, whose documents are known.",
        judge=judge,
        licence=f"{pin.licence} ({pin.title}).",
        limits=f"English. Texts are cut after {embedder.TOKENS_MAX} tokens. Activations are quantised batch by batch, "
        "so an embedding changes in the third digit with its neighbours; use the float32 model where that matters.",
        extra={
            "tokenizer": {"path": "tokenizer.json", "digest": tokenizer_digest},
            "preferred_precision": ["int8"],
            "max_seq_len": embedder.TOKENS_MAX,
        },
    )
    write_package(recipe, folder, package, OnnxBackend)


def _full_precision(recipe: Recipe, package: Package, folder: Path) -> list[EngineOutput]:
    """The float32 model's answers to the same samples."""
    launch = launch_of(recipe, folder, package, "")
    model = TorchBackend(SystemClock()).load(launch)
    return model.run([engine_input(place, sample) for place, sample in enumerate(package.samples)])
