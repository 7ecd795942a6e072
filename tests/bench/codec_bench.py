"""Microseconds per record of the codecs, beside fastavro: `python -m tests.bench.codec_bench`.

Each number is the best of many short runs, so that other processes on the machine disturb it little.
"""

from __future__ import annotations

import io
import json
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import fastavro
from msgspec import Raw, Struct

from schemas import codec, reference
from schemas.catalog import CURRENT
from schemas.codec import ReplicaResults
from schemas.wire import HEADER_BYTES
from sie_stream.records import InferenceRequest, Provenance, Result, Timings, Usage, WorkItem

RUNS, CALLS = 150, 300
INPUTS = json.dumps({"features": [round(0.37 * number, 2) for number in range(24)]}).encode()
WORK = WorkItem(
    *(
        "0123456789abcdef01234567",
        "mi-0123456789ab",
        "credit-risk-eu",
        "1.0.0",
        "stable",
        3,
        1,
        INPUTS,
        b"customer-1234",
    ),
    *("sie.requests", 2, 1_234_567, 1_790_000_000_000, 1_790_000_000_001, 1_790_000_000_002),
)
REQUEST = InferenceRequest(model=WORK.model, inputs=Raw(INPUTS), request_id=WORK.request_id)
PLACED = {
    "placement_epoch": 999,
    "work_topic": "sie.work.credit-risk-eu",
    "worker": "w0",
    "incarnation": "0123456789ab",
    "device": "cpu:0",
    "weights_digest": "blake2:0123456789abcdef",
    "engine": "sklearn (scikit-learn 1.9.1)",
}
OUTPUTS = b'{"score":0.873456,"label":"good"}'
TIMINGS = (1.5, 0.1, 0.2, 0.0, 0.1, 3.3)
FINISHED_AT = 1_790_000_000_100
REPLICA = ReplicaResults(version=WORK.version, **PLACED)


def result() -> Result:
    return Result(
        *(WORK.request_id, "ok", WORK.instance, WORK.model, WORK.version, WORK.variant, OUTPUTS, None, Usage()),
        Timings(*TIMINGS),
        Provenance(
            WORK.source_topic,
            WORK.source_partition,
            WORK.source_offset,
            work_partition=4,
            work_offset=123_456,
            route_epoch=WORK.route_epoch,
            batch_size=64,
            **PLACED,
        ),
        FINISHED_AT,
    )


def encode_ok() -> bytes:
    return REPLICA.encode_ok(
        WORK,
        OUTPUTS,
        timings_ms=TIMINGS,
        finished_at=FINISHED_AT,
        batch_size=64,
        work_partition=4,
        work_offset=123_456,
    )


def microseconds(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def show(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    fast, slow = microseconds(ours), microseconds(theirs)
    print(f"{name:<28} {fast:8.2f} {slow:10.2f} {slow / fast:8.1f}x")


def fastavro_calls(record: Struct, name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Bare fastavro between dicts and bytes, without making the struct, which flatters it."""
    schema = reference.released_schema(CURRENT[name].id)
    fields = reference.datum(record)
    body = reference.encode(record, name)[HEADER_BYTES:]

    def write() -> None:
        fastavro.schemaless_writer(io.BytesIO(), schema, fields)

    def read() -> object:
        return fastavro.schemaless_reader(io.BytesIO(body), schema, None)

    return write, read


def show_both(record: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes | None], object]) -> None:
    name = type(record).__name__
    value = encode(record)
    write, read = fastavro_calls(record, name)
    show(f"encode {name}", partial(encode, record), write)
    show(f"decode {name}", partial(decode, value), read)


def main() -> None:
    done = result()
    assert encode_ok() == codec.encode_result(done)
    print(f"{'us per record':<28} {'ours':>8} {'fastavro':>10} {'':>9}")
    show_both(REQUEST, codec.encode_request, codec.decode_request)
    show_both(WORK, codec.encode_work, codec.decode_work)
    show_both(done, codec.encode_result, codec.decode_result)
    write, _ = fastavro_calls(done, "Result")
    show("ReplicaResults.encode_ok", encode_ok, write)


if __name__ == "__main__":
    main()
