"""How many microseconds ingress spends per record: the pure machine, no Kafka.

`python -m tests.bench.ingress_bench [--profile]`: 200-byte JSON requests of a scikit-learn model with 13 features, in
batches as one turn takes them. Processor time, best of several rounds: what the code costs, not what neighbours do.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Sequence

from msgspec import Raw

from processors.ingress.decode import Limits, check_fields, decode_request, remembered_id
from processors.ingress.events import CommitBatch, GroupBatch, RecordsPolled, RoutesChanged
from processors.ingress.machine import IngressMachine
from processors.tokenise import TextEncoder
from schemas import codec
from sie_stream.control import RouteRow, VariantRow
from sie_stream.dedupe import DedupeWindow
from sie_stream.records import REQUEST_ID_HEADER, LogRecord
from sie_stream.settings import Settings

FEATURES = 13
BATCH = 1_000
BATCHES = 60
ROUNDS = 5
NOW_MS = 1_700_000_000_000


class NoEncoders:
    def get(self, path: str, digest: str = "") -> TextEncoder:
        raise AssertionError("the bench has no text models")


def route(model: str, width: int = 1) -> RouteRow:
    names = [f"f{number}" for number in range(FEATURES)]
    schema = {
        "properties": {name: {"type": "number", "minimum": -1e6, "maximum": 1e6} for name in names},
        "required": names,
    }
    variants = (VariantRow("stable", "1.0.0", 10_000),)
    return RouteRow(
        f"mi-{model}", model, 7, f"sie.work.{model}", 3, width, variants, "classification", 1,
        Raw(json.dumps(schema).encode()), "", "", 0,
    )  # fmt: skip


def records(number: int, model: str, in_header: bool) -> list[LogRecord]:
    made = []
    for offset in range(number * BATCH, (number + 1) * BATCH):
        request_id = f"req-{offset:012d}"
        inputs = {f"f{feature}": round(offset % 97 * 0.37 + feature, 2) for feature in range(FEATURES)}
        body = {"model": model, "request_id": request_id, "inputs": inputs}
        value = json.dumps(body, separators=(",", ":")).encode()
        headers = ((REQUEST_ID_HEADER, request_id.encode()),) if in_header else ()
        made.append(LogRecord("sie.requests", 0, offset, NOW_MS, request_id.encode(), value, headers))
    return made


def machine(width: int = 1) -> IngressMachine:
    made = IngressMachine(Settings(), NoEncoders(), lambda topic: True)
    made.decide([RoutesChanged((("wine", route("wine", width)),))])
    return made


def whole(batches: Sequence[list[LogRecord]], width: int) -> Callable[[], None]:
    ingress = machine(width)

    def run() -> None:
        ingress.window = DedupeWindow(600_000, 2_000_000)
        for number, batch in enumerate(batches):
            (command,) = ingress.decide([RecordsPolled((GroupBatch("g", batch),), NOW_MS + number)])
            assert isinstance(command, CommitBatch)
            assert len(command.writes) == BATCH

    return run


def steps(batches: Sequence[list[LogRecord]]) -> dict[str, Callable[[], None]]:
    """Each step of the hot path alone."""
    flat = [record for batch in batches for record in batch]
    limits = Limits(262_144, 64)
    requests = [decode_request(record, limits)[0] for record in flat]
    inputs = [bytes(request.inputs) for request in requests]
    ingress = machine()
    compiled = ingress.routes.by_model("wine")
    assert compiled is not None
    (command,) = ingress.decide([RecordsPolled((GroupBatch("g", flat),), NOW_MS)])
    assert isinstance(command, CommitBatch)
    items = [codec.decode_work(write.value) for write in command.writes]

    def decode() -> None:
        for record in flat:
            decode_request(record, limits)

    def fields() -> None:
        for request in requests:
            check_fields(request, limits)

    def dedupe() -> None:
        window = DedupeWindow(600_000, 2_000_000)
        for request in requests:
            window.seen(request.request_id, NOW_MS)

    def validate() -> None:
        for raw in inputs:
            compiled.check(raw)

    def encode() -> None:
        for item in items:
            codec.encode_work(item)

    def read_back() -> None:
        window = DedupeWindow(600_000, 2_000_000)
        window.remember([(remembered_id(record, None), NOW_MS) for record in flat])

    return {"decode": decode, "check_fields": fields, "dedupe": dedupe, "input_schema": validate,
            "encode_work": encode, "rebuild window": read_back}  # fmt: skip


def best_us(run: Callable[[], None], count: int) -> float:
    """Fastest of several rounds, per record: what the code costs, not what the neighbours do."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time_ns()
        run()
        best = min(best, (time.process_time_ns() - started) / 1000 / count)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    asked = parser.parse_args()
    body = [records(number, "wine", False) for number in range(BATCHES)]
    header = [records(number, "wine", True) for number in range(BATCHES)]
    count = BATCH * BATCHES
    print(f"request of {len(body[0][0].value or b'')} bytes, {FEATURES} features, batches of {BATCH}")
    if asked.profile:
        with cProfile.Profile() as profile:
            whole(body, 1)()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    for name, run in steps(body).items():
        print(f"{name:40s} {best_us(run, count):6.2f} us")
    print(f"{'rebuild window, id in header':40s} {best_us(steps(header)['rebuild window'], count):6.2f} us")
    print(f"{'whole, id in body':40s} {best_us(whole(body, 1), count):6.2f} us")
    print(f"{'whole, id in body and header':40s} {best_us(whole(header, 1), count):6.2f} us")
    print(f"{'whole, width 4':40s} {best_us(whole(body, 4), count):6.2f} us")


if __name__ == "__main__":
    main()
