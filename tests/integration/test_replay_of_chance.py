"""Answers drawn by chance: with a seed that the log kept they come again, without one the replay says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.test_a_day_with_the_cli import ROOT, Shell

PACKAGE = ROOT / "tests" / "unit" / "worker" / "backend_package"
SERVICE_TYPES = {"drawn": "classification", "written": "text-generation"}
"""Ingress gives requests to models that generate a seed, and no others."""

pytestmark = [pytest.mark.integration]


def declaration(folder: Path, name: str) -> Path:
    spec: dict[str, Any] = {
        "model_id": name,
        "version": "1.0.0",
        "source": {"uri": str(folder)},
        "backend": {"name": "dice", "config": {}},
        "service_type": SERVICE_TYPES[name],
        "priority_level": "P1",
        "min_gpu_memory_mb": 1,
        "slas": {"p99_latency_ms": 10_000, "max_queue_time_ms": 10_000},
        "input_schema": {"type": "object"},
        "output_schema": {"type": "object"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    here = Shell(tmp_path_factory.mktemp("chance"))
    here.env["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), str(ROOT)])
    here.run("up", "--workers", "1", "--detach")
    try:
        for name in SERVICE_TYPES:
            here.run("apply", "-f", str(declaration(here.state_dir, name)))
        yield here
    finally:
        here.run("down")


def test_only_what_no_seed_draws_again_is_a_difference_by_its_seed(shell: Shell) -> None:
    for name in SERVICE_TYPES:
        for parameters in ('{"temperature": 0.8}', '{"temperature": 0}', "{}"):
            for number in range(2):
                asked = (
                    "produce",
                    "-m",
                    name,
                    "-i",
                    f'{{"prompt": "row {number}"}}',
                    "--parameters",
                    parameters,
                    "--wait",
                )
                assert shell.json(*asked)[0]["status"] == "ok"
    written = shell.json("replay", "--model", "written", "--nice", "0")
    assert (written["replayed"], written["equal"], written["causes"]) == (6, 6, {})
    drawn = shell.json("replay", "--model", "drawn", "--nice", "0", "--no-fail")
    assert (drawn["replayed"], drawn["equal"], drawn["causes"]) == (6, 4, {"seed": 2})
    assert "no seed was kept" in shell.run("replay", "--model", "drawn", "--nice", "0", "--no-fail")
