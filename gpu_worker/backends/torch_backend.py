"""Decoders and sentence encoders on PyTorch, from safetensors and a local config; decoders from GGUF, too.

`launch.config`:
  kind                text_generation | embedding
  dtype               float32 (default) | bfloat16 | float16
  device              cpu (default), cuda, cuda:1, ...
  threads             intra-op threads of this process (default 1: many engines share a machine)
  max_tokens          text_generation: answer length when a request names none (default 64);
                      embedding: longest text (default 256)
  context_tokens      text_generation: prompt and answer together (default: what the network was built for)
and for text_generation what decoder/loading.py lists.
"""

from __future__ import annotations

import platform
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import torch

from gpu_worker.backends.base import LoadedModel, ModelRefused
from gpu_worker.backends.bert import bert_shape, read_bert
from gpu_worker.backends.decoder.loading import DecoderLoader
from gpu_worker.backends.embedding import EmbeddingModel
from gpu_worker.backends.slots.tensor_weights import tensor_weights
from gpu_worker.backends.weights import local_source, verified_digest, whole_number
from sie_stream.backend_facts import KINDS_OF_BACKEND, PRECISIONS_OF_KIND
from sie_stream.control import ModelLaunch
from sie_stream.errors import did_you_mean
from sie_stream.ports import Clock

KINDS = KINDS_OF_BACKEND["torch"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DECLARED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `preferred_precision` of a declaration calls them; as backend.config.precision they go before the dtype."""


class TorchBackend:
    """Serves decoders by our own engine (decoder/), BERT by our own forward pass, and other encoders by transformers.

    Threads are a setting of the process, so the last model loaded decides. Implements KeepsBlocks.
    """

    name = "torch"

    def __init__(self, clock: Clock) -> None:
        self._decoders = DecoderLoader(clock)

    def keep_weights_apart(self) -> None:
        self._decoders.keep_weights_apart()

    def load(self, launch: ModelLaunch) -> LoadedModel:
        """The digest is taken beside the loading, which reads the same files. Raises ModelRefused."""
        source = local_source(launch.source)
        kind = _choice(launch, "kind", KINDS, "")
        launch = in_chosen_precision(launch, kind)
        dtype = DTYPES[_choice(launch, "dtype", tuple(DTYPES), "float32")]
        dtype = DECLARED.get(str(launch.config.get("precision")), dtype)
        device = str(launch.config.get("device") or "cpu")
        torch.set_num_threads(max(1, whole_number(launch.config, "threads", 1)))
        with ThreadPoolExecutor(1) as beside:
            digest = beside.submit(verified_digest, source, launch.weights_digest)
            try:
                if kind == "text_generation":
                    return self._decoders.load(launch, dtype, device, digest)
                return _encoder(launch, dtype, device, digest)
            except ModelRefused:
                digest.result()  # that the files are the wrong ones says more than what is wrong in them
                raise

    def keep_in(self, memory: memoryview) -> None:
        self._decoders.keep_in(memory)

    def unload(self, model: LoadedModel) -> None:
        """Host memory goes with the last reference; a CUDA device keeps cached blocks until they are dropped."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def versions(self) -> dict[str, str]:
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
        }


def _choice(launch: ModelLaunch, key: str, allowed: tuple[str, ...], default: str) -> str:
    value = launch.config.get(key, default)
    if value not in allowed:
        guess = did_you_mean(str(value), allowed)
        raise ModelRefused(
            "invalid_model_config", f"backend.config.{key}: {value!r} is not one of {', '.join(allowed)}.{guess}"
        )
    return str(value)


def in_chosen_precision(launch: ModelLaunch, kind: str) -> ModelLaunch:
    """The launch with `config.precision` as the scheduler chose it.

    Raises ModelRefused when config asks for another one, or when a model of this kind cannot be loaded in it.
    """
    given, chosen = launch.config.get("precision"), launch.precision
    loads = PRECISIONS_OF_KIND["torch"][kind]
    if not chosen:
        if given is not None and kind == "embedding":
            _choice(launch, "precision", (*loads, "dense"), "dense")
        return launch  # decoder/loading.py looks at what others are given
    if chosen not in loads:
        raise ModelRefused(
            "invalid_model_config",
            f"preferred_precision: {chosen!r} was chosen, and models of kind {kind} are loaded in {', '.join(loads)}.",
        )
    dtype = launch.config.get("dtype")
    if given not in (None, chosen):
        key, value = "precision", given
    elif given is None and chosen in DECLARED and DTYPES.get(str(dtype or ""), DECLARED[chosen]) != DECLARED[chosen]:
        key, value = "dtype", dtype
    else:
        return msgspec.structs.replace(launch, config={**launch.config, "precision": chosen})
    raise ModelRefused(
        "invalid_model_config",
        f"backend.config.{key}: {value!r}, but the replica was placed in {chosen!r}, of preferred_precision. Leave "
        f"{key} out of backend.config, or let preferred_precision begin with what it says.",
    )


def _encoder(launch: ModelLaunch, dtype: torch.dtype, device: str, digest: Future[str]) -> EmbeddingModel:
    source = local_source(launch.source)
    file = source / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelRefused("weights_unreadable", f"cannot read {file}: {error}") from error
    shape = bert_shape(config)
    if shape is not None:
        encoder = read_bert(shape, source, dtype, device)
    else:
        # Imported only now: transformers takes seconds.
        encoder = import_module("gpu_worker.backends.transformers_encoder").TransformersEncoder(source, dtype, device)
    if not 0 <= encoder.pad_id < encoder.vocabulary:
        message = f"{file}: pad_token_id {encoder.pad_id} is not one of 0 to {encoder.vocabulary - 1}, its vocabulary."
        raise ModelRefused("weights_unreadable", message)
    tokens_max = min(whole_number(launch.config, "max_tokens", 256) or 256, encoder.positions)
    sizes = (tokens_max, encoder.pad_id, encoder.memory_bytes)
    return EmbeddingModel(encoder, *sizes, digest.result(), encoder.vocabulary, tensor_weights(encoder.tensors))
