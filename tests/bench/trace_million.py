"""How long `trace` and `audit verify` take on many records of real Kafka. Run by hand: it fills a broker of its own.

python -m tests.bench.trace_million FOLDER fill 1000000
python -m tests.bench.trace_million FOLDER trace
python -m tests.bench.trace_million FOLDER verify
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from schemas.codec import encode_cluster, encode_decision, encode_result, encode_work
from sie_stream.control import Device, WorkerJoined
from sie_stream.decisions import Decision, Move
from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from sie_stream.edge.kafka_log import KafkaPlainWriter
from sie_stream.ids import TopicNames
from sie_stream.records import LogWrite, Provenance, Result, Timings, Usage, WorkItem
from sie_stream.settings import Settings
from tests.waiting import within
from topics.catalog import system_topics, work_topic
from topics.edge.admin import KafkaAdmin

MODEL, WORKER, INCARNATION = "wine", "worker-0", "worker-0-1"
NAMES = TopicNames()
PARTITIONS = 4
CHUNK = 20_000
BATCH = 32
INPUTS = b'{"alcohol": 13.2, "malic_acid": 1.78, "ash": 2.14, "magnesium": 100, "color_intensity": 4.38, "hue": 1.05}'
OUTPUTS = (
    b'{"label": "grower_0", "score": 0.99, "probabilities": {"grower_0": 0.99, "grower_1": 0.01, "grower_2": 0.0}}'
)


def request_id(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}"


def records(number: int, now_ms: int) -> list[LogWrite]:
    """Request, work item and result of one request: in each topic record `number // PARTITIONS` of one partition."""
    name, partition, offset = request_id(number), number % PARTITIONS, number // PARTITIONS
    key = name.encode()
    request = b'{"request_id":"%s","model":"%s","inputs":%s}' % (key, MODEL.encode(), INPUTS)
    work = WorkItem(
        *(name, "mi-1", MODEL, "1.0.0", "stable", 1, partition % 3, INPUTS, key, NAMES.requests, partition, offset),
        *(now_ms, now_ms + 1, now_ms + 1),
    )
    provenance = Provenance(
        *(NAMES.requests, partition, offset, NAMES.work(MODEL), partition, offset, 1, 1, WORKER, INCARNATION, "cpu:0"),
        *("sha256:0", "sklearn", None, BATCH, 0),
    )
    engine_ms = 1.0 + (number // BATCH) % 99_991 / 1e4
    timings = Timings(5.0 if number % 97 else 60.0, 0.1, engine_ms, 0.0, 0.0, 8.0 if number % 97 else 63.0)
    result = Result(
        name, "ok", "mi-1", MODEL, "1.0.0", "stable", OUTPUTS, None, Usage(), timings, provenance, now_ms + 8
    )
    return [
        LogWrite(NAMES.requests, request, key, partition),
        LogWrite(NAMES.work(MODEL), encode_work(work), key, partition),
        LogWrite(NAMES.results, encode_result(result), key, partition),
    ]


def fill(broker: EmbeddedBroker, count: int) -> None:
    settings = Settings(requests_partitions=PARTITIONS)
    admin = KafkaAdmin(broker.bootstrap_servers)
    admin.ensure([*system_topics(settings), work_topic(settings, MODEL, 2)])
    writer = KafkaPlainWriter(broker.bootstrap_servers)
    joined = WorkerJoined(WORKER, INCARNATION, "host", 1, (Device("cpu:0", "cpu", 1 << 30),), ("sklearn",), {})
    writer.write([LogWrite(NAMES.cluster, encode_cluster(joined))] * 2)
    now_ms = round(time.time() * 1_000)
    told = (
        Decision("d-0-0", "worker_joined", WORKER, "It is up.", 0, now_ms, {"incarnation": INCARNATION}),
        Decision(
            *("d-1-0", "replica_placed", MODEL, "1 wanted.", 1, now_ms, {}),
            moves=(Move(MODEL, "replica", "", f"{WORKER}/cpu:0"),),
        ),
    )
    writer.write([LogWrite(NAMES.decisions, encode_decision(one)) for one in told])
    begun = time.monotonic()
    for start in range(0, count, CHUNK):
        now_ms = round(time.time() * 1_000)
        for number in range(start, min(count, start + CHUNK)):
            writer.write(records(number, now_ms))
        writer.flush(60_000)
        say(f"{start + CHUNK} requests after {time.monotonic() - begun:.0f} s")
    writer.close()


def command(broker: EmbeddedBroker, folder: Path, *arguments: str) -> None:
    """Runs the command line and says how long it took; the last lines of what it printed."""
    env = {**os.environ, "SIE_STREAM_STATE_DIR": str(folder / "state")}
    begun, used = time.monotonic(), _cpu_s()
    line = [sys.executable, "-m", "sie_stream.cli.main", *arguments, "-b", broker.bootstrap_servers]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    took, cpu = time.monotonic() - begun, _cpu_s() - used
    say(f"{' '.join(arguments)}: {took:.2f} s, of it {cpu:.2f} s CPU, exit {done.returncode}")
    say("\n".join((done.stdout + done.stderr).splitlines()[-16:]))


def _cpu_s() -> float:
    """CPU of the commands so far: on a machine that others use too, what a quiet one would take at least."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(folder: Path, what: str, count: int = 1_000_000) -> None:
    with EmbeddedBroker.start(BrokerConfig(data_dir=folder / "kafka"), within(120)) as broker:
        if what == "fill":
            fill(broker, count)
        elif what == "verify":
            command(broker, folder, "audit", "verify")
        else:
            for number in (count // 2, 7, count - 9):
                command(broker, folder, "trace", request_id(number))
            command(broker, folder, "trace", "--slow", "--model", MODEL, "--since", "1d")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
