"""vLLM's and SGLang's interfaces against servers that are wrong on purpose. Real ones: tests/backends_real."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_worker.backends.base import Backend, ModelRefused
from gpu_worker.backends.served.failures import ServerDied
from gpu_worker.backends.served.language_model import ServedLanguageModel, prometheus_sums
from gpu_worker.backends.sglang_backend import SglangBackend
from gpu_worker.backends.vllm_backend import VllmBackend
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from tests.libraries.backends.fake_language_server import sglang_routes, vllm_routes
from tests.libraries.backends.launching import launch, row
from tests.libraries.backends.wrong_servers import Routes, Trouble, serving

BACKENDS: dict[str, Any] = {"vllm": (VllmBackend, vllm_routes), "sglang": (SglangBackend, sglang_routes)}
GENERATE = {"vllm": "/v1/completions", "sglang": "/generate"}
VERSION = {"vllm": "/version", "sglang": "/server_info"}
ROOT = Path(__file__).parents[3]
both = pytest.mark.parametrize("kind", sorted(BACKENDS))


def made(kind: str, **changes: Any) -> tuple[Backend, Routes]:
    backend, routes = BACKENDS[kind]
    return backend(SystemClock()), routes(**changes)


def asked(kind: str, url: str, source: Path = Path("elsewhere"), **config: Any) -> ModelLaunch:
    return launch(source, kind, {"url": url, "timeout_ms": 5_000, **config})


def parameters(**chosen: Any) -> bytes:
    return json.dumps(chosen).encode()


@both
def test_tokens_go_out_and_come_back_without_the_stop_token(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url, concurrency=1))
        chosen = parameters(temperature=0.7, top_k=5, stop=["end"], max_tokens=9)
        whole, cut = model.run(
            [
                row("whole", {}, token_ids=[10, 20], parameters=chosen, seed=5),
                row("cut", {}, token_ids=[10, 20, 30], parameters=parameters(max_tokens=2)),
            ]
        )
        first = server.asked(GENERATE[kind])[0]
    assert (whole.token_ids, whole.finish_reason, whole.completion_tokens) == ([11, 21], "stop", 2)
    assert json.loads(whole.outputs or b"")["text"] == "text", "a stop text may end inside a token"
    assert (cut.token_ids, cut.finish_reason, cut.prompt_tokens, cut.outputs) == ([11, 21], "length", 3, None)
    sent = first if kind == "vllm" else first["sampling_params"]
    assert (sent["temperature"], sent["top_k"], sent["stop"]) == (0.7, 5, ["end"])
    assert sent["seed" if kind == "vllm" else "sampling_seed"] == 5


@both
@pytest.mark.parametrize("value", [10**40, 2**63, 0])
def test_no_server_is_asked_for_an_answer_of_no_possible_length(kind: str, value: int) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url))
        (answer,) = model.run([row("odd", {"prompt": "x"}, parameters=parameters(max_tokens=value))])
        assert not server.asked(GENERATE[kind])
    assert answer.error_code == "invalid_parameters"
    assert "max_tokens" in (answer.error_message or "")


@both
def test_the_answer_never_passes_the_context(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url))
        long, near = model.run([row("long", {}, token_ids=[1] * 16), row("near", {}, token_ids=[1] * 13)])
    assert long.error_code == "context_length_exceeded"
    assert (near.completion_tokens, near.finish_reason) == (3, "length")


@both
def test_logprobs_come_with_the_text(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        (one,) = backend.load(asked(kind, server.url)).run(
            [row("r", {}, token_ids=[4], parameters=parameters(logprobs=1))]
        )
    assert json.loads(one.outputs or b"") == {
        "text": "text",
        "finish_reason": "stop",
        "logprobs": [{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]}],
    }


@both
def test_texts_and_chats_of_models_without_a_tokenizer(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url))
        chat, text, nothing, unknown = model.run(
            [
                row("chat", {"messages": [{"role": "user", "content": "hello"}]}),
                row("text", {"prompt": "hello"}),
                row("nothing", {}),
                row("unknown", {"prompt": "hello"}, parameters=parameters(temprature=1)),
            ]
        )
    assert json.loads(chat.outputs or b"") == {"text": "HELLO", "finish_reason": "stop"}
    assert json.loads(text.outputs or b"") == {"text": "text", "finish_reason": "stop"}
    assert (nothing.error_code, unknown.error_code) == ("invalid_input", "invalid_parameters")


def bent(kind: str, **changes: Any) -> Any:
    """A good answer of one token, bent: `changes` of the choice (vLLM) or of meta_info (SGLang)."""
    if kind == "vllm":
        choice = {"text": "t", "finish_reason": "length", "token_ids": [5], **changes}
        return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    meta = {"finish_reason": {"type": "length"}, "prompt_tokens": 1, "completion_tokens": 1}
    ids = changes.pop("token_ids", [5])
    reason = changes.pop("finish_reason", "length")
    return {"text": "t", "output_ids": ids, "meta_info": {**meta, "finish_reason": {"type": reason}, **changes}}


@both
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": [5, 6]}, "2 tokens and counts 1"),
        ({"token_ids": None}, "ids"),
        ({"finish_reason": "abort"}, "abort"),
        ({"token_ids": ["5"]}, "Expected `int`"),
    ],
)
def test_half_answers_are_errors_of_the_request(kind: str, changes: dict[str, Any], complaint: str) -> None:
    backend, routes = made(kind)
    good = routes[GENERATE[kind]]

    def respond(body: Any) -> Any:
        return bent(kind, **changes) if 9 in (body.get("prompt") or body.get("input_ids")) else good(body)

    with serving({**routes, GENERATE[kind]: respond}) as server:
        fine, bad = backend.load(asked(kind, server.url)).run(
            [row("0", {}, token_ids=[1]), row("1", {}, token_ids=[9])]
        )
    assert (fine.error_code, bad.error_code) == (None, "server_bad_answer")
    assert complaint in (bad.error_message or "")


@both
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Trouble.CUT, "server_bad_answer"),
        (400, "server_refused"),
        (500, "server_error"),
        (Trouble.HANG, "server_timeout"),
    ],
)
def test_failures_of_a_server_that_lives(kind: str, answer: object, code: str) -> None:
    backend, routes = made(kind, **{GENERATE[kind]: answer})
    with serving(routes) as server:
        (one,) = backend.load(asked(kind, server.url, timeout_ms=300)).run([row("r", {}, token_ids=[1])])
        aborted = server.asked("/abort_request")
    assert one.error_code == code
    assert aborted == ([{"rid": "r"}] if (kind, code) == ("sglang", "server_timeout") else [])


@both
def test_a_server_that_is_gone_ends_the_engine(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url))
        server.end()
        with pytest.raises(ServerDied):
            model.run([row(str(number), {}, token_ids=[1]) for number in range(5)])
        with pytest.raises(ModelRefused) as refusal:
            backend.load(asked(kind, server.url))
    assert refusal.value.code == "server_unreachable"


@both
@pytest.mark.parametrize("version", ["0.1.0", "7.0", "main"])
def test_other_versions_are_refused_with_what_to_do(kind: str, version: str) -> None:
    backend, routes = made(kind, **{VERSION[kind]: {"version": version}})
    with serving(routes) as server, pytest.raises(ModelRefused, match="Install such a version") as refusal:
        backend.load(asked(kind, server.url))
    assert refusal.value.code == "server_version_unsupported"


@both
def test_a_model_the_server_does_not_have(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server, pytest.raises(ModelRefused, match="only m") as refusal:
        backend.load(asked(kind, server.url, model="n"))
    assert refusal.value.code == "model_not_ready"


@both
def test_an_attached_server_sleeps_only_when_declared_and_after_its_last_user(kind: str) -> None:
    sleep = {"vllm": "/sleep?level=1", "sglang": "/release_memory_occupation"}[kind]
    wake = {"vllm": "/wake_up", "sglang": "/resume_memory_occupation"}[kind]
    backend, routes = made(kind)
    with serving(routes) as server:
        backend.unload(backend.load(asked(kind, server.url)))
        assert not server.asked(sleep)
        first, second = (backend.load(asked(kind, server.url, sleep=True)) for _ in range(2))
        backend.unload(first)
        assert not server.asked(sleep)
        backend.unload(second)
        assert len(server.asked(sleep)) == 1
        again = backend.load(asked(kind, server.url, sleep=True))
        assert len(server.asked(wake)) == 1
        (one,) = again.run([row("r", {}, token_ids=[1])])
        assert one.error_code is None


@both
def test_adapters_are_loaded_named_and_unloaded(kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    prefix = {"vllm": "/v1", "sglang": ""}[kind]
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url, tmp_path, base="base", model="a"))
        (one,) = model.run([row("r", {}, token_ids=[1])])
        (sent,) = server.asked(GENERATE[kind])
        backend.unload(model)
        assert server.asked(f"{prefix}/load_lora_adapter") == [{"lora_name": "a", "lora_path": str(tmp_path)}]
        assert server.asked(f"{prefix}/unload_lora_adapter") == [{"lora_name": "a"}]
        assert bool(server.asked("/flush_cache")) is (kind == "sglang")
    assert one.error_code is None
    assert sent["model" if kind == "vllm" else "lora_path"] == "a"
    assert model.weights_digest.startswith("sha256:")


@both
def test_metrics_are_summed_over_their_labels(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        model = backend.load(asked(kind, server.url))
        assert isinstance(model, ServedLanguageModel)
        found = model.metrics()
    assert found == ({"vllm:num_requests_running": 3.0} if kind == "vllm" else {"sglang:token_usage": 0.25})


def test_lines_that_are_no_sample_are_skipped() -> None:
    text = '# TYPE a gauge\na{x="{}"} 1\na 2 1700000000\nb NaN-ish\n\nc\n'
    assert prometheus_sums(text) == {"a": 3.0}


FAKE = """
import os, sys, threading
from tests.libraries.backends.fake_language_server import {kind}_routes
from tests.libraries.backends.wrong_servers import WrongServer
port = int(sys.argv[sys.argv.index("--port") + 1])
print("serving", *sys.argv[1:], flush=True)
server = WrongServer({kind}_routes(), port)
threading.Event().wait()
"""


@both
def test_a_program_that_is_not_listed_is_not_started(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    backend: Backend = BACKENDS[kind][0](SystemClock())
    for listed in ("", f"{sys.executable}x, /usr/bin/other"):
        monkeypatch.setenv("SIE_STREAM_LAUNCHABLE_SERVERS", listed)
        with pytest.raises(ModelRefused, match="may not start") as refusal:
            backend.load(launch(tmp_path, kind, {"server": sys.executable}))
        assert refusal.value.code == "server_not_allowed"


@both
def test_a_started_server_sleeps_wakes_and_ends(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the server's module name, so that all but the server is as it will be."""
    monkeypatch.setenv("SIE_STREAM_LAUNCHABLE_SERVERS", f"/usr/bin/other, {sys.executable}")
    module = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}[kind]
    program = tmp_path / "program" / module
    program.parent.mkdir(parents=True)
    program.write_text(FAKE.format(kind=kind))
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    path = os.pathsep.join([str(tmp_path / "program"), str(ROOT)])
    config = {
        "server": sys.executable,
        "environment": [f"PYTHONPATH={path}"],
        "sleep": True,
        "start_timeout_ms": 30_000,
    }
    backend: Backend = BACKENDS[kind][0](SystemClock())
    first = backend.load(launch(weights, kind, config))
    assert first.run([row("r", {}, token_ids=[1])])[0].token_ids == [2]
    backend.unload(first)
    again = backend.load(launch(weights, kind, config))
    assert again.run([row("r", {}, token_ids=[1])])[0].token_ids == [2]
    backend.unload(again)
    assert len(programs(module)) == 1, "asleep"
    other = backend.load(launch(weights, kind, {**config, "sleep": False}))
    assert len(programs(module)) == 1, "a new start ends the sleeper"
    backend.unload(other)
    assert not programs(module)


@both
def test_a_load_after_a_death_leaves_the_older_model_to_end_the_engine(kind: str) -> None:
    backend, routes = made(kind)
    with serving(routes) as server:
        older = backend.load(asked(kind, server.url))
        server.end()
        with pytest.raises(ModelRefused):
            backend.load(asked(kind, server.url))
        with pytest.raises(ServerDied):
            older.run([row("r", {}, token_ids=[1])])


def programs(module: str) -> list[psutil.Process]:
    """Servers below us, without their guards."""
    name = module.removesuffix(".py").replace("/", ".")
    below = psutil.Process().children(recursive=True)
    return [one for one in below if one.cmdline()[1:3] == ["-m", name]]
