"""A decoder of the LLaMA architecture in plain torch: weights from safetensors, one forward pass over packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional

from gpu_worker.backends.decoder.adapter import Adapter
from gpu_worker.backends.decoder.arena import ModelPages
from gpu_worker.backends.decoder.attention import Attention, Layer, capped
from gpu_worker.backends.decoder.files import DecoderFiles
from gpu_worker.backends.decoder.int4 import Int4Linear
from gpu_worker.backends.decoder.linear import PRECISIONS, Int8Linear, Linear, PackedLinear, dense
from gpu_worker.backends.decoder.rope import rotate, rotation_tables
from gpu_worker.backends.decoder.shape import DecoderShape
from gpu_worker.backends.decoder.sizes import SizedTensors

Read = Callable[[str], Tensor]
HEADS = ("lm", "embedding")
"""Logits of the next token, or the last states after the norm."""


class Rows(Struct):
    """The tokens of one forward pass.

    ids, positions: (rows). pages, slots: (stored) where keys and values of `stored` rows go; stored None: all rows.
    acting: (rows, 1) on which rows the adapter of the network acts, if it has one; None: on all.
    """

    ids: Tensor
    positions: Tensor
    pages: Tensor
    slots: Tensor
    attention: Attention
    stored: Tensor | None = None
    acting: Tensor | None = None


class Block(Struct):
    """One transformer layer. q, k and v are one product; so are gate and up."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attended_norm: Tensor | None = None
    """Of what the attention says, before it is added."""
    told_norm: Tensor | None = None
    """Of what the MLP says."""

    @property
    def norms(self) -> list[Tensor]:
        found = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm, self.attended_norm, self.told_norm)
        return [norm for norm in found if norm is not None]

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.output, self.gate_up, self.down]


class Unprojected:
    """The head of who wants the normed states themselves."""

    size_bytes = 0

    @property
    def tensors(self) -> list[Tensor]:
        return []

    def __call__(self, states: Tensor) -> Tensor:
        return states


class Donors(NamedTuple):
    """Networks in memory that consist of the same tensors: of one trunk, and of one head, too. None: read them."""

    trunk: DecoderNetwork | None = None
    head: DecoderNetwork | None = None


class DecoderNetwork:
    """Weights and arithmetic. It holds no state of any request: keys and values go to the pages it is given."""

    def __init__(
        self,
        shape: DecoderShape,
        tensors: SizedTensors,
        dtype: torch.dtype,
        precision: str,
        device: str,
        head: str,
        donors: Donors,
        adapter: Adapter | None = None,
    ) -> None:
        self.shape = shape
        self.adapter = adapter
        self.dtype = dtype
        self.device = device

        def get(name: str) -> Tensor:
            return tensors(name).to(dtype=dtype, device=device)

        def kept(name: str) -> Tensor:
            """A copy: a tensor that lies in the mapped file would keep all of the file in memory."""
            return tensors(name).to(dtype=dtype, device=device, copy=True)

        def make(names: Sequence[str], biased: bool) -> Linear:
            """Several products of the same states as one; 4-bit weights as the file has them, if it does."""
            bias = torch.cat([get(f"{name}.bias") for name in names]) if biased else None
            stored = [tensors.blocks(f"{name}.weight") for name in names] if precision == "int4" else [None]
            blocks = [one for one in stored if one is not None]
            if len(blocks) == len(stored):
                return Int4Linear(torch.cat(blocks).to(device), bias, dtype)
            return PRECISIONS[precision](torch.cat([get(f"{name}.weight") for name in names]), bias)

        self._gemma = shape.family == "gemma2"
        self._activation = partial(functional.gelu, approximate="tanh") if self._gemma else functional.silu
        self._embedding_scale = torch.tensor(shape.width**0.5, dtype=dtype) if self._gemma else None

        def norm(name: str) -> Tensor:
            return kept(name).float() + 1.0 if self._gemma else kept(name)

        whole = PRECISIONS[precision] is dense
        self._embedding: Tensor | Int8Linear
        if donors.trunk is not None:
            self._embedding, self._blocks = donors.trunk._embedding, donors.trunk._blocks
        else:
            name = "model.embed_tokens.weight"
            self._embedding = kept(name) if whole else Int8Linear(get(name))
            self._blocks = [_block(shape, number, norm, make) for number in range(shape.layers)]
        self._norm = norm("model.norm.weight") if donors.head is None else donors.head._norm
        self._head = _head(shape, head, self._embedding, kept) if donors.head is None else donors.head._head
        self._head_shared = shape.tied and not isinstance(self._head, PackedLinear)
        self._logit_cap = shape.logit_cap if head == "lm" else None
        cos, sin = rotation_tables(shape.rope, shape.head_width, shape.positions)
        self._cos = cos.to(dtype=dtype, device=device)[:, None]
        self._sin = sin.to(dtype=dtype, device=device)[:, None]

    @property
    def memory_bytes(self) -> int:
        """What the weights and tables take. A tied embedding counts twice where its two uses need two layouts."""
        adapter = 0 if self.adapter is None else self.adapter.size_bytes
        return self.trunk_bytes + self.head_bytes + adapter + _bytes([self._cos, self._sin])

    @property
    def tensors(self) -> list[Tensor]:
        """All that decides its answers."""
        found = [self._norm, self._cos, self._sin, *self._head.tensors]
        found += [self._embedding] if isinstance(self._embedding, Tensor) else self._embedding.tensors
        for block in self._blocks:
            found += block.norms
            found += [one for linear in block.linears for one in linear.tensors]
        return found if self.adapter is None else [*found, *self.adapter.tensors]

    @property
    def trunk_bytes(self) -> int:
        """Of the token embedding and the layers."""
        tensors, linears = list[Tensor](), list[Linear]()
        if isinstance(self._embedding, Int8Linear):
            linears.append(self._embedding)
        else:
            tensors.append(self._embedding)
        for block in self._blocks:
            linears += block.linears
            tensors += block.norms
        return _bytes(tensors) + sum(one.size_bytes for one in linears)

    @property
    def head_bytes(self) -> int:
        """Of the last norm and the head."""
        return _bytes([self._norm]) + (0 if self._head_shared else self._head.size_bytes)

    def hidden(self, rows: Rows, pages: ModelPages) -> Tensor:
        """(rows, width) states after the last layer, before the last norm. Keys and values are stored on the way."""
        shape = self.shape
        table = self._embedding
        states = table.rows(rows.ids) if isinstance(table, Int8Linear) else functional.embedding(rows.ids, table)
        if self._embedding_scale is not None:
            states = states * self._embedding_scale
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        for number, block in enumerate(self._blocks):
            layer = Layer(
                pages.keys[number], pages.values[number], shape.windows[number], shape.attention_scale, shape.score_cap
            )
            normed = self._normed(states, block.attention_norm)
            product = self._products(number, rows)
            mixed = product("qkv", block.qkv, normed)
            attended = product("output", block.output, self._attend(mixed, block, rows, layer, cos, sin))
            if block.attended_norm is not None:
                attended = self._normed(attended, block.attended_norm)
            states = states + attended
            gate, up = product("gate_up", block.gate_up, self._normed(states, block.mlp_norm)).chunk(2, dim=-1)
            told = product("down", block.down, self._activation(gate) * up)
            states = states + (told if block.told_norm is None else self._normed(told, block.told_norm))
        return states

    def logits(self, states: Tensor) -> Tensor:
        """(rows, vocabulary) float32 logits of the tokens after these states; of an embedding head (rows, width)."""
        return capped(self._head(self._normed(states, self._norm)), self._logit_cap).float()

    def _products(self, layer: int, rows: Rows) -> Callable[[str, Linear, Tensor], Tensor]:
        """(name in a Block, linear, states) -> their product, with what the adapter adds to it."""
        adapter = self.adapter
        if adapter is None:
            return lambda name, linear, states: linear(states)
        return lambda name, linear, states: adapter.added((layer, name), linear(states), states, rows.acting)

    def _attend(self, mixed: Tensor, block: Block, rows: Rows, layer: Layer, cos: Tensor, sin: Tensor) -> Tensor:
        """mixed: (rows, all heads * width) queries, keys and values."""
        shape = self.shape
        count, width = mixed.shape[0], shape.head_width
        mixed = mixed.view(count, -1, width)
        queries, keys, values = mixed.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if block.query_norm is not None and block.key_norm is not None:
            queries, keys = self._normed(queries, block.query_norm), self._normed(keys, block.key_norm)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if rows.stored is None:
            layer.keys[rows.pages, rows.slots] = keys
            layer.values[rows.pages, rows.slots] = values
        else:
            layer.keys[rows.pages, rows.slots] = keys[rows.stored]
            layer.values[rows.pages, rows.slots] = values[rows.stored]
        return rows.attention(queries, keys, values, layer).reshape(count, -1)

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, computed in float32 whatever the dtype (arXiv:1910.07467)."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return (weight * wide).to(states.dtype) if self._gemma else weight * wide.to(states.dtype)


