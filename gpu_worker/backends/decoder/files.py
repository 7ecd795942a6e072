"""What a decoder is loaded from: a folder of safetensors with its configs, or a GGUF file, alone or in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.config import NetworkConfig, read_config
from gpu_worker.backends.decoder.gguf_names import gguf_config, gguf_stop_tokens, gguf_tensors
from gpu_worker.backends.gguf_file import GgufFile
from gpu_worker.backends.tensors import Tensors, fitting, safetensors_of
from gpu_worker.backends.weights import only_file


class DecoderFiles(Struct, frozen=True):
    config: NetworkConfig
    stop_tokens: frozenset[int]
    tensors: Callable[[], AbstractContextManager[Tensors]]
    """Open while the network is made. Raises ModelRefused, also for what goes wrong inside."""


def files_of(source: Path) -> DecoderFiles:
    """Raises ModelRefused. A folder that has both is one of safetensors."""
    if source.suffix == ".gguf" or (not any(source.glob("*.safetensors")) and any(source.glob("*.gguf"))):
        file = GgufFile(only_file(source, ".gguf"))
        return DecoderFiles(gguf_config(file), gguf_stop_tokens(file), partial(_opened, file, source))
    return DecoderFiles(read_config(source), _stop_tokens(source), partial(safetensors_of, source))


@contextmanager
def _opened(file: GgufFile, source: Path) -> Iterator[Tensors]:
    with fitting(source):
        yield gguf_tensors(file, source)


class _StopTokens(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _stop_tokens(source: Path) -> frozenset[int]:
    """eos_token_id of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = source / name
        if not file.is_file():
            continue
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_StopTokens).eos_token_id
        except msgspec.DecodeError as error:
            raise ModelRefused("weights_unreadable", f"{file}: {error}") from error
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
