"""Results and telemetry as metrics: what adds up, what never falls, and what Prometheus reads over HTTP."""

from __future__ import annotations

from urllib.request import urlopen

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from processors.edge.prometheus import Exporter
from processors.metrics.book import DEVICE_MODELS_MAX, DEVICES_MAX, FORGET_MS, MODELS_MAX, UP_MS, MetricsBook
from processors.metrics.families import Family, HistogramFamily
from processors.metrics.host import MetricsHost
from processors.turns import Ports, Silence
from schemas import codec
from sie_stream.errors import ConfigError
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite, Result, Usage
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from sie_stream.telemetry import (
    CLOCK_AHEAD_MS,
    MODEL_GONE_MS,
    DeviceMemorySample,
    DeviceSample,
    EngineSample,
    GpuSample,
    ModelSample,
    SequenceCounts,
    SwitchSample,
    implausible,
)
from tests.unit.processors.kit import NAMES, route
from tests.unit.processors.test_outcome_windows import result


def sample(incarnation: str = "w0-1", at_ms: int = 1_000, *models: ModelSample) -> DeviceSample:
    engine = EngineSample("sklearn", 7, 90, 1_500, 4, 1)
    return DeviceSample("w0", incarnation, "cpu:0", at_ms, 1_000, 2_500, 800, (engine,), models)


def model(batches: int, version: str = "1") -> ModelSample:
    return ModelSample("churn", version, 10, 2_000, batches=batches)


def answered(name: str, total_ms: float, status: str = "ok") -> Result:
    made = result(outputs={"score": 0.5})
    timings = structs.replace(made.timings_ms, total=total_ms)
    return structs.replace(made, model=name, status=status, timings_ms=timings, usage=Usage(3, 5))


def value(book: MetricsBook, name: str, *labels: str, now_ms: int = 1_000) -> float:
    [family] = [one for one in book.families(now_ms) if one.name == name]
    assert isinstance(family, Family)
    return dict(family.samples)[labels]


def names(book: MetricsBook, now_ms: int) -> list[tuple[str, ...]]:
    [family] = [one for one in book.families(now_ms) if one.name == "sie_device_up"]
    assert isinstance(family, Family)
    return [labels for labels, _ in family.samples]


def test_results_are_counted_by_status_and_answers_by_latency() -> None:
    book = MetricsBook()
    book.route("churn", route("churn"))
    for total in (4.0, 5.0, 700.0, 90_000.0):
        book.result(answered("churn", total))
    book.result(answered("churn", 1.0, status="failed"))
    assert value(book, "sie_requests", "churn", "ok") == 4
    assert value(book, "sie_requests", "churn", "failed") == 1
    assert (value(book, "sie_tokens", "churn", "prompt"), value(book, "sie_tokens", "churn", "completion")) == (12, 20)
    latency = book.families(0)[0]
    assert isinstance(latency, HistogramFamily)
    [(labels, buckets, total)] = latency.samples
    assert labels == ("churn", route("churn").service_type, f"P{route('churn').priority}")
    counts = dict(buckets)
    assert (counts["0.005"], counts["0.5"], counts["1.0"], counts["60.0"], counts["+Inf"]) == (2, 2, 3, 3, 4)
    assert total == pytest.approx(90.709)


def test_a_deleted_model_keeps_its_labels() -> None:
    book = MetricsBook()
    book.route("churn", route("churn"))
    book.route("churn", None)
    book.result(answered("churn", 4.0))
    latency = book.families(0)[0]
    assert latency.samples[0][0][1] == route("churn").service_type


def test_names_that_users_made_up_do_not_become_series_without_end() -> None:
    book = MetricsBook()
    for number in range(MODELS_MAX + 5):
        book.result(answered(f"m{number}", 1.0, status="rejected"))
    assert value(book, "sie_requests", "unknown", "rejected") == 5
    book.route("churn", route("churn"))
    book.result(answered("churn", 1.0))
    assert value(book, "sie_requests", "churn", "ok") == 1, "no made-up name takes the place of a declared model"


def test_counters_of_a_worker_grow_over_its_incarnations() -> None:
    book = MetricsBook()
    book.sample(sample("w0-1", 1_000, model(5), model(2, "2")))
    book.sample(sample("w0-1", 2_000, model(8)))  # version 2 had nothing new
    assert value(book, "sie_model_batches", "w0", "cpu:0", "churn") == 10
    book.sample(sample("w0-2", 3_000))
    assert value(book, "sie_model_batches", "w0", "cpu:0", "churn") == 10
    book.sample(sample("w0-2", 4_000, model(1)))
    assert value(book, "sie_model_batches", "w0", "cpu:0", "churn") == 11


