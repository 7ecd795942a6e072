"""scikit-learn's bundled data sets, cut into cohorts.

Every data set comes as a float64 matrix with snake_case columns. A cohort is a subset of the rows (or columns) by one
feature, so that two cohorts of a data set are different populations and their models differ for a reason.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sklearn import datasets as bundled
from sklearn.model_selection import train_test_split

Array = NDArray[np.float64]


class Table(msgspec.Struct, frozen=True):
    """A data set or a cohort of it."""

    title: str
    about: str
    licence: str
    features: tuple[str, ...]
    rows: Array
    """(n, features)"""
    answers: NDArray[np.float64] | NDArray[np.int64]
    """(n,) class indices, (n,) values or (n, targets) values."""
    labels: tuple[str, ...] = ()
    """Class names, for classification."""
    targets: tuple[str, ...] = ()
    """Value names, for regression."""
    cohort: str = "every row"


class Split(msgspec.Struct, frozen=True):
    """Training and held-out rows."""

    train_rows: Array
    train_answers: NDArray[np.float64] | NDArray[np.int64]
    held_rows: Array
    held_answers: NDArray[np.float64] | NDArray[np.int64]


BSD = "bundled with scikit-learn (BSD-3-Clause)"
UCI = "UCI Machine Learning Repository, CC BY 4.0; bundled with scikit-learn"


def snake(name: str) -> str:
    """`mean radius (cm)` -> `mean_radius_cm`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@functools.cache
def table(name: str) -> Table:
    """A whole data set. Raises KeyError for a name that is not bundled."""
    return LOADERS[name]()


def _breast_cancer() -> Table:
    raw: Any = bundled.load_breast_cancer()
    return Table(
        title="Breast Cancer Wisconsin (Diagnostic)",
        about="30 measurements of cell nuclei in a fine needle aspirate; malignant or benign (569 patients).",
        licence=UCI,
        features=tuple(map(snake, raw.feature_names)),
        rows=raw.data,
        answers=raw.target,
        labels=tuple(map(str, raw.target_names)),
    )


def _digits() -> Table:
    raw: Any = bundled.load_digits()
    return Table(
        title="Optical Recognition of Handwritten Digits",
        about="8 x 8 images of handwritten digits, 64 grey values from 0 to 16 (1,797 images).",
        licence=UCI,
        features=tuple(map(snake, raw.feature_names)),
        rows=raw.data,
        answers=raw.target,
        labels=tuple(map(str, raw.target_names)),
    )


def _wine() -> Table:
    raw: Any = bundled.load_wine()
    names = [name.replace("od280/od315_of_diluted_wines", "od280_od315") for name in raw.feature_names]
    return Table(
        title="Wine recognition",
        about="13 chemical measurements of wines from three growers of one Italian region (178 wines).",
        licence=UCI,
        features=tuple(map(snake, names)),
        rows=raw.data,
        answers=raw.target,
        labels=("grower_0", "grower_1", "grower_2"),
    )


def _iris() -> Table:
    raw: Any = bundled.load_iris()
    return Table(
        title="Iris plants",
        about="Length and width of sepals and petals of three iris species (150 plants).",
        licence=UCI,
        features=tuple(map(snake, raw.feature_names)),
        rows=raw.data,
        answers=raw.target,
        labels=tuple(map(str, raw.target_names)),
    )


def _diabetes() -> Table:
    raw: Any = bundled.load_diabetes(scaled=False)
    names = ("age", "sex", "bmi", "blood_pressure", "tc", "ldl", "hdl", "tch", "ltg", "glucose")
    return Table(
        title="Diabetes (Efron, Hastie, Johnstone and Tibshirani, 2004)",
        about="Age, sex (coded 1 and 2), BMI, blood pressure and six serum values; disease progression after one year.",
        licence=BSD,
        features=names,
        rows=raw.data,
        answers=raw.target,
        targets=("progression",),
    )


def _linnerud() -> Table:
    raw: Any = bundled.load_linnerud()
    return Table(
        title="Linnerud physical exercise",
        about="Chin-ups, sit-ups and jumps of twenty men; weight, waist and pulse. Shows several outputs at once.",
        licence=BSD,
        features=tuple(map(snake, raw.feature_names)),
        rows=raw.data,
        answers=raw.target,
        targets=tuple(map(snake, raw.target_names)),
    )


