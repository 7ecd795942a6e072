"""Whose fault it is that an engine has no answer."""

from __future__ import annotations

import pytest

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.sim.engine import EngineScript
from tests.unit.worker.rig import serving, work_item


@pytest.mark.parametrize("code", ["invalid_parameters", "invalid_response_format", "grammar_failed"])
def test_parameters_that_are_none_are_the_fault_of_the_request(code: str) -> None:
    def answer(item: EngineInput) -> EngineOutput:
        return EngineOutput(item.request_id, error_code=code, error_message="parameters: no")

    world, rig = serving(EngineScript(answer=answer))
    world.send(work_item("bad"))
    rig.run(50)
    result = world.results()["bad"]
    assert result.error is not None
    assert (result.status, result.error.code) == ("rejected", code)
