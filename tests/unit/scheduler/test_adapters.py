"""What a worker is told of a declared adapter."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.kit import Cluster, joined, spec_json

BASE = {"kind": "text_generation", "base": "/models/chat"}
LORA = {"base": "chat", "rank": 16, "sharing": False}


@pytest.mark.parametrize(("backend", "told"), [("torch", {"lora_rank": 16, "lora_sharing": False}), ("vllm", {})])
def test_the_declared_rank_and_sharing_go_with_the_launch_of_our_decoder(backend: str, told: dict[str, object]) -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json("support", lora=LORA, backend={"name": backend, "config": BASE}))
    launches = cluster.model("support").launches
    assert launches[1].config == BASE | told
