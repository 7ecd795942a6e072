"""Weights of 8 and 4 bits: blocks, the kernel against the widened product, sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.int4 import Int4Linear, int4_blocks, kernel
from gpu_worker.backends.gguf_file import widened
from tests.decoders.families import ask, load, prompts, save, with_tokenizer


def weights(outs: int, width: int) -> torch.Tensor:
    return torch.randn((outs, width), generator=torch.Generator().manual_seed(outs + width))


def test_a_group_is_kept_within_half_a_step_and_a_constant_one_as_it_is() -> None:
    weight = weights(16, 96)
    weight[3, :32] = 0.5
    weight[4] = 0.0
    kept = widened(int4_blocks(weight)).flatten(1)
    groups = weight.view(16, 3, 32)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    off = (kept.view(16, 3, 32) - groups).abs().amax(-1)
    assert torch.all(off <= 0.5 * step + 0.003)
    assert torch.equal(kept[3, :32], weight[3, :32])
    assert torch.equal(kept[4], weight[4])


def test_what_has_been_quantised_once_is_kept() -> None:
    once = int4_blocks(weights(8, 64))
    assert torch.allclose(widened(int4_blocks(widened(once).flatten(1))), widened(once), atol=0.01)


@pytest.mark.skipif(kernel() is None, reason="no C compiler here")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outs", "width"), [(33, 32), (600, 576)])
def test_the_kernel_multiplies_as_the_widened_weights_do(outs: int, width: int, threads: int) -> None:
    blocks, bias = int4_blocks(weights(outs, width)), torch.randn(outs)
    linear, plain = Int4Linear(blocks, bias, torch.float32), Int4Linear(blocks, bias, torch.float32)
    plain._kernel = None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 3, 4, 7, 64, 65):
            states = weights(rows, width)
            states[0] = 0.0
            expected = plain(states)
            off = (linear(states) - expected).norm() / expected.norm()
            assert off < 0.02, rows  # rounding of the states to 8 bits
            if rows <= 64:
                alone = torch.cat([linear(row[None]) for row in states])
                assert torch.allclose(alone, linear(states), atol=1e-4)
            else:
                assert off == 0.0
    finally:
        torch.set_num_threads(before)


def test_low_precision_stays_near(tmp_path: Path) -> None:
    folder = with_tokenizer(save(tmp_path))
    (prompt,) = prompts([60])
    scores: dict[str, float] = {}
    configs: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"dtype": "bfloat16"},
        "int8": {"precision": "int8"},
        "int4": {"precision": "int4"},
    }
    configs |= {f"{name} as declared": {"precision": name} for name in ("fp32", "bf16", "fp16")}
    for name, config in configs.items():
        (answer,) = load(folder, **config).run([ask("a", prompt, score=True)])
        scores[name] = json.loads(answer.outputs or b"")["log_likelihood"] / (len(prompt) - 1)
    assert scores["bf16"] == pytest.approx(scores["fp32"], abs=0.1)
    assert scores["int8"] == pytest.approx(scores["fp32"], abs=0.1)
    assert scores["int4"] == pytest.approx(scores["fp32"], abs=0.4)
    assert scores["fp16 as declared"] == pytest.approx(scores["fp32"], abs=0.02)
    assert scores["fp32 as declared"] == scores["fp32"]
    assert scores["bf16 as declared"] == scores["bf16"]
    assert len(set(scores.values())) == 5


def test_int8_weights_take_a_quarter(tmp_path: Path) -> None:
    folder = save(tmp_path, hidden_size=64, intermediate_size=256)
    assert load(folder, precision="int8").memory_bytes < 0.45 * load(folder).memory_bytes


def test_int4_weights_take_what_they_take(tmp_path: Path) -> None:
    folder = save(tmp_path, hidden_size=64, intermediate_size=256)
    network = load(folder, precision="int4")._runner._network  # type: ignore[attr-defined]
    matrices = 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 256)
    tables = 2 * network._cos.numel() * 4 + 7 * 64 * 4
    int8 = 2 * (96 * 64 + 96 * 6)
    assert network.memory_bytes == matrices * 20 // 32 + tables + int8


def test_a_width_without_whole_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="int4 needs widths that 32 divides; one is 48"):
        load(save(tmp_path, hidden_size=48), precision="int4")
