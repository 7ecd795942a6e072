"""Ask a model without the SDK: any Kafka producer will do. One request as JSON, one as Avro in Confluent framing.

python examples/plain_producer.py localhost:9092 wine-logreg
python plain_producer.py localhost:9092 my-model '{"age": 41}'

It runs from any folder. The schema file comes with the installed package; without a row, the first sample of the model
that `make models` made is sent.
"""

import argparse
import io
import json
import os
import struct
import sys
from importlib import resources
from pathlib import Path

import fastavro
from confluent_kafka import Producer
from fastavro.types import Schema

INFERENCE_REQUEST_V1 = 1
"""Schema id of the first release of InferenceRequest (schemas/README.md). An id stands for one release, so its own file
is written with, not the newest."""
BESIDE_THIS_FILE = Path(__file__).resolve().parent.parent / ".models"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of Kafka; `sie-stream up` says it")
    parser.add_argument("model", help="one that is declared")
    parser.add_argument("row", nargs="?", help="its inputs as a JSON object; else a sample of a model of `make models`")
    options = parser.parse_args()
    model, row = options.model, row_of(parser, options.model, options.row)
    producer = Producer({"bootstrap.servers": options.bootstrap, "enable.idempotence": True})

    as_json = {"request_id": "plain-json", "model": model, "inputs": row}
    producer.produce("sie.requests", key="plain-json", value=json.dumps(as_json))

    body = io.BytesIO()
    as_avro = {"request_id": "plain-avro", "model": model, "inputs": json.dumps(row)}
    fastavro.schemaless_writer(body, schema_of("InferenceRequest/v1"), as_avro)
    framed = struct.pack(">bI", 0, INFERENCE_REQUEST_V1) + body.getvalue()
    producer.produce("sie.requests", key="plain-avro", value=framed)

    if producer.flush(10):
        sys.exit("not delivered within 10 s")
    print("sent plain-json and plain-avro")


def row_of(parser: argparse.ArgumentParser, model: str, given: str | None) -> dict[str, object]:
    text = sample_of(parser, model) if given is None else given
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        parser.error(f"row: not JSON: {error}")
    if not isinstance(row, dict):
        parser.error("row: expected a JSON object with the inputs")
    return row


def sample_of(parser: argparse.ArgumentParser, model: str) -> str:
    asked = os.environ.get("SIE_STREAM_MODELS_DIR")
    folders = [Path(asked)] if asked else [Path(".models"), BESIDE_THIS_FILE]
    samples = next((found for folder in folders if (found := folder / model / "samples.jsonl").exists()), None)
    if samples is None:
        known = sorted({found.parent.name for folder in folders for found in folder.glob("*/samples.jsonl")})
        looked = " or ".join(str(folder.absolute()) for folder in folders)
        parser.error(
            f"model {model!r} has no sample in {looked}; allowed: {', '.join(known) or 'none yet, run `make models`'}. "
            "Or give a row, or the folder of models as SIE_STREAM_MODELS_DIR"
        )
    return samples.read_text().splitlines()[0]


def schema_of(name: str) -> Schema:
    """A released schema as it is installed with sie-stream. Any copy of the file will do."""
    try:
        text = resources.files("schemas").joinpath("released", f"{name}.avsc").read_text()
    except (ModuleNotFoundError, FileNotFoundError):
        sys.exit(f"{name}.avsc is not here: it comes with sie-stream, which this Python ({sys.executable}) has not")
    return fastavro.parse_schema(json.loads(text))


if __name__ == "__main__":
    main()
