"""What adapter_config.json says of a LoRA adapter, in the form that PEFT writes; what is not followed is refused.

A field that is not known here and set to something may change what the adapter computes, so it is refused, too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Never

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.weights import ADAPTER_CONFIG
from sie_stream.errors import did_you_mean

RANK_MAX = 1024
ALPHA_MAX = 3e38
"""Beyond it no product is a number in float32."""
VALUE_CHARS_MAX = 80
"""How much of a refused value is told."""
ALL_LINEAR = "all-linear"
FOLLOWED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "layers_to_transform", "layers_pattern", "bias"),
    *("init_lora_weights", "alora_invocation_tokens"),
)
IGNORED = (
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "peft_version"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    *("megatron_config", "megatron_core", "qalora_group_size"),
)
"""Remarks, and what counts in training only."""
INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Others change the weights of the base, which the adapter then belongs to."""


class AdapterTerms(Struct, frozen=True):
    """scale: of what the adapter adds. targets: ends of module names, or ALL_LINEAR. layers: numbers; None: all.

    invocation: tokens from which on it acts; empty: on all.
    """

    rank: int
    scale: float
    targets: tuple[str, ...]
    layers: tuple[int, ...] | None
    invocation: tuple[int, ...]


def adapter_terms(folder: Path) -> AdapterTerms:
    """Raises ModelRefused that says field, value and what is allowed."""
    file = folder / ADAPTER_CONFIG
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        message = (
            f"cannot read {file}: {error}. backend.config.base makes `source` the folder of a LoRA adapter, which has "
            f"{ADAPTER_CONFIG} and adapter_model.safetensors, as PEFT writes them."
        )
        raise ModelRefused("weights_unreadable", message) from error
    _only(config, "peft_type", ("LORA",), None)
    _only(config, "bias", ("none",), "none")
    _only(config, "init_lora_weights", INITS, True)
    _only(config, "use_rslora", (False, True), False)
    _only(config, "layers_pattern", (None, [], "layers", ["layers"]), None)
    for name, value in config.items():
        if name not in FOLLOWED + IGNORED and value not in (None, False, "", [], {}):
            guess = did_you_mean(name, FOLLOWED)
            refuse(name, value, f"only LoRA with {', '.join(FOLLOWED)} is followed; leave it out, or at null.{guess}")
    rank = _rank(config.get("r"))
    return AdapterTerms(
        rank=rank,
        scale=_alpha(config.get("lora_alpha")) / (math.sqrt(rank) if config.get("use_rslora") else rank),
        targets=_targets(config.get("target_modules")),
        layers=_layers(config.get("layers_to_transform")),
        invocation=_invocation(config.get("alora_invocation_tokens")),
    )


def refuse(field: str, value: object, allowed: str) -> Never:
    """Raises ModelRefused."""
    told = repr(value)
    told = told if len(told) <= VALUE_CHARS_MAX else f"{told[:VALUE_CHARS_MAX]}..."
    raise ModelRefused("unsupported_adapter", f"{ADAPTER_CONFIG}: {field} {told}: {allowed}")


def _only(config: dict[str, Any], field: str, allowed: tuple[object, ...], default: object) -> None:
    value = config.get(field, default)
    # 1 == True in Python, and no JSON of PEFT says 1 there.
    if not any(value == one and type(value) is type(one) for one in allowed):
        guess = did_you_mean(str(value), [one for one in allowed if isinstance(one, str)])
        refuse(field, value, f"it is not one of {', '.join(map(repr, allowed))}.{guess}")


def _rank(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= RANK_MAX:
        refuse("r", value, f"the rank is a whole number from 1 to {RANK_MAX}.")
    return value


def _alpha(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= ALPHA_MAX:
        refuse("lora_alpha", value, f"it is a number > 0, at most {ALPHA_MAX:g}.")
    return float(value)


def _targets(value: object) -> tuple[str, ...]:
    if value == ALL_LINEAR:
        return (ALL_LINEAR,)
    if isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    refuse("target_modules", value, f"it is a list of names such as 'q_proj', or {ALL_LINEAR!r}; no pattern.")


def _layers(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    return _numbers(
        "layers_to_transform",
        value if isinstance(value, list) else [value],
        "it is a layer's number, a list of them, or null for all.",
    )


def _invocation(value: object) -> tuple[int, ...]:
    allowed = "it is a list of token ids, at least one, or null for plain LoRA."
    return () if value is None else _numbers("alora_invocation_tokens", value, allowed)


def _numbers(field: str, value: object, allowed: str) -> tuple[int, ...]:
    given = value if isinstance(value, list) else []
    numbers = tuple(one for one in given if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
    if not numbers or len(numbers) != len(given):
        refuse(field, value, allowed)
    return numbers
