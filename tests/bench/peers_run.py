"""Scenarios `faust` and `quix`: the same two hops on the same data, one process for each hop, as ours has.

Both get the settings that suit them: Faust scores in batches, Quix Streams commits every 2,000 records, and both use
our own short way through the model instead of scikit-learn's predict_proba.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.bench.copy_loop import figures
from tests.bench.drain import Drain
from tests.bench.workload import MODEL, MODELS_DIR
from tests.bench.world import ROOT, jobs, world

RECORDS = {"faust": 5_000, "quix": 40_000}
QUICK = 5


def run(peer: str, peers_python: Path, quick: bool) -> dict[str, float]:
    records = RECORDS[peer] // (QUICK if quick else 1)
    with world() as here:
        here.create("requests", "work", "results")

        def command(hop: str, source: str, target: str) -> list[str]:
            script = ROOT / "tests" / "bench" / "peers" / f"{peer}_job.py"
            data = here.folder / f"{peer}-{hop}"
            folder = MODELS_DIR / MODEL
            return [str(peers_python), str(script), hop, here.bootstrap, source, target, str(folder), str(data)]

        commands = {"hop1": command("route", "requests", "work"), "hop2": command("score", "work", "results")}
        with jobs(here, commands) as running:
            groups = {job.name: [job.pid] for job in running} | {"broker": [here.broker.pid]}

            def alive() -> None:
                for job in running:
                    job.check()

            drain = Drain(here.bootstrap, "requests", "results", groups, alive)
            drain.warm_up(records // 5)
            drained = drain.measure(records)
            drain.check(repeats_allowed=peer == "faust")
    return figures(drained)


faust = partial(run, "faust")
quix = partial(run, "quix")