def test_after_the_way_back_to_an_older_version_its_gauges_are_shown() -> None:
    book = MetricsBook()
    book.sample(sample("w0-1", 0, model(5), structs.replace(model(7, "2"), memory_bytes=20)))
    assert value(book, "sie_model_memory_bytes", "w0", "cpu:0", "churn") == 20
    book.sample(sample("w0-1", 1_000, structs.replace(model(5), memory_bytes=11)))
    assert value(book, "sie_model_memory_bytes", "w0", "cpu:0", "churn") == 11


def test_a_worker_that_is_silent_is_down_and_then_forgotten() -> None:
    book = MetricsBook()
    book.sample(sample(at_ms=1_000))
    assert value(book, "sie_device_up", "w0", "cpu:0", now_ms=1_000 + UP_MS) == 1
    assert value(book, "sie_device_up", "w0", "cpu:0", now_ms=1_001 + UP_MS) == 0
    assert names(book, 1_001 + FORGET_MS) == []


def test_a_model_that_left_its_device_keeps_its_counters_and_loses_its_gauges() -> None:
    book = MetricsBook()
    book.sample(sample("w0-1", 1_000, model(5)))
    book.sample(sample("w0-1", 1_000 + MODEL_GONE_MS))
    assert value(book, "sie_model_memory_bytes", "w0", "cpu:0", "churn") == 10
    book.sample(sample("w0-1", 1_001 + MODEL_GONE_MS))
    [memory] = [one for one in book.families(0) if one.name == "sie_model_memory_bytes"]
    assert memory.samples == ()
    assert value(book, "sie_model_batches", "w0", "cpu:0", "churn") == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 10**400},
        {"busy_bp": -1},
        {"at_ms": 1_000 + CLOCK_AHEAD_MS + 1},
        {"worker": "w\n# HELP sie_requests"},
        {"device": "x" * 1_000},
        {"engines": (EngineSample("sklearn", 7, 90, 1_500, 4, 1),) * 2},
        {"engines": (EngineSample("sklearn", 7, 90, 1_500, 4, 1, "trial"),) * 2},
        {"models": (structs.replace(model(1), busy_ms=2**53),)},
        {"models": (structs.replace(model(1), size_entropy_bits=float("nan")),)},
        {"models": (structs.replace(model(1), sequences=SequenceCounts(prompt_tokens=-1)),)},
        {"gpu": GpuSample(power_mw=2**60)},
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_true_is_told_and_not_counted(changes: dict[str, object]) -> None:
    host, log, events = hosted()
    true = sample("w0-1", log.clock.now_ms(), model(5))
    assert implausible(true, log.clock.now_ms()) == ""
    lie = structs.replace(
        true, **{**changes, **({"at_ms": log.clock.now_ms() + CLOCK_AHEAD_MS + 1} if "at_ms" in changes else {})}
    )
    assert implausible(lie, log.clock.now_ms())
    log.plain_writer().write([LogWrite(NAMES.telemetry, codec.encode_row(one), b"k") for one in (lie, lie, true)])
    host.turn()
    assert host.samples == 1
    assert host.implausible + host.undecodable == 2
    assert len(events) <= 1, "whoever floods the topic does not flood the log"


def test_made_up_devices_and_models_are_limited() -> None:
    book = MetricsBook()
    for number in range(DEVICES_MAX):
        assert book.sample(structs.replace(sample(), worker=str(number))) == ""
    assert book.sample(structs.replace(sample(), worker="one more")) != ""
    assert book.sample(structs.replace(sample(), worker="0")) == "", "those that are known go on"
    many = [structs.replace(model(1), model=str(number)) for number in range(DEVICE_MODELS_MAX + 1)]
    assert book.sample(structs.replace(sample("w0-1", 1_000, *many), worker="0")) != ""
    assert book.sample(structs.replace(sample("w0-1", 1_000, *many[1:]), worker="0")) == ""


def test_what_a_gpu_does_not_tell_is_no_series() -> None:
    book = MetricsBook()
    book.sample(structs.replace(sample(), gpu=GpuSample(utilisation_pct=40, nvlink_tx_kib=2)))
    assert value(book, "sie_gpu_utilisation_ratio", "w0", "cpu:0") == pytest.approx(0.4)
    assert value(book, "sie_gpu_nvlink_sent_bytes", "w0", "cpu:0") == 2_048
    [power] = [one for one in book.families(1_000) if one.name == "sie_gpu_power_watts"]
    assert power.samples == ()


