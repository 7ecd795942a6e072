"""Rotary position embedding (arXiv:2104.09864): cosines and sines, with the usual ways to lengthen a context."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rotation_tables(rope: dict[str, Any], head_width: int, positions: int) -> tuple[Tensor, Tensor]:
    """(positions, head_width) cosines and sines, float32; both halves of a head turn by the same angles."""
    frequencies, scale = _frequencies(rope, head_width)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """states (rows, heads, head_width); cos, sin (rows, 1, head_width). Pairs are (i, i + head_width / 2)."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def _frequencies(rope: dict[str, Any], width: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, and the factor on cosines and sines."""
    theta = float(rope["rope_theta"])
    plain = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))
    match rope.get("rope_type", "default"):
        case "linear":
            return plain / float(rope["factor"]), 1.0
        case "divided":
            return plain / torch.tensor(rope["divisors"]), 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(theta, width, rope)
        case _:
            return plain, 1.0


def _llama3(plain: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are mixed."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > context / low, plain / factor, plain)
    mix = (context / wavelengths - low) / (high - low)
    mixed = (1 - mix) * stretched / factor + mix * stretched
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, mixed, stretched)


def _yarn(theta: float, width: int, rope: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071), NTK by parts."""
    factor, context = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns `times` times within the original context."""
        return width * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(rope.get("beta_fast") or 32), pair_turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    turns = theta ** (torch.arange(0, width, 2).float() / width)
    return (1.0 / (factor * turns)) * (1 - kept) + (1.0 / turns) * kept, _attention_factor(rope, factor)


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _magnitude(factor, rope["mscale"]) / _magnitude(factor, rope["mscale_all_dim"])
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
