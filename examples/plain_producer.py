"""Ask a model without the SDK: any Kafka producer will do. One request as JSON, one as Avro in Confluent framing.

python examples/plain_producer.py localhost:9092 wine-logreg
"""

import argparse
import io
import json
import struct
import sys
from pathlib import Path

import fastavro
import fastavro.schema
from confluent_kafka import Producer

ROOT = Path(__file__).parent.parent
MODELS = ROOT / ".models"
INFERENCE_REQUEST_V1 = 1
"""Schema id of the first release of InferenceRequest (schemas/README.md)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of Kafka; `sie-stream up` says it")
    parser.add_argument("model", help="one that is declared, and that `make models` made")
    options = parser.parse_args()
    model, samples = options.model, MODELS / options.model / "samples.jsonl"
    if not samples.exists():
        known = ", ".join(sorted(found.parent.name for found in MODELS.glob("*/samples.jsonl")))
        parser.error(f"model {model!r} has no {samples}; allowed: {known or 'none yet, run `make models`'}")
    row = json.loads(samples.read_text().splitlines()[0])
    producer = Producer({"bootstrap.servers": options.bootstrap, "enable.idempotence": True})

    as_json = {"request_id": "plain-json", "model": model, "inputs": row}
    producer.produce("sie.requests", key="plain-json", value=json.dumps(as_json))

    schema = fastavro.schema.load_schema(str(ROOT / "schemas" / "InferenceRequest.avsc"))
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema, {"request_id": "plain-avro", "model": model, "inputs": json.dumps(row)})
    framed = struct.pack(">bI", 0, INFERENCE_REQUEST_V1) + body.getvalue()
    producer.produce("sie.requests", key="plain-avro", value=framed)

    if producer.flush(10):
        sys.exit("not delivered within 10 s")
    print("sent plain-json and plain-avro")


if __name__ == "__main__":
    main()
