"""One request with odd parameters, or one that is interrupted, must not end the requests that run beside it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

import pytest
import torch
from torch import Tensor

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.backends.decoder.flight import DecoderLimits
from gpu_worker.backends.decoder.frozen import Intake, Origin
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.decoding.blocks import BlockPool
from gpu_worker.decoding.sequence import Chunk
from gpu_worker.decoding.step_scheduler import StepLimits, StepScheduler
from sie_stream.trunks import trunk_of
from tests.libraries.backends.launching import FixedClock

VOCABULARY = 50
ORIGIN = Origin(trunk_of("weights", b"network", b"rope", "float32, dense, fast", "8 tokens"), "sha256:w", "lm")


class SameLogits:
    """A network to which every token is as likely as any other."""

    def run(self, chunks: Sequence[Chunk], all_rows: Sequence[bool]) -> list[Tensor]:
        rows = [chunk.count if whole else int(chunk.chooses) for chunk, whole in zip(chunks, all_rows, strict=True)]
        return [torch.full((count, VOCABULARY), 20.0) for count in rows]


class NoPages:
    """Implements HostCopies for a scheduler that swaps nothing."""

    used_bytes = 0
    block_tokens = 8

    def read(self, pages: Sequence[int], tokens: int) -> Tensor:
        raise AssertionError("nothing is kept")

    def write(self, pages: Sequence[int], content: Tensor) -> None:
        raise AssertionError("nothing is kept")


def decoder(sequences: int) -> DecoderModel:
    return DecoderModel(
        runner=SameLogits(),
        scheduler=StepScheduler(BlockPool(8), 8, b"salt", StepLimits(sequences, 16)),
        intake=Intake(ORIGIN, DecoderLimits(64, 8, frozenset(), VOCABULARY), None, None, None),
        pages=NoPages(),
        sequences_max=4,
        clock=FixedClock(),
        lock=RLock(),
        memory_bytes=0,
    )


def run(model: DecoderModel, turns: int = 80) -> dict[int, EngineOutput]:
    ended: dict[int, EngineOutput] = {}
    for _ in range(turns):
        ended.update(model.step())
        if not model.busy:
            return ended
    raise AssertionError(f"still running: {ended}")


@pytest.mark.parametrize(
    "parameters",
    [
        b'{"temperature":1,"min_p":0.1,"repetition_penalty":1e-40}',
        b'{"min_tokens":2,"stop_token_ids":[100000]}',
        b'{"temperature":1e-300}',
        b'{"temperature":1e-7,"top_p":1e-300,"top_k":1}',
    ],
)
def test_odd_parameters_end_nobody_elses_answer(parameters: bytes) -> None:
    model = decoder(4)
    model.submit(1, EngineInput("odd", b"{}", [1, 2, 3], parameters))
    model.submit(2, EngineInput("good", b"{}", [4, 5], b'{"max_tokens":4}'))
    ended = run(model)
    assert ended[2].error_code is None
    assert ended[2].completion_tokens == 4
    assert 1 in ended


def test_a_prompt_that_is_scored_may_be_interrupted() -> None:
    model = decoder(1)
    model.submit(1, EngineInput("score", b"{}", list(range(1, 41)), b'{"score":true}', priority=1))
    model.step()
    model.submit(2, EngineInput("urgent", b"{}", list(range(1, 33)), b'{"max_tokens":20}', priority=0))
    ended = run(model)
    assert model.preemptions > 0, "the case was not there"
    assert {ticket: output.error_code for ticket, output in ended.items()} == {1: None, 2: None}


def test_an_answer_of_any_length_ends_with_the_context() -> None:
    model = decoder(1)
    assert model.submit(1, EngineInput("long", b"{}", [1, 2, 3], b'{"max_tokens":%d}' % (2**63 - 1))) is None
    answer = run(model)[1]
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == ("length", 3, 61)


@pytest.mark.parametrize("value", [str(10**40), str(2**63), "-1", "0", "1.5", '"5"', "NaN"])
def test_a_length_that_is_none_is_refused_at_once(value: str) -> None:
    model = decoder(1)
    answer = model.submit(1, EngineInput("odd", b"{}", [1, 2, 3], f'{{"max_tokens":{value}}}'.encode()))
    assert answer is not None
    assert answer.error_code == "invalid_parameters"
    assert not model.busy