LOADERS = {
    "breast-cancer": _breast_cancer,
    "digits": _digits,
    "wine": _wine,
    "iris": _iris,
    "diabetes": _diabetes,
    "linnerud": _linnerud,
}

BY_MEDIAN = {
    ("breast-cancer", "fine-texture"): ("mean_texture", "at most"),
    ("breast-cancer", "coarse-texture"): ("mean_texture", "above"),
    ("breast-cancer", "smooth"): ("mean_smoothness", "at most"),
    ("breast-cancer", "rough"): ("mean_smoothness", "above"),
    ("wine", "low-ash"): ("ash", "at most"),
    ("wine", "high-ash"): ("ash", "above"),
    ("wine", "low-magnesium"): ("magnesium", "at most"),
    ("wine", "high-magnesium"): ("magnesium", "above"),
    ("diabetes", "younger"): ("age", "at most"),
    ("diabetes", "older"): ("age", "above"),
    ("diabetes", "low-bmi"): ("bmi", "at most"),
    ("diabetes", "high-bmi"): ("bmi", "above"),
    ("diabetes", "sex-1"): ("sex", "at most"),
    ("diabetes", "sex-2"): ("sex", "above"),
}
"""Cohorts on one side of a feature's median."""

BY_LABEL = {
    ("digits", "low"): ("0", "1", "2", "3", "4"),
    ("digits", "high"): ("5", "6", "7", "8", "9"),
    ("digits", "odd"): ("1", "3", "5", "7", "9"),
    ("digits", "even"): ("0", "2", "4", "6", "8"),
    ("breast-cancer", "benign"): ("benign",),
}
"""Cohorts of some classes only."""

BY_COLUMN = {("iris", "petal"): "petal", ("iris", "sepal"): "sepal"}
"""Cohorts that see only the columns starting with a word."""


def cohort(name: str, which: str) -> Table:
    """A cohort of a data set. Raises KeyError for a name that the tables above do not have."""
    whole = table(name)
    if which == "all":
        return whole
    if (name, which) in BY_COLUMN:
        word = BY_COLUMN[name, which]
        columns = [place for place, feature in enumerate(whole.features) if feature.startswith(word)]
        features = tuple(whole.features[place] for place in columns)
        return msgspec.structs.replace(
            whole, features=features, rows=whole.rows[:, columns], cohort=f"only the {word} measurements"
        )
    if (name, which) in BY_LABEL:
        return _of_labels(whole, BY_LABEL[name, which])
    feature, side = BY_MEDIAN[name, which]
    values = whole.rows[:, whole.features.index(feature)]
    middle = float(np.median(values))
    chosen = values <= middle if side == "at most" else values > middle
    if chosen.all():  # a coded feature whose median is its larger code
        middle = float(values.min())
        chosen = values <= middle
    elif not chosen.any():
        middle = float(values.min())
        chosen = values > middle
    return msgspec.structs.replace(
        whole, rows=whole.rows[chosen], answers=whole.answers[chosen], cohort=f"{feature} {side} {middle:g}"
    )


def _of_labels(whole: Table, names: tuple[str, ...]) -> Table:
    kept = [whole.labels.index(name) for name in names]
    chosen = np.isin(whole.answers, kept)
    renumber = {old: new for new, old in enumerate(kept)}
    answers = np.array([renumber[answer] for answer in whole.answers[chosen].tolist()], np.int64)
    return msgspec.structs.replace(
        whole, rows=whole.rows[chosen], answers=answers, labels=names, cohort=f"only {', '.join(names)}"
    )


def split(data: Table, seed: int) -> Split:
    """70 % to train on, 30 % held out; classes in equal shares."""
    stratify = data.answers if data.labels and len(data.labels) > 1 else None
    parts: Any = train_test_split(data.rows, data.answers, test_size=0.3, random_state=seed, stratify=stratify)
    train_rows, held_rows, train_answers, held_answers = parts
    return Split(train_rows, train_answers, held_rows, held_answers)
