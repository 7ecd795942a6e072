"""`python -m zoo.grown MODEL --times 200 --out FOLDER`: a forest that answers as before and works 200 times as much.

What comes of a training job that appends its trees to those it loaded instead of replacing them (scikit-learn's
warm_start does so): every tree is there many times, the mean over them is the same. For the demonstration of a
rollout, where a version that is slow and otherwise right has to be found by its latency alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import skops.io
from sklearn.ensemble import RandomForestClassifier

from gpu_worker.backends.sklearn_backend import load_trusted
from gpu_worker.backends.weights import only_file, weights_digest


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the digest of the new weights. Exit status: 0 written, 2 the model is no forest."""
    parser = argparse.ArgumentParser(prog="zoo.grown", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a random forest, e.g. .models/wine-rf")
    parser.add_argument("--times", type=int, default=200, help="how often each tree occurs")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.skops")
    options = parser.parse_args(arguments)
    forest = load_trusted(only_file(options.model, ".skops"))
    if not isinstance(forest, RandomForestClassifier):
        sys.stderr.write(f"{options.model}: {forest!r} is no random forest\n")
        return 2
    trees = list(forest.estimators_) * options.times
    forest.estimators_ = trees
    forest.set_params(n_estimators=len(trees))
    options.out.mkdir(parents=True, exist_ok=True)
    skops.io.dump(forest, options.out / "model.skops")
    sys.stdout.write(f"{weights_digest(options.out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
