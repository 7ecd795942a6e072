"""Read terminal records without the SDK: a plain confluent-kafka consumer and the schema file.

python examples/plain_consumer.py localhost:9092 plain-json plain-avro

It runs from any folder: the schema file comes with the installed package.
"""

import argparse
import io
import json
import sys
import time
from importlib import resources

import fastavro
from confluent_kafka import Consumer
from fastavro.types import Schema

BUDGET_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of Kafka; `sie-stream up` says it")
    parser.add_argument("request_ids", nargs="+", help="whose terminal records to wait for")
    options = parser.parse_args()
    bootstrap, wanted = options.bootstrap, set(options.request_ids)
    schema = schema_of("Result")
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "plain-example",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["sie.results"])
    deadline = time.monotonic() + BUDGET_S
    while wanted and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None or message.error():
            continue
        # Confluent framing: a zero byte, four bytes of schema id, the Avro body.
        result = fastavro.schemaless_reader(io.BytesIO(message.value()[5:]), schema, None)
        if result["request_id"] in wanted:
            wanted.discard(result["request_id"])
            print(json.dumps({name: result[name] for name in ("request_id", "status", "model", "outputs")}))
    consumer.close()
    if wanted:
        sys.exit(f"no terminal record within {BUDGET_S} s for {', '.join(sorted(wanted))}")


def schema_of(name: str) -> Schema:
    """The schema as it is installed with sie-stream. Any copy of the file will do."""
    try:
        text = resources.files("schemas").joinpath(f"{name}.avsc").read_text()
    except (ModuleNotFoundError, FileNotFoundError):
        sys.exit(f"{name}.avsc is not here: it comes with sie-stream, which this Python ({sys.executable}) has not")
    return fastavro.parse_schema(json.loads(text))


if __name__ == "__main__":
    main()
