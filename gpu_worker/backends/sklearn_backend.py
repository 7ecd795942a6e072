"""scikit-learn models from skops files.

skops stores arrays and constructor state instead of code. Even so a file may name any class, so only the types below
are ever built: what skops itself trusts (estimators of scikit-learn, NumPy dtypes), and by full name the few helpers
that fitted estimators hold. A file with anything else is refused before any of its content is loaded.
"""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from gpu_worker.backends.absent import absent
from gpu_worker.backends.base import LoadedModel, ModelRefused
from gpu_worker.backends.sklearn_shortcuts import shortcut
from gpu_worker.backends.tabular import Kind, Predict, TabularModel, tabular_config
from gpu_worker.backends.weights import local_source, only_file, verified_digest
from sie_stream.control import ModelLaunch
from sie_stream.ports import Clock

# To list what it trusts, skops imports every module of scikit-learn, and some of those import torch and pytest where
# they are installed: 180 MB and half of the start of an engine, for nothing.
with absent("torch", "pytest", "_pytest", "pandas"):
    import sklearn
    import skops
    from sklearn.base import BaseEstimator
    from skops.io import get_untrusted_types, load

TRUSTED_TYPES = frozenset(
    {
        "sklearn.calibration._CalibratedClassifier",
        "sklearn.calibration._SigmoidCalibration",
        "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
        "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
        "sklearn.metrics._dist_metrics.EuclideanDistance64",
        "sklearn.neighbors._ball_tree.BallTree",
        "sklearn.neighbors._kd_tree.KDTree",
        "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
        "sklearn.tree._tree.Tree",
    }
)
"""Beyond skops's own defaults, exact names only: a prefix such as `sklearn.` would let in whatever it grows next."""

METHOD: dict[Kind, str] = {"classifier": "predict_proba", "regressor": "predict", "anomaly": "decision_function"}


class SklearnBackend:
    """Serves tabular models; see `tabular` for the config. The clock is not needed."""

    name = "sklearn"

    def __init__(self, clock: Clock) -> None:
        # Rows are checked once, at decoding, and parameters were checked at training; doing it again on every call
        # costs more than most predictions.
        sklearn.set_config(assume_finite=True, skip_parameter_validation=True)
        # Many engines share a machine, and a small model never gains from a second thread.
        threadpool_limits(limits=1)

    def load(self, launch: ModelLaunch) -> LoadedModel:
        source = local_source(launch.source)
        digest = verified_digest(source, launch.weights_digest)
        config = tabular_config(launch.config)
        file = only_file(source, ".skops")
        estimator = load_trusted(file)
        return TabularModel(config, predictor(estimator, config.kind, len(config.names)), _unpacked(file), digest)

    def unload(self, model: LoadedModel) -> None:
        """Nothing beyond the reference the caller drops."""

    def versions(self) -> dict[str, str]:
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scikit-learn": sklearn.__version__,
            "skops": skops.__version__,
        }


def load_trusted(file: Path) -> BaseEstimator:
    """The estimator in a skops file. Raises ModelRefused when it holds a type outside the allow-list."""
    try:
        unknown = sorted(set(get_untrusted_types(file=file)) - TRUSTED_TYPES)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ModelRefused("weights_unreadable", f"{file} is not a skops file: {error}") from error
    if unknown:
        raise ModelRefused(
            "untrusted_types",
            f"{file} holds types that are not on the allow-list, so nothing of it was loaded: {', '.join(unknown)}. "
            "Use an estimator of scikit-learn, or convert the model to ONNX.",
        )
    estimator = load(file, trusted=sorted(TRUSTED_TYPES))
    if not isinstance(estimator, BaseEstimator):
        raise ModelRefused("weights_unreadable", f"{file} holds a {type(estimator).__name__}, not an estimator.")
    return estimator


def predictor(estimator: BaseEstimator, kind: Kind, width: int) -> Predict:
    """One vectorised call that answers (rows, width). Raises ModelRefused when the estimator has no such method."""
    method = getattr(estimator, METHOD[kind], None)
    if method is None:
        raise ModelRefused(
            "invalid_model_config", f"backend.config.kind: {kind} needs {METHOD[kind]}(), which {estimator!r} lacks."
        )
    match kind:
        case "classifier":
            classes = len(getattr(estimator, "classes_", ()))
            if classes != width:
                raise ModelRefused(
                    "invalid_model_config", f"backend.config.labels: {width} names for {classes} classes."
                )
            return shortcut(estimator, method)
        case "regressor":
            return shortcut(estimator, lambda matrix: np.asarray(method(matrix), np.float64).reshape(len(matrix), -1))
        case "anomaly":
            # scikit-learn counts down towards outliers; an anomaly score that grows reads better.
            return lambda matrix: -np.asarray(method(matrix), np.float64).reshape(len(matrix), 1)


def _unpacked(file: Path) -> int:
    """Size of the arrays in memory: skops stores each as one member of the zip."""
    with zipfile.ZipFile(file) as archive:
        return sum(member.file_size for member in archive.infolist() if not member.filename.endswith(".json"))
