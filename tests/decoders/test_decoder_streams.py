"""What decoders tell of answers under way, and answers in a declared form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.backends.base import EngineDelta, EngineInput, EngineOutput
from gpu_worker.backends.decoder.flight import TOLD_EVERY_MS
from gpu_worker.backends.decoder.model import DecoderModel
from tests.decoders.families import VOCABULARY, ask, load, save, with_byte_tokenizer, with_tokenizer
from tests.libraries.backends.launching import FixedClock, row


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never chooses to stop; token n is the character chr(32 + n)."""
    return with_tokenizer(save(tmp_path_factory.mktemp("talker"), eos_token_id=None))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last token ends an answer."""
    return with_byte_tokenizer(save(tmp_path_factory.mktemp("writer"), eos_token_id=VOCABULARY - 1))


def following(request_id: str, **parameters: Any) -> EngineInput:
    raw = json.dumps(parameters).encode()
    return row(request_id, {"prompt": "?"}, token_ids=[5, 9], parameters=raw, stream=True)


def watch(model: DecoderModel, clock: FixedClock, *items: EngineInput, step_ms: float = 30.0) -> Any:
    """(deltas, outputs) by request id."""
    for ticket, item in enumerate(items):
        assert model.submit(ticket, item) is None
    told: dict[str, list[EngineDelta]] = {item.request_id: [] for item in items}
    answers: dict[str, EngineOutput] = {}
    while model.busy:
        ended = model.step()
        clock.now += round(step_ms)
        for ticket, delta in model.deltas():
            told[items[ticket].request_id].append(delta)
        answers.update({output.request_id: output for _, output in ended})
    return told, answers


def test_deltas_add_up_to_the_answer_and_come_now_and_then(talker: Path) -> None:
    clock = FixedClock()
    model = load(talker, clock)
    told, answers = watch(model, clock, following("a", max_tokens=40), ask("quiet", [7], max_tokens=40))
    tokens = answers["a"].token_ids
    assert tokens is not None
    assert told["quiet"] == []
    assert [token for delta in told["a"] for token in delta.token_ids] == tokens
    assert "".join(delta.text for delta in told["a"]) == "".join(chr(32 + token) for token in tokens)
    assert len(told["a"]) <= 40 * 30.0 / TOLD_EVERY_MS + 1


def test_nothing_of_a_stop_text_is_told(talker: Path) -> None:
    clock = FixedClock()
    model = load(talker, clock)
    _, plain = watch(model, clock, following("a", max_tokens=40), step_ms=60.0)
    text = "".join(chr(32 + token) for token in plain["a"].token_ids or [])
    stop = text[20:23]
    told, answers = watch(model, clock, following("b", max_tokens=40, stop=[stop]), step_ms=60.0)
    assert "".join(delta.text for delta in told["b"]) == json.loads(answers["b"].outputs or b"")["text"]
    assert stop not in "".join(delta.text for delta in told["b"])


def test_a_cancelled_or_forgotten_answer_is_told_of_no_more(talker: Path) -> None:
    model = load(talker)
    model.submit(1, following("a"))
    model.step()
    model.cancel(1)
    assert model.deltas() == []
    model.submit(2, following("b"))
    model.step()
    model.reset()
    assert model.deltas() == []


def test_a_pattern_is_kept_to_and_ends_the_answer(writer: Path) -> None:
    model = load(writer, max_tokens=60)
    pattern = r"[a-f]{3}-[0-9]{2,4}(x|y)"
    forms = {"type": "regex", "pattern": pattern}
    items = [
        ask(str(n), [5 + n, 9], seed=n, response_format=forms, temperature=1.0 if n % 2 else 0.0) for n in range(8)
    ]
    for answer in model.run(items):
        text = "".join(chr(32 + token) for token in answer.token_ids or [])
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, text), text


def test_json_by_a_schema_beside_free_answers(writer: Path) -> None:
    model = load(writer, max_tokens=80)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}
    free = ask("free", [5, 9], max_tokens=30)
    [alone] = model.run([free])
    answers = model.run([ask("a", [5, 9], response_format=form), free, ask("b", [8], response_format=form)])
    assert answers[1].token_ids == alone.token_ids
    for answer in (answers[0], answers[2]):
        value = json.loads("".join(chr(32 + token) for token in answer.token_ids or []))
        assert isinstance(value["ok"], bool)
        assert 0 <= value["n"] <= 999


@pytest.mark.parametrize(
    ("form", "code", "words"),
    [
        ({"type": "regex", "pattern": "(a"}, "invalid_response_format", "unclosed group"),
        ({"type": "regex", "pattern": "(?=a)b"}, "invalid_response_format", "look-around"),
        ({"type": "json_schema", "schema": {"type": "nonsense"}}, "invalid_response_format", "nonsense"),
        ({"type": "json_schema", "schema": {"not": {"type": "string"}}}, "invalid_response_format", "not"),
        ({"type": "json_schema", "schema": 3}, "invalid_response_format", "object"),
        ({"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}, "invalid_response_format", "allowed are"),
        ({"type": "yaml"}, "invalid_parameters", "yaml"),
        ({"type": "regex"}, "invalid_parameters", "pattern"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_and_its_neighbours_are_served(
    writer: Path, form: dict[str, Any], code: str, words: str
) -> None:
    model = load(writer)
    refused, served = model.run([ask("bad", [5], response_format=form), ask("good", [5])])
    assert refused.error_code == code
    assert words in (refused.error_message or "")
    assert served.error_code is None


def test_equal_forms_are_compiled_once(writer: Path) -> None:
    model = load(writer)
    form = {"type": "regex", "pattern": "[a-c]{2}"}
    model.run([ask(str(n), [5 + n], response_format=form) for n in range(5)])
    grammars = model.grammars
    assert grammars is not None
    assert grammars.compilations == 1


def test_a_tokenizer_that_the_library_cannot_read_refuses_forms_and_serves_the_rest(talker: Path) -> None:
    form = {"type": "regex", "pattern": "a"}
    refused, served = load(talker).run([ask("a", [5], response_format=form), ask("b", [5])])
    assert refused.error_code == "response_format_unsupported"
    assert served.error_code is None


def test_without_a_tokenizer_a_form_is_refused_and_deltas_have_tokens_only(tmp_path: Path) -> None:
    clock = FixedClock()
    model = load(save(tmp_path, eos_token_id=None), clock)
    [refused] = model.run([ask("a", [5], response_format={"type": "regex", "pattern": "a"})])
    assert refused.error_code == "invalid_parameters"
    assert "tokenizer" in (refused.error_message or "")
    told, answers = watch(model, clock, following("b"))
    assert [token for delta in told["b"] for token in delta.token_ids] == answers["b"].token_ids
    assert {delta.text for delta in told["b"]} == {""}
