"""What the zoo builds: one recipe per model, as plain data.

A classical model is an algorithm trained on one cohort of one data set. The tables below name the cohorts and which
algorithms each gets; `ONNX_COHORTS` ship as ONNX, the others as skops. Nothing here imports a heavy library, so that a
build with nothing to do ends at once.
"""

from __future__ import annotations

import fnmatch

import msgspec


class Recipe(msgspec.Struct, frozen=True):
    """Everything that decides what a model is; part of its fingerprint."""

    name: str
    builder: str
    """Module under zoo/ with `build(recipe, folder)`."""
    dataset: str = ""
    cohort: str = ""
    algorithm: str = ""
    weights: tuple[str, ...] = ()
    """Entries of weights.toml it is made from."""
    form: str = "skops"
    priority: str = "P1"
    tags: tuple[str, ...] = ()
    seed: int = 7
    cost: int = 1
    """Rough build time; long builds start first."""


CLASSIFIERS = ("logreg", "rf", "gb", "svc", "knn", "mlp", "nb", "tree", "et", "lda")

MATRIX: dict[str, dict[str, tuple[str, ...]]] = {
    "breast-cancer": {
        "all": CLASSIFIERS,
        "fine-texture": ("logreg", "rf", "hgb", "svc", "knn", "mlp"),
        "coarse-texture": ("logreg", "rf", "hgb", "svc", "knn", "mlp"),
        "smooth": ("logreg", "et", "gb", "svc", "nb"),
        "rough": ("logreg", "et", "gb", "svc", "nb"),
    },
    "digits": {
        "all": ("logreg", "rf", "svc", "knn", "mlp", "et"),
        "low": ("logreg", "svc", "mlp", "rf"),
        "high": ("logreg", "svc", "mlp", "rf"),
        "odd": ("logreg", "svc", "mlp", "tree"),
        "even": ("logreg", "svc", "mlp", "tree"),
    },
    "wine": {
        "all": ("logreg", "rf", "gb", "svc", "knn", "nb", "lda"),
        "low-ash": ("logreg", "rf", "nb", "knn"),
        "high-ash": ("logreg", "rf", "nb", "knn"),
        "low-magnesium": ("logreg", "et", "svc", "tree"),
        "high-magnesium": ("logreg", "et", "svc", "tree"),
    },
    "iris": {
        "all": ("logreg", "rf", "svc", "knn", "nb", "tree"),
        "petal": ("logreg", "gb", "nb", "mlp"),
        "sepal": ("logreg", "gb", "nb", "mlp"),
    },
    "diabetes": {
        "all": ("ridge", "lasso", "elastic", "rf", "gb", "hgb", "knn", "svr", "mlp"),
        "younger": ("ridge", "rf", "gb"),
        "older": ("ridge", "rf", "gb"),
        "low-bmi": ("ridge", "lasso", "knn"),
        "high-bmi": ("ridge", "lasso", "knn"),
        "sex-1": ("ridge", "rf"),
        "sex-2": ("ridge", "rf"),
    },
    "linnerud": {"all": ("ridge", "knn")},
}
"""data set -> cohort -> algorithms."""

OUTLIERS: dict[str, tuple[str, ...]] = {
    "breast-cancer": ("benign",),
    "digits": ("all",),
    "wine": ("all",),
    "iris": ("all",),
    "diabetes": ("all",),
}
"""data set -> cohorts that an isolation forest takes as normal."""

ONNX_COHORTS = frozenset(
    {
        ("breast-cancer", "coarse-texture"),
        ("breast-cancer", "rough"),
        ("digits", "odd"),
        ("digits", "even"),
        ("wine", "high-ash"),
        ("wine", "high-magnesium"),
        ("iris", "sepal"),
        ("iris", "petal"),
        ("diabetes", "older"),
        ("diabetes", "high-bmi"),
        ("diabetes", "sex-2"),
    }
)
NO_CONVERTER = frozenset({"hgb"})
"""skl2onnx 1.20 cannot convert histogram boosting of scikit-learn 1.9: these stay skops."""

URGENT = frozenset({"breast-cancer"})
BATCH = frozenset({"linnerud", "iris"})

PRETRAINED = (
    Recipe(
        name="smollm2-135m-instruct",
        builder="language_model",
        weights=("smollm2",),
        form="torch",
        tags=("a/b-test",),
        cost=100,
    ),
    Recipe(name="minilm-l6-v2", builder="embedder_torch", weights=("minilm",), form="torch", cost=60),
    Recipe(
        name="minilm-l6-v2-int8",
        builder="embedder_onnx",
        weights=("minilm-int8", "minilm"),
        form="onnx",
        tags=("cost-sensitive",),
        cost=50,
    ),
    Recipe(
        name="magika-file-type",
        builder="file_type",
        weights=("magika",),
        form="onnx",
        priority="P0",
        tags=("high-sla",),
    ),
)


def catalogue() -> list[Recipe]:
    """Every recipe, by name. Names are unique."""
    recipes = list(PRETRAINED)
    for dataset, cohorts in MATRIX.items():
        for cohort, algorithms in cohorts.items():
            recipes += [_classical(dataset, cohort, algorithm) for algorithm in algorithms]
    for dataset, cohorts in OUTLIERS.items():
        recipes += [_classical(dataset, cohort, "iforest") for cohort in cohorts]
    recipes.sort(key=lambda recipe: recipe.name)
    assert len({recipe.name for recipe in recipes}) == len(recipes), "two recipes share a name"
    return recipes


def matching(recipes: list[Recipe], pattern: str) -> list[Recipe]:
    """Recipes whose name matches a shell pattern, or contains it when it has no wildcard."""
    if not any(mark in pattern for mark in "*?["):
        pattern = f"*{pattern}*"
    return [recipe for recipe in recipes if fnmatch.fnmatchcase(recipe.name, pattern)]


def _classical(dataset: str, cohort: str, algorithm: str) -> Recipe:
    name = f"{dataset}-{algorithm}" if cohort == "all" else f"{dataset}-{algorithm}-{cohort}"
    convertible = algorithm not in NO_CONVERTER and (dataset, cohort) in ONNX_COHORTS
    if dataset in URGENT:
        priority, tags = "P0", ("high-sla",)
    elif dataset in BATCH:
        priority, tags = "P2", ("batch-job", "cost-sensitive")
    else:
        priority, tags = "P1", ()
    return Recipe(
        name=name,
        builder="classical",
        dataset=dataset,
        cohort=cohort,
        algorithm=algorithm,
        form="onnx" if convertible else "skops",
        priority=priority,
        tags=tags,
        cost=3 if algorithm in ("mlp", "svc", "rf", "et", "gb", "hgb") else 1,
    )
