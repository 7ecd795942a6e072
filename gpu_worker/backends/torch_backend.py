"""Decoder language models and sentence encoders on PyTorch, from safetensors and a local config only.

`launch.config`:
  kind                text_generation | embedding
  dtype               float32 (default) | bfloat16
  device              cpu (default), cuda, cuda:1, ...
  threads             intra-op threads of this process (default 1: many engines share a machine)
  max_tokens          text_generation: answer length when a request names none (default 64);
                      embedding: longest text (default 256)
  context_tokens      text_generation: prompt and answer together (default: what the network was built for)
and for text_generation what decoder/loading.py lists.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModel, PreTrainedModel

from gpu_worker.backends.base import LoadedModel, ModelRefused
from gpu_worker.backends.decoder.loading import DecoderLoader
from gpu_worker.backends.embedding import EmbeddingModel, Forward, Hidden, Tokens
from gpu_worker.backends.weights import verified_digest, whole_number
from sie_stream.control import ModelLaunch
from sie_stream.errors import did_you_mean
from sie_stream.ports import Clock

KINDS = ("text_generation", "embedding")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchBackend:
    """Serves decoders by our own engine (decoder/) and encoders by transformers.

    Threads are a setting of the process, so the last model loaded decides.
    """

    name = "torch"

    def __init__(self, clock: Clock) -> None:
        self._decoders = DecoderLoader(clock)

    def load(self, launch: ModelLaunch) -> LoadedModel:
        source = Path(launch.source)
        kind = _choice(launch, "kind", KINDS, "")
        dtype = DTYPES[_choice(launch, "dtype", tuple(DTYPES), "float32")]
        device = str(launch.config.get("device") or "cpu")
        torch.set_num_threads(max(1, whole_number(launch.config, "threads", 1)))
        digest = verified_digest(source, launch.weights_digest)
        if kind == "text_generation":
            return self._decoders.load(launch, dtype, device, digest)
        model = read_encoder(source, dtype, device)
        size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
        tokens_max = whole_number(launch.config, "max_tokens", 256)
        return EmbeddingModel(hidden_states(model), tokens_max, model.config.pad_token_id or 0, size, digest)

    def unload(self, model: LoadedModel) -> None:
        """Host memory goes with the last reference; a CUDA device keeps cached blocks until they are dropped."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def versions(self) -> dict[str, str]:
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        }


def _choice(launch: ModelLaunch, key: str, allowed: tuple[str, ...], default: str) -> str:
    value = launch.config.get(key, default)
    if value not in allowed:
        guess = did_you_mean(str(value), allowed)
        raise ModelRefused(
            "invalid_model_config", f"backend.config.{key}: {value!r} is not one of {', '.join(allowed)}.{guess}"
        )
    return str(value)


def read_encoder(source: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The network in evaluation mode. Runs no code from the folder and asks no hub. Raises ModelRefused."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, report = AutoModel.from_pretrained(
            source,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            add_pooling_layer=False,
        )
    except (OSError, ValueError, TypeError) as error:
        raise ModelRefused("weights_unreadable", f"transformers cannot read {source}: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelRefused("weights_unreadable", f"{source} lacks tensors that its config.json promises: {missing}.")
    return model.to(device).eval()


def hidden_states(model: PreTrainedModel) -> Forward:
    """The encoder as a function on arrays."""

    @torch.inference_mode()
    def forward(ids: Tokens, mask: Tokens) -> Hidden:
        device = model.device
        out = model(input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device))
        return out.last_hidden_state.float().cpu().numpy()

    return forward
