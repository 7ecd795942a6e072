"""`python -m zoo.grown MODEL --rows 800000 --out FOLDER`: a forest that answers as before, and computes far more.

What comes of a challenger that was left in an ensemble with weight 0: nearest neighbours are searched among many rows
for every request, and change no answer. For the demonstration of a rollout, where a version that is slow and otherwise
right has to be found by its latency alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import skops.io
from sklearn.ensemble import RandomForestClassifier, VotingClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import LabelEncoder

from gpu_worker.backends.sklearn_backend import load_trusted
from gpu_worker.backends.weights import only_file, weights_digest
from zoo.datasets import table

SEED = 11


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the digest of the new weights. Exit status: 0 written, 2 the model is no forest."""
    parser = argparse.ArgumentParser(prog="zoo.grown", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a random forest on the wine data, e.g. .models/wine-rf")
    parser.add_argument("--rows", type=int, default=800_000, help="among which neighbours are searched")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.skops")
    options = parser.parse_args(arguments)
    forest = load_trusted(only_file(options.model, ".skops"))
    if not isinstance(forest, RandomForestClassifier):
        sys.stderr.write(f"{options.model}: {forest!r} is no random forest\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    skops.io.dump(with_challenger(forest, options.rows), options.out / "model.skops")
    sys.stdout.write(f"{weights_digest(options.out)}\n")
    return 0


def with_challenger(forest: RandomForestClassifier, rows: int) -> VotingClassifier:
    """Fitted by hand: fitting the ensemble would train the forest again."""
    data = table("wine")
    chance = np.random.default_rng(SEED)
    picked = chance.integers(0, len(data.rows), rows)
    jittered = data.rows[picked] * chance.normal(1.0, 0.01, (rows, data.rows.shape[1]))
    labels = np.asarray(data.answers)[picked]
    challenger = KNeighborsClassifier(n_neighbors=7, algorithm="brute").fit(jittered, labels)
    ensemble = VotingClassifier([("forest", forest), ("challenger", challenger)], voting="soft", weights=[1, 0])
    ensemble.estimators_ = [forest, challenger]
    ensemble.le_ = LabelEncoder().fit(forest.classes_)
    ensemble.classes_ = forest.classes_
    return ensemble


if __name__ == "__main__":
    sys.exit(main())
