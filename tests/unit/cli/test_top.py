"""What `sie-stream top` shows of a few samples."""

from __future__ import annotations

from msgspec import structs
from rich.console import Console

from sie_stream.cli.top import FRESH_MS, RATE_OVER_MS, Board, busy, device_rows, model_rows, picture
from sie_stream.telemetry import MODEL_GONE_MS, DeviceSample, EngineSample, GpuSample, ModelSample, SequenceCounts

MIB = 1024 * 1024


def sample(at_ms: int, *models: ModelSample, incarnation: str = "w0-1", worker: str = "w0") -> DeviceSample:
    engine = EngineSample("torch", 7, 90 * MIB, 1_500, MIB, 0)
    return DeviceSample(worker, incarnation, "cpu:0", at_ms, 1_000, 2_500, 512 * MIB, (engine,), models)


def model(requests: int, name: str = "churn") -> ModelSample:
    return ModelSample(name, "1", 10 * MIB, 2_000, requests=requests, busy_ms=2 * requests)


def test_rates_are_over_the_last_seconds() -> None:
    board = Board()
    for second in range(20):
        board.add(sample(1_000 * second, model(10 * second if second < 10 else 90 + 30 * (second - 9))))
    [row] = model_rows(board, 19_000)
    assert (row["requests_s"], row["ms_each"], row["requests"]) == (30.0, 2.0, 390)


def test_use_is_what_the_gpu_says_and_without_one_what_engines_hold() -> None:
    board = Board()
    board.add(sample(0))
    board.add(structs.replace(sample(0, worker="w1"), gpu=GpuSample(memory_used_bytes=300 * MIB)))
    board.add(structs.replace(sample(0, worker="w2"), gpu=GpuSample()))
    assert [(row["used_mb"], row["memory_mb"]) for row in device_rows(board, 0)] == [(90, 512), (300, 512), (90, 512)]


def test_a_clock_that_stands_still_or_goes_back_fills_no_memory() -> None:
    board = Board()
    for number in range(5_000):
        board.add(sample(1_000 - number % 2, model(number)))
    assert max(len(seen) for seen in board.models.values()) <= 2


def test_a_model_that_is_told_no_more_does_nothing_any_more() -> None:
    board = Board()
    for second in range(5):
        board.add(sample(1_000 * second, model(10 * second)))
    board.add(sample(4_000 + RATE_OVER_MS // 2))
    [row] = model_rows(board, 4_000 + RATE_OVER_MS // 2)
    assert row["requests_s"] == 5.0, "half of the window was quiet"
    board.add(sample(4_000 + RATE_OVER_MS))
    assert model_rows(board, 4_000 + RATE_OVER_MS)[0]["requests_s"] == 0
    assert busy(model_rows(board, 4_000 + RATE_OVER_MS)) == []


def test_a_new_incarnation_starts_anew_and_a_silent_worker_is_not_shown() -> None:
    board = Board()
    board.add(sample(0, model(1_000)))
    board.add(sample(0, model(5), worker="w1"))
    board.add(sample(FRESH_MS + 1, model(3), incarnation="w0-2"))
    assert [(row["worker"], row["requests"]) for row in model_rows(board, FRESH_MS + 1)] == [("w0", 3)]
    assert [row["worker"] for row in device_rows(board, FRESH_MS + 1)] == ["w0"]


def test_a_model_that_its_device_names_no_more_is_gone() -> None:
    board = Board()
    board.add(sample(0, model(5)))
    board.add(sample(MODEL_GONE_MS, model(5, "other")))
    assert [row["model"] for row in model_rows(board, MODEL_GONE_MS)] == ["churn", "other"]
    board.add(sample(MODEL_GONE_MS + 1))
    assert [row["model"] for row in model_rows(board, MODEL_GONE_MS + 1)] == ["other"]


def test_the_busiest_model_is_first_and_everything_is_on_the_page() -> None:
    board = Board()
    lm = structs.replace(model(0, "lm"), sequences=SequenceCounts(2, 1, 64, 30, 100, 60), completion_tokens=0)
    board.add(sample(0, model(0), lm))
    board.add(sample(RATE_OVER_MS, model(400), structs.replace(lm, requests=4, completion_tokens=400)))
    rows = model_rows(board, RATE_OVER_MS)
    assert [(row["model"], row["requests_s"], row["tokens_s"]) for row in rows] == [
        ("churn", 100, None),
        ("lm", 1, 100),
    ]
    page = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    page.print(picture(device_rows(board, RATE_OVER_MS), rows))
    text = page.export_text()
    for shown in ("torch 90 MB", "30/64", "60 %", "25.0", "90 of 512 MB"):
        assert shown in text
