"""The SDK: one request, many requests, and the same with asyncio.

python examples/sdk.py wine-logreg

Rows are those of a model that `make models` made: in .models here or beside the examples, or in SIE_STREAM_MODELS_DIR.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from sie_stream import AsyncClient, Client, Request
from sie_stream.errors import SieError

BESIDE_THIS_FILE = Path(__file__).resolve().parent.parent / ".models"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="one that is declared, and that `make models` made")
    model = parser.parse_args().model
    asked = os.environ.get("SIE_STREAM_MODELS_DIR")
    folders = [Path(asked)] if asked else [Path(".models"), BESIDE_THIS_FILE]
    samples = next((found for folder in folders if (found := folder / model / "samples.jsonl").exists()), None)
    if samples is None:
        known = sorted({found.parent.name for folder in folders for found in folder.glob("*/samples.jsonl")})
        looked = " or ".join(str(folder.absolute()) for folder in folders)
        parser.error(
            f"model {model!r} has no sample in {looked}; allowed: {', '.join(known) or 'none yet, run `make models`'}"
        )
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    try:
        ask(model, rows)
    except SieError as error:
        sys.exit(f"error: {error}")


def ask(model: str, rows: list[dict[str, float]]) -> None:
    with Client() as client:
        result = client.score(model, rows[0])
        print("one:", result.outputs)

        submissions = client.submit_many(Request(model=model, inputs=row, priority="P0") for row in rows[:20])
        answers = [submission.result(timeout_s=30) for submission in submissions]
        print("many:", len(answers), "answers,", sum(answer.ok for answer in answers), "ok")

    asyncio.run(ask_later(model, rows[1]))


async def ask_later(model: str, row: dict[str, float]) -> None:
    async with AsyncClient() as client:
        result = await client.score(model, row, deadline_ms=10_000)
        print("async:", result.status, f"{result.timings_ms.total:.1f} ms from request to answer")


if __name__ == "__main__":
    main()
