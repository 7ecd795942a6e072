"""How large each tensor of a decoder must be by its config. What does not fit is refused when the model is loaded: a
norm of another width would only fail, or be stretched over the states, when a request runs."""

from __future__ import annotations

from torch import Tensor

from gpu_worker.backends.decoder.shape import DecoderShape
from gpu_worker.backends.gguf_file import GROUP, Q4_1_BYTES
from gpu_worker.backends.tensors import Size, Tensors, wrong_size

LAYERS = "model.layers."


def sizes_of(shape: DecoderShape) -> dict[str, Size]:
    """Of the weights, by name; those of a layer by what follows its number."""
    width, inner = shape.width, shape.inner
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        "model.embed_tokens": (shape.vocabulary, width),
        "lm_head": (shape.vocabulary, width),
        "model.norm": (width,),
        **dict.fromkeys(norms, (width,)),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (shape.head_width,)),
        "self_attn.q_proj": (queries, width),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, width)),
        "self_attn.qkv_proj": (queries + 2 * keys, width),
        "self_attn.o_proj": (width, queries),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, width)),
        "mlp.gate_up_proj": (2 * inner, width),
        "mlp.down_proj": (width, inner),
    }


class SizedTensors:
    """The tensors of a file, each looked at before it is used. Raises ModelRefused for one of another size."""

    def __init__(self, tensors: Tensors, shape: DecoderShape) -> None:
        self._tensors = tensors
        self._sizes = sizes_of(shape)

    def __call__(self, name: str) -> Tensor:
        return self._fitting(name, self._tensors(name), self._size(name))

    def blocks(self, name: str) -> Tensor | None:
        """As Tensors.blocks."""
        found = self._tensors.blocks(name)
        if found is None:
            return None
        outs, ins = self._size(name)
        return self._fitting(name, found, (outs, ins // GROUP, Q4_1_BYTES))

    def _size(self, name: str) -> Size:
        stem, _, what = name.rpartition(".")
        part = stem.split(".", 3)[3] if stem.startswith(LAYERS) else stem
        size = self._sizes[part]
        return size[:1] if what == "bias" else size

    def _fitting(self, name: str, tensor: Tensor, size: Size) -> Tensor:
        if tensor.shape != size:
            raise wrong_size(self._tensors.source, name, tensor, size)
        return tensor
