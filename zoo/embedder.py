"""What both MiniLM models share: tokenizer, schemas, samples, and how their quality is judged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from gpu_worker.backends.base import EngineOutput
from zoo.package import Sample
from zoo.texts import sentences

WIDTH = 384
TOKENS_MAX = 256
"""max_seq_length of the published sentence-transformers model."""

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1, "maxLength": 20_000}},
    "required": ["text"],
}
OUTPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "embedding": {
            "type": "array",
            "items": {"type": "number", "minimum": -1, "maximum": 1},
            "minItems": WIDTH,
            "maxItems": WIDTH,
        }
    },
    "required": ["embedding"],
}


def write_tokenizer(source: Path, folder: Path) -> str:
    """tokenizer.json that cuts at TOKENS_MAX and does not pad. Returns its digest, the same for both models.

    The published file pads everything to 128 tokens, which the engine would compute for nothing.
    """
    content = json.loads(source.read_text())
    content["padding"] = None
    content["truncation"]["max_length"] = TOKENS_MAX
    text = json.dumps(content, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def samples(folder: Path) -> list[Sample]:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return [Sample({"text": one.text}, token_ids=tokenizer.encode(one.text)) for one in sentences()]


def vectors(answers: Sequence[EngineOutput]) -> NDArray[np.float64]:
    """(answers, WIDTH)"""
    return np.array([json.loads(answer.outputs or b"{}")["embedding"] for answer in answers])


def same_document_share(embedded: NDArray[np.float64]) -> float:
    """Share of the sentences whose nearest neighbour is of the same document."""
    likeness = embedded @ embedded.T
    np.fill_diagonal(likeness, -1.0)
    documents = [one.document for one in sentences()]
    nearest = likeness.argmax(axis=1).tolist()
    return float(np.mean([documents[place] == documents[other] for place, other in enumerate(nearest)]))
