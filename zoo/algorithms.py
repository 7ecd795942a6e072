"""The estimators of the zoo: small, seeded, one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sklearn.calibration import CalibratedClassifierCV
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeClassifier

Make = Callable[[int], Any]
"""seed -> unfitted estimator"""

ABOUT = {
    "logreg": "Logistic regression",
    "rf": "Random forest",
    "gb": "Gradient boosting",
    "hgb": "Histogram gradient boosting",
    "svc": "Support vector classifier with calibrated probabilities",
    "svr": "Support vector regression",
    "knn": "Nearest neighbours",
    "mlp": "Multi-layer perceptron",
    "nb": "Gaussian naive Bayes",
    "tree": "Decision tree",
    "et": "Extremely randomised trees",
    "lda": "Linear discriminant analysis",
    "ridge": "Ridge regression",
    "lasso": "Lasso regression",
    "elastic": "Elastic net regression",
    "iforest": "Isolation forest",
}


def _scaled(estimator: Any) -> Pipeline:
    return make_pipeline(StandardScaler(), estimator)


ONE_CALIBRATOR: Any = {"ensemble": False, "cv": 3}
"""One machine and one calibration for all folds, instead of three of each."""

CLASSIFIERS: dict[str, Make] = {
    "logreg": lambda seed: _scaled(LogisticRegression(max_iter=1_000, random_state=seed)),
    "rf": lambda seed: RandomForestClassifier(n_estimators=30, max_depth=8, random_state=seed),
    "gb": lambda seed: GradientBoostingClassifier(n_estimators=30, max_depth=3, random_state=seed),
    "hgb": lambda seed: HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=15, random_state=seed),
    "svc": lambda seed: _scaled(CalibratedClassifierCV(SVC(random_state=seed), **ONE_CALIBRATOR)),
    "knn": lambda seed: _scaled(KNeighborsClassifier(n_neighbors=7)),
    "mlp": lambda seed: _scaled(MLPClassifier(hidden_layer_sizes=(32,), max_iter=300, random_state=seed)),
    "nb": lambda seed: GaussianNB(),
    "tree": lambda seed: DecisionTreeClassifier(max_depth=6, min_samples_leaf=2, random_state=seed),
    "et": lambda seed: ExtraTreesClassifier(n_estimators=30, max_depth=8, random_state=seed),
    "lda": lambda seed: LinearDiscriminantAnalysis(),
}

REGRESSORS: dict[str, Make] = {
    "ridge": lambda seed: _scaled(Ridge(alpha=1.0)),
    "lasso": lambda seed: _scaled(Lasso(alpha=1.0, random_state=seed)),
    "elastic": lambda seed: _scaled(ElasticNet(alpha=0.5, random_state=seed)),
    "rf": lambda seed: RandomForestRegressor(n_estimators=30, max_depth=6, random_state=seed),
    "gb": lambda seed: GradientBoostingRegressor(n_estimators=40, max_depth=2, random_state=seed),
    "hgb": lambda seed: HistGradientBoostingRegressor(max_iter=40, max_leaf_nodes=15, random_state=seed),
    "knn": lambda seed: _scaled(KNeighborsRegressor(n_neighbors=7)),
    "svr": lambda seed: _scaled(SVR(C=30.0)),
    "mlp": lambda seed: _scaled(
        MLPRegressor(hidden_layer_sizes=(24,), max_iter=600, learning_rate_init=0.02, random_state=seed)
    ),
}


def outlier_detector(seed: int) -> IsolationForest:
    return IsolationForest(n_estimators=50, random_state=seed)
