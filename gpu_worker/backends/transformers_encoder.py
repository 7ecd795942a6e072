"""Encoders that have no forward pass of our own, by transformers. Imported only when such a model is loaded: the
library takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.embedding import Hidden, Tokens
from gpu_worker.backends.tensors import fitting
from gpu_worker.edge.process_limits import room_for_mapping

POSITIONS_UNKNOWN = 1 << 30
"""Positions that are computed, not looked up, have no end."""
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text", "longformer")


class TransformersEncoder:
    """A function on arrays: (ids, mask), both (batch, tokens) -> (batch, tokens, width)."""

    def __init__(self, source: Path, dtype: torch.dtype, device: str) -> None:
        """Runs no code from the folder and asks no hub. Raises ModelRefused."""
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            with fitting(source), room_for_mapping(sum(file.stat().st_size for file in source.glob("*.safetensors"))):
                model, report = AutoModel.from_pretrained(
                    source,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype=dtype,
                    output_loading_info=True,
                )
                leave_mapping(model)
        except (OSError, ValueError, TypeError) as error:
            raise ModelRefused("weights_unreadable", f"transformers cannot read {source}: {error}") from error
        missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if missing:
            message = f"{source} lacks tensors that its config.json promises: {', '.join(missing[:3])}."
            raise ModelRefused("weights_unreadable", message)
        if hasattr(model, "pooler"):
            model.pooler = None  # answers are made of the hidden states; many files have no weights for it
        self._model = model.to(device).eval()
        self.pad_id: int = model.config.pad_token_id or 0
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.positions: int = positions_of(model.config)
        self.memory_bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that decides its answers."""
        return [*self._model.parameters(), *self._model.buffers()]

    @torch.inference_mode()
    def __call__(self, ids: Tokens, mask: Tokens) -> Hidden:
        device = self._model.device
        out = self._model(input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device))
        return out.last_hidden_state.float().cpu().numpy()


def leave_mapping(model: torch.nn.Module) -> None:
    """Weights that have the type of the file lie in it, and nothing tells which do: each becomes a copy, one after the
    other, so that the file is let go."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def positions_of(config: Any) -> int:
    """Tokens that the network has positions for. RoBERTa and its kin count from the padding's id on."""
    positions = getattr(config, "max_position_embeddings", None) or POSITIONS_UNKNOWN
    return positions - ((config.pad_token_id or 0) + 1 if config.model_type in COUNT_FROM_PADDING else 0)
