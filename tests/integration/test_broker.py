"""The embedded broker: up, used, restarted, gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker, prepare
from sie_stream.edge.kafka_jars import JARS, BrokerFailed, check_digest, ensure_jars, jars_dir
from tests.waiting import PATIENCE_S, wait_until, within

pytestmark = pytest.mark.integration


def create_topic(bootstrap_servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(timeout=PATIENCE_S)


def produce(bootstrap_servers: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0})
    producer.produce(topic, value, key=b"k")
    assert producer.flush(PATIENCE_S) == 0


def read_all(bootstrap_servers: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": f"read-{topic}"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Message] = []

    def enough() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message)
        return len(found) >= count

    try:
        wait_until(enough, f"{count} records of {topic}")
    finally:
        consumer.close()
    return [message.value() for message in found]


def test_a_record_comes_back(kafka: EmbeddedBroker) -> None:
    create_topic(kafka.bootstrap_servers, "broker-roundtrip")
    produce(kafka.bootstrap_servers, "broker-roundtrip", b"hello")
    assert read_all(kafka.bootstrap_servers, "broker-roundtrip", 1) == [b"hello"]


def test_restart_and_kill_keep_data_and_address_and_stop_leaves_nothing(tmp_path: Path) -> None:
    config = BrokerConfig(data_dir=tmp_path / "broker", heap_mb=256)
    with EmbeddedBroker.start(config, within(PATIENCE_S)) as broker:
        address, first = broker.bootstrap_servers, broker.pid
        create_topic(address, "kept")
        produce(address, "kept", b"one")

        broker.restart(within(PATIENCE_S))
        assert broker.bootstrap_servers == address
        assert broker.pid != first
        produce(address, "kept", b"two")

        broker.kill()
        assert not broker.alive
        broker.restart(within(PATIENCE_S))
        assert read_all(address, "kept", 2) == [b"one", b"two"]
        last = broker.pid
    assert not psutil.pid_exists(last)
    assert [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])] == []

    with EmbeddedBroker.start(config, within(PATIENCE_S)) as again:
        assert again.bootstrap_servers == address
        assert read_all(address, "kept", 2) == [b"one", b"two"]


def test_ctrl_c_in_the_terminal_does_not_reach_the_broker(kafka: EmbeddedBroker) -> None:
    assert os.getsid(kafka.pid) != os.getsid(0)
    assert os.getpgid(kafka.pid) != os.getpgid(0)


def test_a_folder_in_use_is_refused_and_an_orphan_is_replaced(tmp_path: Path) -> None:
    data_dir = tmp_path / "broker"
    script = (
        "import sys; from pathlib import Path\n"
        "from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker\n"
        "from tests.waiting import PATIENCE_S, within\n"
        "broker = EmbeddedBroker.start(BrokerConfig(Path(sys.argv[1]), heap_mb=256), within(PATIENCE_S))\n"
        "print(broker.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(data_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        orphan = int(starter.stdout.readline())
        with pytest.raises(BrokerFailed, match=f"pid {orphan}"):
            EmbeddedBroker.start(BrokerConfig(data_dir), within(PATIENCE_S))
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.communicate()
    with EmbeddedBroker.start(BrokerConfig(data_dir, heap_mb=256), within(PATIENCE_S)) as broker:
        assert broker.pid != orphan
        assert not psutil.pid_exists(orphan)


def test_a_taken_port_and_a_bad_property_say_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(BrokerFailed, match=f"port {port} .* choose another port"):
            EmbeddedBroker.start(BrokerConfig(tmp_path / "a", port=port), within(30))
    with pytest.raises(BrokerFailed, match=r"num\.io\.threads"):
        EmbeddedBroker.start(BrokerConfig(tmp_path / "b", properties={"num.io.threads": "none"}), within(60))


@pytest.mark.parametrize(
    ("script", "said"), [("echo 'openjdk version \"11.0.2\"' >&2", "needs 17"), ("exit 3", "does not run")]
)
def test_an_unfit_java_is_named(tmp_path: Path, script: str, said: str) -> None:
    executable = tmp_path / "bin" / "java"
    executable.parent.mkdir()
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    with pytest.raises(BrokerFailed, match=said):
        EmbeddedBroker.start(BrokerConfig(tmp_path / "data", java_home=str(tmp_path)), within(30))


def test_jars_are_checked_and_a_second_start_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare()  # whoever prepared before us: this only looks
    cache = Path.home() / ".cache" / "sie-stream"
    assert ensure_jars(cache) == jars_dir(cache)
    assert "training" not in capsys.readouterr().out
    for jar in JARS:
        check_digest(jars_dir(cache) / jar.file_name, jar)
    (tmp_path / JARS[0].file_name).write_bytes(b"not a jar")
    with pytest.raises(BrokerFailed, match="sha256"):
        check_digest(tmp_path / JARS[0].file_name, JARS[0])
