"""From a launch to a loaded decoder.

`launch.config`, besides what torch_backend.py lists:
  precision       dense (weights as `dtype`, default) | fp32 | bf16 | fp16 | int8 | int4 (both weight-only)
  max_num_seqs    requests that run at once (default 32)
  step_tokens     tokens of one step, all requests together (default 256; at least max_num_seqs)
  kv_mb           size of the KV pool, if this model is the first on its device (default 256)
  swap_mb         host memory for keys and values of requests that give way while the pool is full (default 64); where
                  it is full too, or copying costs more than computing, they are computed again. 0: always
  head            lm (default): answers and scores | embedding: a unit vector of the last states
  pooling         of an embedding head: mean (default) over all tokens | last: the last token's
  repeatable      true: the same bits whatever runs beside a request, at a lower speed (default false)
  base            folder (or GGUF file) of the base model; `source` is then the folder of a LoRA adapter for it, in the
                  files PEFT writes: plain, or activated (alora_invocation_tokens). A declaration may name a declared
                  model instead, `model:NAME[@VERSION]`; the scheduler then puts that one's source here, its digest
                  into base_digest, and which it was into base_model
  base_digest     of the weights of the base; others are refused (default: any)
  lora_rank, lora_sharing
                  `lora.rank` and `lora.sharing` of the declaration, which puts them here
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import msgspec
import torch

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.adapter import Adapter, read_adapter
from gpu_worker.backends.decoder.arena import Arenas, ModelPages
from gpu_worker.backends.decoder.bases import base_of, refuse_adapter
from gpu_worker.backends.decoder.files import DecoderFiles, files_of
from gpu_worker.backends.decoder.flight import DecoderLimits
from gpu_worker.backends.decoder.frozen import Intake, Origin
from gpu_worker.backends.decoder.grammar import Grammars
from gpu_worker.backends.decoder.linear import PRECISIONS
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.decoder.network import HEADS
from gpu_worker.backends.decoder.readers import POOLINGS, Embedder, PrefixSums
from gpu_worker.backends.decoder.runner import FastRunner, RepeatableRunner
from gpu_worker.backends.decoder.shape import DecoderShape, shape_of
from gpu_worker.backends.decoder.trunk import LoadedNetwork, Trunks, Wanted
from gpu_worker.backends.slots.tensor_weights import tensor_weights
from gpu_worker.backends.weights import local_source, verified_digest, whole_number
from gpu_worker.decoding.invocation import Invocation
from gpu_worker.decoding.kv_tier import KvTier
from gpu_worker.decoding.step_scheduler import StepLimits, StepScheduler
from gpu_worker.decoding.swapping import SwapLimits, SwapSpace
from gpu_worker.decoding.transcript import Detokenise
from sie_stream.adapter_digests import over
from sie_stream.control import ModelLaunch
from sie_stream.edge.tokenizer import shared_tokenizers
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.ports import Clock
from sie_stream.trunks import digest_of

MIB = 1024 * 1024


class Sources(NamedTuple):
    """Where the network lies, and the adapter over it, if there is one; and the digests of their files."""

    network: Path
    network_digest: Future[str]
    adapter: Path | None = None
    adapter_digest: Future[str] | None = None

    @property
    def declared_digest(self) -> str:
        """Of what `source` of the declaration names."""
        return (self.adapter_digest or self.network_digest).result()

    @property
    def answering_digest(self) -> str:
        """Of all that answers depend on: results carry it."""
        if self.adapter_digest is None:
            return self.network_digest.result()
        return over(self.adapter_digest.result(), self.network_digest.result())

    @property
    def digest(self) -> str:
        """Of all of it."""
        if self.adapter_digest is None:
            return self.network_digest.result()
        return digest_of(f"{self.network_digest.result()} {self.adapter_digest.result()}".encode())


class DecoderLoader:
    """Loads decoders that share arenas, trunks, tokenizers and a lock. One object per engine process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._arenas = Arenas()
        self._trunks = Trunks()
        self._tokenizers = shared_tokenizers()
        self._lock = RLock()
        self._load_network = self._trunks.load
        self._memory: memoryview | None = None
        self._tier: KvTier | None = None

    def keep_weights_apart(self) -> None:
        """Models of one trunk share keys and values from now on, and no weights."""
        self._load_network = self._trunks.load_alone

    def keep_in(self, memory: memoryview) -> None:
        self._memory = memory

    def _opened(self) -> KvTier | None:
        """Opened by the first load, not before: until then another process may be its writer, whose spare we are."""
        if self._tier is None and self._memory is not None:
            self._tier = KvTier(self._memory)
        return self._tier

    def load(self, launch: ModelLaunch, dtype: torch.dtype, device: str, digest: Future[str]) -> DecoderModel:
        """digest: of `launch.source`. Raises ModelRefused; also what `digest` raises."""
        source, base = local_source(launch.source), base_of(launch)
        if base is None:
            refuse_adapter(source)
            return self._load(launch, dtype, device, Sources(source, digest))
        with ThreadPoolExecutor(1) as beside:
            expected = str(launch.config.get("base_digest") or "")
            hashed = beside.submit(verified_digest, base, expected)
            return self._load(launch, dtype, device, Sources(base, hashed, source, digest))

    def _load(self, launch: ModelLaunch, dtype: torch.dtype, device: str, sources: Sources) -> DecoderModel:
        files = files_of(sources.network)
        shape = shape_of(files.config)
        limits = _limits(launch, files, shape)
        shape = msgspec.structs.replace(shape, positions=limits.context_tokens)
        adapter = _adapter(launch, sources, shape, dtype, device)
        steps = _steps(launch)
        runner_type = _runner_type(launch)
        size = whole_number(launch.config, "kv_mb", 256) * MIB
        with self._lock:
            arena = self._arenas.arena_for(shape, dtype, device, size)
        pages = ModelPages(arena, shape, dtype)
        head = _choice(launch, "head", HEADS)
        wanted = Wanted(
            *(sources.network, files, sources.network_digest, shape, dtype),
            *(_choice(launch, "precision", tuple(PRECISIONS)), device, head, runner_type.arithmetic),
            *(pages.block_tokens, adapter),
        )
        alone = adapter is not None and not _flag(launch, "lora_sharing", default=True)
        loaded = (self._trunks.load_alone if alone else self._load_network)(wanted)
        pooling = _choice(launch, "pooling", POOLINGS)
        embedder = Embedder(pooling, PrefixSums(pages.block_tokens, arena.pool.count)) if head == "embedding" else None
        origin = Origin(loaded.trunk, sources.digest, f"{head} {pooling}" if embedder is not None else head)
        return DecoderModel(
            runner=runner_type(loaded.network, pages),
            scheduler=StepScheduler(
                *(arena.pool, pages.block_tokens, loaded.trunk.opening.encode(), steps), SwapSpace(_swap(launch, pages))
            ),
            intake=Intake(
                *(origin, limits, self._detokenise(launch), _grammars(launch, limits), embedder), _invocation(loaded)
            ),
            pages=pages,
            sequences_max=steps.sequences_max,
            clock=self._clock,
            lock=self._lock,
            memory_bytes=loaded.network.memory_bytes,
            parts=loaded.parts,
            tier=self._opened(),
            weights=tensor_weights(loaded.network.tensors),
            pools={arena.name: arena.size_bytes},
            weights_digest=sources.answering_digest,
        )

    def _detokenise(self, launch: ModelLaunch) -> Detokenise | None:
        if not launch.tokenizer:
            return None
        try:
            return self._tokenizers.get(launch.tokenizer).decode
        except ConfigError as error:
            raise ModelRefused("tokenizer_unreadable", str(error)) from error


