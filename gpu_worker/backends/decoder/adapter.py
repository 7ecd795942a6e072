"""A LoRA adapter over a loaded decoder: low-rank products that are added to those of its base (arXiv:2106.09685).

They are never merged into the weights, so that the base's are in memory once for all models of its trunk. What is added
to a row depends on that row alone: a row on which an activated adapter does not act has the bits of the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.adapter_config import ALL_LINEAR, AdapterTerms, adapter_terms, refuse
from gpu_worker.backends.decoder.shape import DecoderShape
from gpu_worker.backends.decoder.sizes import LAYERS, sizes_of
from gpu_worker.backends.tensors import Size, Tensors, safetensors_of
from sie_stream.errors import did_you_mean

PREFIX = "base_model.model."
HALVES = ("lora_A.weight", "lora_B.weight")


class Place(NamedTuple):
    """Where a module's results are: in which product of a Block, from which column on. size: (outs, ins)."""

    product: str
    start: int
    size: Size


class LowRank(Struct, frozen=True):
    """Added to columns [start, start + outs) of a product. down: (rank, ins). up: (outs, rank)."""

    start: int
    down: Tensor
    up: Tensor


class Adapter:
    """The matrices of an adapter by (layer, product of a Block)."""

    def __init__(
        self, parts: Mapping[tuple[int, str], list[LowRank]], scale: float, invocation: tuple[int, ...] = ()
    ) -> None:
        """invocation: see AdapterTerms."""
        self._parts = parts
        self._scale = scale
        self.invocation = invocation

    @property
    def tensors(self) -> list[Tensor]:
        return [one for parts in self._parts.values() for part in parts for one in (part.down, part.up)]

    @property
    def size_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.tensors)

    def added(self, at: tuple[int, str], product: Tensor, states: Tensor, acting: Tensor | None) -> Tensor:
        """`product` (rows, outs) of `states` (rows, ins) with what the adapter adds.

        acting: (rows, 1) on which rows; None: on all. The others are as they were, bit for bit.
        """
        parts = self._parts.get(at)
        if parts is None:
            return product
        changed = product.clone()
        for part in parts:
            low = functional.linear(states, part.down)
            changed[:, part.start : part.start + part.up.shape[0]] += functional.linear(low, part.up) * self._scale
        return changed if acting is None else torch.where(acting, changed, product)


def read_adapter(folder: Path, shape: DecoderShape, dtype: torch.dtype, device: str, rank: int = 0) -> Adapter:
    """rank: as declared; 0: not declared. Raises ModelRefused for what does not fit the base, or is not followed."""
    terms = adapter_terms(folder)
    if rank and rank != terms.rank:
        raise ModelRefused(
            "unsupported_adapter",
            f"lora.rank: {rank} is declared, and {folder}/adapter_config.json says r {terms.rank}. Declare that one.",
        )
    strange = next((one for one in terms.invocation if one >= shape.vocabulary), None)
    if strange is not None:
        refuse("alora_invocation_tokens", strange, f"its base has tokens 0 to {shape.vocabulary - 1}.")
    places = places_of(shape)
    modules = dict(_targeted(terms, shape, places))
    with safetensors_of(folder) as tensors:
        _check_names(folder, tensors, modules)
        parts: dict[tuple[int, str], list[LowRank]] = {}
        for module, (layer, place) in modules.items():
            down, up = _matrices(folder, tensors, module, place.size, terms.rank)
            # Copies: a tensor that lies in the mapped file would keep all of the file in memory.
            copies = [one.to(dtype=dtype, device=device, copy=True) for one in (down, up)]
            _check_numbers(folder, module, copies)
            parts.setdefault((layer, place.product), []).append(LowRank(place.start, *copies))
    return Adapter(parts, terms.scale, terms.invocation)


