"""Read terminal records without the SDK: a plain confluent-kafka consumer and the schema file.

python examples/plain_consumer.py localhost:9092 plain-json plain-avro
"""

import argparse
import io
import json
import sys
import time
from pathlib import Path

import fastavro
import fastavro.schema
from confluent_kafka import Consumer

ROOT = Path(__file__).parent.parent
BUDGET_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of Kafka; `sie-stream up` says it")
    parser.add_argument("request_ids", nargs="+", help="whose terminal records to wait for")
    options = parser.parse_args()
    bootstrap, wanted = options.bootstrap, set(options.request_ids)
    schema = fastavro.schema.load_schema(str(ROOT / "schemas" / "Result.avsc"))
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


if __name__ == "__main__":
    main()
