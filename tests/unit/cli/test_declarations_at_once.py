"""Mistakes of all declarations below a folder, and of every kind, are told in one round."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_stream.cli.declare import load_specs, specs_for
from sie_stream.edge.connection import Connection
from sie_stream.spec import SpecError

GOOD = "model_id: good\nversion: 1.0.0\nsource: m.skops\nmin_gpu_memory_mb: 1\n"


def nobody() -> Connection:
    raise AssertionError("a wrong declaration needs no connection")


def test_mistakes_of_all_files_of_a_folder_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD + "priority_level: P7\n")
    (tmp_path / "b.yaml").write_text(GOOD + "tier: tier-9\n")
    (tmp_path / "c.yaml").write_text(GOOD + "a: [\n")
    (tmp_path / "good.yaml").write_text(GOOD)
    with pytest.raises(SpecError) as caught:
        load_specs(tmp_path)
    assert [Path(problem.where).name for problem in caught.value.problems] == ["a.yaml", "b.yaml", "c.yaml"]


def test_a_file_that_is_no_text_is_told_as_such(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_bytes(b"model_id: \xff\xfe\n")
    with pytest.raises(SpecError, match=r"model\.yaml: cannot be read as text"):
        load_specs(file)


def test_a_kind_that_a_built_in_backend_does_not_serve_is_refused_by_apply(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(GOOD + "backend: {name: sklearn, config: {kind: clasifier}}\nservice_type: clasification\n")
    with pytest.raises(SpecError) as caught:
        specs_for(nobody, file)
    assert [problem.path for problem in caught.value.problems] == ["service_type", "backend.config.kind"]