def _block(shape: DecoderShape, number: int, norm: Read, make: Callable[[Sequence[str], bool], Linear]) -> Block:
    at = f"model.layers.{number}"

    def joined(*names: str, biased: bool = False) -> Linear:
        return make([f"{at}.{name}" for name in names], biased)

    fused, gemma, headed = (shape.family == family for family in ("phi3", "gemma2", "qwen3"))
    qkv = ["self_attn.qkv_proj"] if fused else ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    after = "post_attention_layernorm"
    return Block(
        attention_norm=norm(f"{at}.input_layernorm.weight"),
        qkv=joined(*qkv, biased=shape.attention_bias),
        output=joined("self_attn.o_proj", biased=shape.output_bias),
        mlp_norm=norm(f"{at}.{'pre_feedforward_layernorm' if gemma else after}.weight"),
        gate_up=joined(*(["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"]), biased=shape.mlp_bias),
        down=joined("mlp.down_proj", biased=shape.mlp_bias),
        query_norm=norm(f"{at}.self_attn.q_norm.weight") if headed else None,
        key_norm=norm(f"{at}.self_attn.k_norm.weight") if headed else None,
        attended_norm=norm(f"{at}.{after}.weight") if gemma else None,
        told_norm=norm(f"{at}.post_feedforward_layernorm.weight") if gemma else None,
    )


def _head(shape: DecoderShape, head: str, embedding: Tensor | Int8Linear, get: Read) -> Linear:
    if head == "embedding":
        return Unprojected()
    if isinstance(embedding, Int8Linear):
        return embedding if shape.tied else Int8Linear(get("lm_head.weight"))
    return dense(embedding if shape.tied else get("lm_head.weight"))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def read_network(
    shape: DecoderShape,
    files: DecoderFiles,
    dtype: torch.dtype,
    precision: str = "dense",
    device: str = "cpu",
    head: str = "lm",
    donors: Donors | None = None,
    adapter: Adapter | None = None,
) -> DecoderNetwork:
    """Raises ModelRefused for a missing or misshapen tensor."""
    with files.tensors() as tensors:
        sized = SizedTensors(tensors, shape)
        return DecoderNetwork(shape, sized, dtype, precision, device, head, donors or Donors(), adapter)
