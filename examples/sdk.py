"""The SDK: one request, many requests, and the same with asyncio.

python examples/sdk.py wine-logreg
"""

import asyncio
import json
import sys
from pathlib import Path

from sie_stream import AsyncClient, Client, Request

ROOT = Path(__file__).parent.parent


def main() -> None:
    model = sys.argv[1]
    rows = [json.loads(line) for line in (ROOT / ".models" / model / "samples.jsonl").read_text().splitlines()]
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
