"""BERT as a sentence encoder (arXiv:1810.04805): last hidden states, without pooling and without transformers.

Post-norm layers, learned absolute positions, one kind of token type. Padding is masked out of the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.linear import Linear, dense
from gpu_worker.backends.embedding import Hidden, Tokens
from gpu_worker.backends.tensors import Size, Tensors, safetensors_of, wrong_size

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda states: functional.gelu(states, approximate="tanh"),
    "gelu_pytorch_tanh": lambda states: functional.gelu(states, approximate="tanh"),
    "relu": functional.relu,
}


class BertShape(Struct, frozen=True):
    """Keys of a config.json that decide the arithmetic."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    pad_token_id: int | None = 0
    position_embedding_type: str = "absolute"
    is_decoder: bool = False


class Norm(Struct):
    """Layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, states: Tensor) -> Tensor:
        return functional.layer_norm(states, self.weight.shape, self.weight, self.bias, self.eps)


class Layer(Struct):
    """One transformer layer. q, k and v are one product."""

    qkv: Linear
    attended: Linear
    attended_norm: Norm
    inner: Linear
    outer: Linear
    outer_norm: Norm


class BertEncoder:
    """Weights and arithmetic. A function on arrays: (ids, mask), both (batch, tokens) -> (batch, tokens, width)."""

    def __init__(self, shape: BertShape, read: Callable[[str, Size], Tensor], dtype: torch.dtype, device: str) -> None:
        self.pad_id = shape.pad_token_id or 0
        self.vocabulary = shape.vocab_size
        self.positions = shape.max_position_embeddings
        self.memory_bytes = 0
        self._heads = shape.num_attention_heads
        self._activation = ACTIVATIONS[shape.hidden_act]
        self._device = device

        def get(name: str, *size: int) -> Tensor:
            tensor = read(name, size).to(dtype=dtype, device=device, copy=True)
            self.memory_bytes += tensor.numel() * tensor.element_size()
            return tensor

        width, wide = shape.hidden_size, shape.intermediate_size

        def linear(*names: str, outs: int = width, ins: int = width) -> Linear:
            weights = [get(f"{name}.weight", outs, ins) for name in names]
            return dense(torch.cat(weights), torch.cat([get(f"{name}.bias", outs) for name in names]))

        def norm(name: str) -> Norm:
            return Norm(get(f"{name}.weight", width), get(f"{name}.bias", width), shape.layer_norm_eps)

        self._words = get("embeddings.word_embeddings.weight", shape.vocab_size, width)
        kinds = get("embeddings.token_type_embeddings.weight", shape.type_vocab_size, width)
        self._places = get("embeddings.position_embeddings.weight", shape.max_position_embeddings, width) + kinds[0]
        self._norm = norm("embeddings.LayerNorm")
        self._layers = [
            Layer(
                qkv=linear(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
                attended=linear(f"{at}.attention.output.dense"),
                attended_norm=norm(f"{at}.attention.output.LayerNorm"),
                inner=linear(f"{at}.intermediate.dense", outs=wide),
                outer=linear(f"{at}.output.dense", ins=wide),
                outer_norm=norm(f"{at}.output.LayerNorm"),
            )
            for at in (f"encoder.layer.{number}" for number in range(shape.num_hidden_layers))
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All that decides its answers."""
        norms = [self._norm, *(norm for layer in self._layers for norm in (layer.attended_norm, layer.outer_norm))]
        found = [self._words, self._places]
        found += [one for norm in norms for one in (norm.weight, norm.bias)]
        for layer in self._layers:
            for linear in (layer.qkv, layer.attended, layer.inner, layer.outer):
                found += linear.tensors
        return found

    @torch.inference_mode()
    def __call__(self, ids: Tokens, mask: Tokens) -> Hidden:
        batch, tokens = ids.shape
        states = functional.embedding(torch.from_numpy(ids).to(self._device), self._words)
        states = self._norm(states + self._places[:tokens]).flatten(0, 1)
        seen = torch.from_numpy(mask).to(self._device).bool()[:, None, None, :]
        for layer in self._layers:
            queries, keys, values = layer.qkv(states).view(batch, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            told = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
            states = layer.attended_norm(states + layer.attended(told.transpose(1, 2).reshape(batch * tokens, -1)))
            states = layer.outer_norm(states + layer.outer(self._activation(layer.inner(states))))
        return states.view(batch, tokens, -1).float().cpu().numpy()


def bert_shape(content: dict[str, Any]) -> BertShape | None:
    """From the keys of a config.json; None: another network, or a variant that is not followed here."""
    if content.get("model_type") != "bert":
        return None
    try:
        shape = msgspec.convert(content, BertShape)
    except msgspec.ValidationError as error:
        raise ModelRefused("weights_unreadable", f"config.json: {error}") from error
    if shape.hidden_size % shape.num_attention_heads:
        message = f"hidden_size {shape.hidden_size} does not divide over {shape.num_attention_heads} attention heads"
        raise ModelRefused("weights_unreadable", f"config.json: {message}.")
    plain = shape.position_embedding_type == "absolute" and not shape.is_decoder and shape.hidden_act in ACTIVATIONS
    return shape if plain else None


def read_bert(shape: BertShape, source: Path, dtype: torch.dtype, device: str) -> BertEncoder:
    """Raises ModelRefused."""
    with safetensors_of(source) as tensors:
        return BertEncoder(shape, lambda name, size: _found(tensors, name, size), dtype, device)


def _found(tensors: Tensors, name: str, size: Size) -> Tensor:
    """By today's name, or as older files have it: inside a larger model, and norms with gamma and beta.

    Raises ModelRefused for one of another size.
    """
    tensor = _by_any_name(tensors, name)
    if tensor.shape != size:
        raise wrong_size(tensors.source, name, tensor, size)
    return tensor


def _by_any_name(tensors: Tensors, name: str) -> Tensor:
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    for variant in (f"bert.{name}", old, f"bert.{old}"):
        if variant in tensors:
            return tensors(variant)
    return tensors(name)