def places_of(shape: DecoderShape) -> dict[str, Place]:
    """{module of a layer: where its results are}."""
    fused = shape.family == "phi3"
    products = {
        "qkv": ["self_attn.qkv_proj"] if fused else [f"self_attn.{one}_proj" for one in "qkv"],
        "output": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    sizes = sizes_of(shape)
    found: dict[str, Place] = {}
    for product, modules in products.items():
        start = 0
        for module in modules:
            found[module] = Place(product, start, sizes[module])
            start += sizes[module][0]
    return found


def _targeted(
    terms: AdapterTerms, shape: DecoderShape, places: Mapping[str, Place]
) -> Iterator[tuple[str, tuple[int, Place]]]:
    """(full name, (layer, place)) of every module the adapter acts on. Raises ModelRefused."""
    for layer in terms.layers or ():
        if layer >= shape.layers:
            refuse("layers_to_transform", layer, f"its base has layers 0 to {shape.layers - 1}.")
    everything = {
        f"{LAYERS}{layer}.{module}": (layer, place)
        for layer in range(shape.layers)
        for module, place in places.items()
        if terms.layers is None or layer in terms.layers
    }
    if terms.targets == (ALL_LINEAR,):
        yield from everything.items()
        return
    for target in terms.targets:
        found = [name for name in everything if f".{name}".endswith(f".{target}")]
        if not found:
            known = sorted(module.rpartition(".")[2] for module in places)
            message = f"its base ({shape.family}) has {', '.join(known)} in each layer.{did_you_mean(target, known)}"
            refuse("target_modules", target, message)
        yield from ((name, everything[name]) for name in found)


def _matrices(folder: Path, tensors: Tensors, module: str, size: Size, rank: int) -> list[Tensor]:
    """(rank, ins) and (outs, rank). Raises ModelRefused."""
    outs, ins = size
    found: list[Tensor] = []
    for half, wanted in zip(HALVES, ((rank, ins), (outs, rank)), strict=True):
        names = [one for one in _names(module, half) if one in tensors]
        if not names:
            message = (
                f"{folder} lacks {_names(module, half)[0]}, which target_modules of its adapter_config.json promise."
            )
            raise ModelRefused("weights_unreadable", message)
        if len(names) > 1:
            message = f"{folder} has {' and '.join(names)}, which are one matrix by two names. Keep one of them."
            raise ModelRefused("unsupported_adapter", message)
        tensor = tensors(names[0])
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            message = f"{folder}: {names[0]} is of type {kind}; matrices of an adapter are floating-point numbers."
            raise ModelRefused("unsupported_adapter", message)
        if tensor.shape != wanted:
            raise ModelRefused(
                "weights_unreadable",
                f"{folder}: the size of {names[0]} is {tuple(tensor.shape)}, and for r {rank} on this base {wanted}. "
                "It is an adapter of another base or of another rank: correct backend.config.base, or fetch it again.",
            )
        found.append(tensor)
    return found


def _check_numbers(folder: Path, module: str, matrices: Iterable[Tensor]) -> None:
    """Raises ModelRefused for what is no number in the dtype of the states: no answer of it would be any either."""
    for half, matrix in zip(HALVES, matrices, strict=True):
        if not bool(torch.isfinite(matrix).all()):
            dtype = str(matrix.dtype).removeprefix("torch.")
            raise ModelRefused(
                "weights_unreadable",
                f"{folder}: {_names(module, half)[0]} holds NaN, infinity, or numbers too large for {dtype} "
                "(backend.config.dtype). The adapter was trained past its limits, or the file is damaged.",
            )


def _names(module: str, half: str) -> tuple[str, str]:
    """As PEFT names the tensor over a language model, and over its bare trunk."""
    return f"{PREFIX}{module}.{half}", f"{PREFIX}{module.removeprefix('model.')}.{half}"


def _check_names(folder: Path, tensors: Tensors, modules: Iterable[str]) -> None:
    """Raises ModelRefused for a tensor that would not be used: the answers would not be the adapter's."""
    known = {name for module in modules for half in HALVES for name in _names(module, half)}
    unused = next((name for name in tensors.names if name not in known), None)
    if unused is not None:
        raise ModelRefused(
            "unsupported_adapter",
            f"{folder}: the tensor {unused} is of no module that target_modules and layers_to_transform of "
            f"adapter_config.json name on this base.{did_you_mean(unused, sorted(known))}",
        )