def _grammars(launch: ModelLaunch, limits: DecoderLimits) -> Grammars | None:
    if not launch.tokenizer:
        return None
    file = Path(launch.tokenizer)
    file = file / "tokenizer.json" if file.is_dir() else file
    return Grammars(file.read_text(encoding="utf-8"), limits.vocabulary, sorted(limits.stop_token_ids))


def _runner_type(launch: ModelLaunch) -> type[FastRunner] | type[RepeatableRunner]:
    return RepeatableRunner if _flag(launch, "repeatable", default=False) else FastRunner


def _flag(launch: ModelLaunch, key: str, *, default: bool) -> bool:
    value = launch.config.get(key, default)
    if not isinstance(value, bool):
        raise ModelRefused("invalid_model_config", f"backend.config.{key}: {value!r} is not true or false.")
    return value


def _adapter(
    launch: ModelLaunch, sources: Sources, shape: DecoderShape, dtype: torch.dtype, device: str
) -> tuple[Adapter, str] | None:
    """With the digest of its files."""
    if sources.adapter is None:
        return None
    adapter = read_adapter(sources.adapter, shape, dtype, device, whole_number(launch.config, "lora_rank", 0))
    return adapter, sources.declared_digest


def _invocation(loaded: LoadedNetwork) -> Invocation | None:
    adapter = loaded.network.adapter
    if adapter is None or not adapter.invocation:
        return None
    return Invocation(adapter.invocation, loaded.trunk.digest.encode())


def _choice(launch: ModelLaunch, key: str, known: tuple[str, ...]) -> str:
    """The first of `known` is the default."""
    value = str(launch.config.get(key, known[0]))
    if value not in known:
        raise ModelRefused(
            "invalid_model_config",
            f"backend.config.{key}: {value!r} is not one of {', '.join(known)}.{did_you_mean(value, known)}",
        )
    return value


def _steps(launch: ModelLaunch) -> StepLimits:
    sequences = whole_number(launch.config, "max_num_seqs", 32) or 1
    tokens = whole_number(launch.config, "step_tokens", max(256, sequences))
    if tokens < sequences:
        raise ModelRefused(
            "invalid_model_config",
            f"backend.config.step_tokens: {tokens} is less than max_num_seqs ({sequences}); every running request "
            "needs a token in every step.",
        )
    return StepLimits(sequences, tokens)


def _swap(launch: ModelLaunch, pages: ModelPages) -> SwapLimits:
    size = whole_number(launch.config, "swap_mb", 64) * MIB
    return SwapLimits(size // pages.used_bytes, pages.used_bytes)


def _limits(launch: ModelLaunch, files: DecoderFiles, shape: DecoderShape) -> DecoderLimits:
    built_for = shape.positions
    return DecoderLimits(
        context_tokens=min(whole_number(launch.config, "context_tokens", built_for) or built_for, built_for),
        max_tokens_default=whole_number(launch.config, "max_tokens", 64) or 64,
        stop_token_ids=files.stop_tokens,
        vocabulary=shape.vocabulary,
    )
