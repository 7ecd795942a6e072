"""One hop of the job in Quix Streams, exactly once.

`quix_job.py HOP BOOTSTRAP SOURCE TARGET MODEL_FOLDER DATA_FOLDER`
"""

from __future__ import annotations

import sys

from quixstreams import Application

from tests.bench.peers.scoring import Scorer, route

COMMIT_EVERY = 2_000


def main(hop: str, bootstrap: str, source: str, target: str, folder: str, data: str) -> None:
    app = Application(
        broker_address=bootstrap,
        consumer_group=f"bench-{hop}",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_every=COMMIT_EVERY,
        commit_interval=0.2,
        state_dir=data,
        loglevel="WARNING",
        auto_create_topics=False,
        consumer_extra_config={"fetch.queue.backoff.ms": 5, "fetch.wait.max.ms": 50},
        producer_extra_config={"compression.type": "lz4", "linger.ms": 5, "retry.backoff.ms": 5},
    )
    incoming = app.topic(source, value_deserializer="bytes", key_deserializer="bytes")
    outgoing = app.topic(target, value_serializer="bytes", key_serializer="bytes")
    stream = app.dataframe(incoming)
    stream = stream.apply(route if hop == "route" else Scorer(folder).score_one)
    stream.to_topic(outgoing)
    app.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
