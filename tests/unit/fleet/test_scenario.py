"""Scenario files: what is shipped is valid, and what is wrong is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sie_stream.errors import ConfigError
from sie_stream.sim.fleet.run import load, shipped
from sie_stream.sim.fleet.scenario import SHAPES, parse_scenario
from sie_stream.sim.fleet.traces import FITTED, curve, fit

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def test_what_is_shipped_can_be_read() -> None:
    assert shipped() == ["a100-32x8", "double-peak", "gpu-failure-storm", "rolling-restart", "workers-200"]
    assert all(load(name).title for name in shipped())


WRONG = (
    ("titel = 'x'", ("titel", "'x'", "Did you mean 'title'?")),
    ("title = 'x'\n[fleet]\nserver = 3", ("fleet.server", "3", "Did you mean 'servers'?")),
    ("title = 'x'\n[fleet]\nservers = 'many'", ("fleet.servers", "'many'", "int")),
    ("title = 'x'\n[fleet]\nservers = 0", ("fleet.servers", "0", "1 to 1000")),
    (
        "title = 'x'\n[traffic]\nshape = 'dubble-peak'",
        ("traffic.shape", "'dubble-peak'", "Did you mean 'double-peak'?"),
    ),
    (
        "title = 'x'\n[[faults]]\nkind = 'gpu-loss'\nat_s = 1",
        ("faults[0].kind", "'gpu-loss'", "Did you mean 'gpu-lost'?"),
    ),
    ("title = 'x'\n[[faults]]\nkind = 'drain'\nat = 1", ("faults[0].at", "1", "Did you mean 'at_s'?")),
    ("title = 'x'\n[[faults]]\nkind = 'drain'\nat_s = -1", ("faults[0].at_s", "-1", "0 to")),
    ("title = 'x'\n[models]\ncount = 9\nreplicas = 3", ("models.replicas", "3", "9")),
    ("title = ", ("not TOML",)),
)


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_is_named_with_its_value_and_the_nearest(text: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text, "mine")
    assert all(word in str(caught.value) for word in ("'mine'", *said)), str(caught.value)


def test_a_scenario_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'double-peak'"):
        load("duble-peak")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_day_has_its_mean_rate(shape: str) -> None:
    assert float(curve(shape, np.arange(0, 24, 0.01)).mean()) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", FITTED)
def test_what_is_in_the_code_was_fitted_to_the_traces(name: str) -> None:
    if not (DATA / name).is_file():
        pytest.skip("the public traces are not here")
    found, known = fit(DATA / name), FITTED[name]
    for part in ("tokens_cv", "burst_cv", "peak"):
        assert getattr(found, part) == pytest.approx(getattr(known, part), abs=0.02), part