def test_memory_of_devices_with_a_budget_and_switches_over_incarnations() -> None:
    book = MetricsBook()
    book.sample(sample())
    assert not [one for one in book.families(1_000) if one.name.startswith(("sie_switch", "sie_device_held"))]

    def held(incarnation: str, count: int) -> DeviceSample:
        switches = (SwitchSample("host", count, 100 * count, 2_000.0 * count, 9.0),)
        memory = DeviceMemorySample(800, 10, 500, 200, 40, 60, 900, 300, 70, switches=switches)
        return structs.replace(sample(incarnation), memory=memory)

    book.sample(held("w0-1", 3))
    book.sample(held("w0-1", 4))
    book.sample(held("w0-2", 1))
    uses = [value(book, "sie_device_held_bytes", "w0", "cpu:0", use) for use in ("weights", "kv", "workspace", "free")]
    assert (uses, sum(uses)) == ([500, 200, 40, 60], 800)
    assert value(book, "sie_image_bytes", "w0", "cpu:0", "disk") == 70
    assert value(book, "sie_switches", "w0", "cpu:0", "host") == 5
    assert value(book, "sie_switched_bytes", "w0", "cpu:0", "host") == 500
    assert value(book, "sie_switch_seconds", "w0", "cpu:0", "host") == 10


def test_kv_blocks_are_only_those_of_models_that_have_some() -> None:
    book = MetricsBook()
    book.sample(sample("w0-1", 1_000, model(1)))
    [blocks] = [one for one in book.families(1_000) if one.name == "sie_kv_blocks_used"]
    assert blocks.samples == ()
    counted = structs.replace(model(2), sequences=SequenceCounts(1, 0, 64, 9, 100, 60))
    book.sample(sample("w0-1", 2_000, counted))
    assert value(book, "sie_kv_blocks_used", "w0", "cpu:0", "churn") == 9
    assert value(book, "sie_reused_tokens", "w0", "cpu:0", "churn") == 60


def scraped(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return {
        one.name: {tuple(sorted(point.labels.items())): point.value for point in one.samples}
        for one in text_string_to_metric_families(text)
    }


def hosted() -> tuple[MetricsHost, SimLog, list[str]]:
    """A host that has started over empty topics, and the events that it tells."""
    log = SimLog()
    log.admin().ensure([TopicSpec(topic, 1, {}) for topic in (NAMES.results, NAMES.routes, NAMES.telemetry)])
    ports = Ports(
        make_reader=log.reader,
        make_latest_reader=log.latest_reader,
        make_group_reader=lambda group: log.group_reader(group, "m"),
        writer=log.transactional_writer("sie.m"),
        clock=log.clock,
        make_plain_writer=log.plain_writer,
    )
    events: list[str] = []

    class Heard(Silence):
        def event(self, name: str, **_facts: object) -> None:
            events.append(name)

    host = MetricsHost(Settings(), ports, lambda _families: None, Heard())
    host.start()
    return host, log, events


def test_prometheus_reads_what_the_host_added_up_from_the_topics() -> None:
    log = SimLog()
    log.admin().ensure([TopicSpec(topic, 1, {}) for topic in (NAMES.results, NAMES.routes, NAMES.telemetry)])
    writer = log.plain_writer()
    writer.write([LogWrite(NAMES.routes, codec.encode_row(route("churn")), b"churn")])
    writer.write([LogWrite(NAMES.results, codec.encode_result(answered("churn", 4.0)), b"before")])
    exporter = Exporter("127.0.0.1", 0)
    ports = Ports(
        make_reader=log.reader,
        make_latest_reader=log.latest_reader,
        make_group_reader=lambda group: log.group_reader(group, "m"),
        writer=log.transactional_writer("sie.m"),
        clock=log.clock,
        make_plain_writer=log.plain_writer,
    )
    host = MetricsHost(Settings(), ports, exporter.publish)
    try:
        host.start()
        writer.write([LogWrite(NAMES.results, codec.encode_result(answered("churn", 4.0)), b"k")] * 3)
        writer.write([LogWrite(NAMES.results, b"garbage", b"k")])
        now_ms = log.clock.now_ms()
        writer.write([LogWrite(NAMES.telemetry, codec.encode_row(sample("w0-1", now_ms, model(5))), b"w0:cpu:0")])
        for _ in range(15):
            host.turn()
            log.clock.advance(100)
        seen = scraped(exporter.port)
    finally:
        host.close()
        exporter.close()
    assert seen["sie_requests"][("model_id", "churn"), ("status", "ok")] == 3, "from the start of the process on"
    assert seen["sie_device_busy_ratio"][("device", "cpu:0"), ("worker", "w0")] == 0.25
    assert seen["sie_model_batches"][("device", "cpu:0"), ("model_id", "churn"), ("worker", "w0")] == 5
    assert (host.results, host.samples, host.undecodable) == (3, 1, 1)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do() -> None:
    exporter = Exporter("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{exporter.port}: .* Try another port"):
            Exporter("127.0.0.1", exporter.port)
    finally:
        exporter.close()
