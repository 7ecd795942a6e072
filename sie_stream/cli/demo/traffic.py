"""What the demo asks: real held-out rows of every model, in a fixed shuffled order at a steady rate."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sie_stream.client.requests import Request
from sie_stream.errors import ConfigError
from sie_stream.spec import ModelSpec, parse_documents

GENERATIVE = "text-generation"
GENERATIONS = 12
SLOW_SHARE = 0.01
"""Embedders cost some 20 ms of a core each; they get this share of the classical traffic."""
SEED = 20_26


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A built model with real rows to send it."""

    spec: ModelSpec
    folder: Path
    samples: tuple[dict[str, Any], ...]


def load_models(models_dir: Path) -> list[DemoModel]:
    """Every model under `models_dir`. Raises ConfigError when there is none, naming the command that builds them."""
    found = []
    for path in sorted(models_dir.glob("*/model-spec.yaml")):
        spec = parse_documents(path.read_text(), str(path))[0]
        samples = tuple(json.loads(line) for line in (path.parent / "samples.jsonl").read_text().splitlines() if line)
        found.append(DemoModel(spec, path.parent, samples))
    if not found:
        raise ConfigError(f"no models in {models_dir}: build them with `make models`")
    return found


def plan(models: list[DemoModel], requests: int) -> Iterator[Request]:
    """`requests` requests over all models, the same ones at every run: every model at least once."""
    chance = random.Random(SEED)
    generative = [model for model in models if model.spec.service_type == GENERATIVE]
    slow = [model for model in models if model.spec.service_type == "embedding"]
    fast = [model for model in models if model not in generative and model not in slow]
    slots: list[DemoModel] = list(itertools.islice(itertools.cycle(generative), GENERATIONS if generative else 0))
    slots += itertools.islice(itertools.cycle(slow), int(requests * SLOW_SHARE) if slow else 0)
    slots += itertools.islice(itertools.cycle(fast), max(len(fast), requests - len(slots)))
    chance.shuffle(slots)
    cursors: dict[str, Iterator[dict[str, Any]]] = {m.spec.model_id: itertools.cycle(m.samples) for m in models}
    for number, model in enumerate(slots):
        yield Request(
            model=model.spec.model_id,
            inputs=next(cursors[model.spec.model_id]),
            request_id=f"demo-{number:06d}",
            parameters={"max_tokens": 24, "temperature": 0.0} if model in generative else None,
        )
