"""One hop of the job in Faust, at least once. `faust_job.py HOP BOOTSTRAP SOURCE TARGET MODEL_FOLDER DATA_FOLDER`"""

from __future__ import annotations

import sys

import faust

from tests.bench.peers.scoring import Scorer, route

BATCH_MAX = 256
PARTITIONS = 4


def make(hop: str, bootstrap: str, source: str, target: str, folder: str, data: str) -> faust.App:
    app = faust.App(
        f"bench-{hop}",
        broker=f"kafka://{bootstrap}",
        value_serializer="raw",
        key_serializer="raw",
        store="memory://",
        datadir=data,
        topic_partitions=PARTITIONS,
        topic_disable_leader=True,
        web_enabled=False,
        broker_max_poll_records=2_000,
        stream_buffer_maxsize=8_192,
        broker_commit_interval=1.0,
    )
    incoming = app.topic(source, value_type=bytes, key_type=bytes)
    outgoing = app.topic(target, value_type=bytes, key_type=bytes)

    if hop == "route":

        @app.agent(incoming)
        async def routes(stream):
            async for event in stream.events():
                await outgoing.send(key=event.key, value=route(event.value))

    else:
        scorer = Scorer(folder)

        @app.agent(incoming)
        async def scores(stream):
            # In batches, which is Faust's quick way and lets the model run vectorised.
            async for events in stream.take_events(BATCH_MAX, within=0.02):
                for event, result in zip(events, scorer.score([event.value for event in events]), strict=True):
                    await outgoing.send(key=event.key, value=result)

    return app


if __name__ == "__main__":
    job = make(*sys.argv[1:])
    sys.argv = ["faust", "worker", "--loglevel", "warn", "--without-web"]
    job.main()
