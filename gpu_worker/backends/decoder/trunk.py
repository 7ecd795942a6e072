"""The trunk digest of a decoder, and which loaded networks have a trunk in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from weakref import WeakSet

import msgspec
import torch

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.adapter import Adapter
from gpu_worker.backends.decoder.files import DecoderFiles
from gpu_worker.backends.decoder.linear import PRECISIONS, dense
from gpu_worker.backends.decoder.network import DecoderNetwork, Donors, read_network
from gpu_worker.backends.decoder.shape import DecoderShape
from sie_stream.trunks import Trunk, adapted, digest_of, trunk_of

TRUNK_TENSORS = ("model.embed_tokens.", "model.layers.")
HEAD_TENSORS = ("model.norm.", "lm_head.")
HEADER_BYTES_MAX = 100_000_000
"""As the safetensors library has it."""


class WeightDigests(NamedTuple):
    """Of the tensors of the trunk and of those of the language model's head."""

    trunk: str
    head: str


class TrunkHasher:
    """Digests of tensors by name. One read of the files for each set of weights: what was told is kept."""

    def __init__(self) -> None:
        self._known: dict[str, WeightDigests] = {}
        self._lock = Lock()

    def digests(self, source: Path, weights_digest: Future[str]) -> WeightDigests:
        """`weights_digest` names all of the content of `source`. Files other than safetensors stand for themselves as
        a whole: their trunk is equal only to that of an equal file. Raises ModelRefused for a damaged file, and what
        `weights_digest` raises.
        """
        with self._lock:
            if self._known and (known := self._known.get(weights_digest.result())):
                return known
            files = sorted(source.glob("*.safetensors"))
            # Of the first model this goes on beside the digest of the whole, which takes as long.
            found = _of_files(files) if files else WeightDigests(*[weights_digest.result()] * 2)
            self._known[weights_digest.result()] = found
            return found


def _of_files(files: list[Path]) -> WeightDigests:
    try:
        digests = dict(one for file in files for one in _tensor_digests(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused("weights_unreadable", f"cannot read {files[0].parent}: {error!r}") from error

    def joined(prefixes: tuple[str, ...]) -> str:
        lines = [f"{name} {digests[name]}" for name in sorted(digests) if name.startswith(prefixes)]
        return digest_of("\n".join(lines).encode())

    return WeightDigests(joined(TRUNK_TENSORS), joined(HEAD_TENSORS))


def _tensor_digests(file: Path) -> Iterator[tuple[str, str]]:
    """(name, digest of dtype, shape and bytes) of the tensors that count.

    The format: a length of 8 bytes, as much JSON, then the bytes of the tensors
    (https://github.com/huggingface/safetensors#format).
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > HEADER_BYTES_MAX:
            raise ValueError(f"{file.name} has a header of {length} bytes")
        header = json.loads(stream.read(length))
        for name, about in header.items():
            if not name.startswith(TRUNK_TENSORS + HEAD_TENSORS):
                continue
            start, end = about["data_offsets"]
            stream.seek(8 + length + start)
            total = hashlib.sha256(f"{about['dtype']} {about['shape']}\n".encode())
            for part in _parts(end - start):
                read = stream.read(part)
                if len(read) < part:
                    raise ValueError(f"{file.name} ends within {name}")
                total.update(read)
            yield name, total.hexdigest()


def _parts(size: int, at_most: int = 1 << 24) -> Iterator[int]:
    while size > 0:
        yield min(size, at_most)
        size -= at_most


class Wanted(NamedTuple):
    """A network to be loaded.

    precision: of the weights. head: one of HEADS. arithmetic: of the runner. block_tokens: of a page. adapter: to be
    laid over it, with the digest of its files; all else is then of its base.
    """

    source: Path
    files: DecoderFiles
    weights_digest: Future[str]
    shape: DecoderShape
    dtype: torch.dtype
    precision: str
    device: str
    head: str
    arithmetic: str
    block_tokens: int
    adapter: tuple[Adapter, str] | None = None


class LoadedNetwork(NamedTuple):
    """parts: bytes by digest of what others may have in common with it (see engine_messages.Loaded): of trunk and head,
    never of an adapter. trunk: the adapter's, if there is one."""

    network: DecoderNetwork
    trunk: Trunk
    parts: dict[str, int]


class Trunks:
    """Networks in memory by the parts they consist of. Keeps none of them alive. One object per engine process."""

    def __init__(self) -> None:
        self._hasher = TrunkHasher()
        self._networks: dict[str, WeakSet[DecoderNetwork]] = {}
        """By digest of trunk and of head."""

    def load(self, wanted: Wanted) -> LoadedNetwork:
        """Reads what is not in memory yet. Raises ModelRefused."""
        with ThreadPoolExecutor(1) as beside:
            # Hashing takes about as long as reading: one need not wait for the other when there is nothing to share.
            hashed = beside.submit(self._hasher.digests, wanted.source, wanted.weights_digest)
            donors = self._donors(wanted, hashed.result()) if any(self._networks.values()) else Donors()
            network = _read(wanted, donors)
            trunk = _trunk(wanted, hashed.result().trunk)
            names = _part_names(wanted, trunk, hashed.result())
        for name in names:
            self._networks.setdefault(name, WeakSet()).add(network)
        sizes = (network.trunk_bytes, network.head_bytes)
        return LoadedNetwork(network, _with_adapter(trunk, wanted), dict(zip(names, sizes, strict=True)))

    def load_alone(self, wanted: Wanted) -> LoadedNetwork:
        """With weights of its own, which no other network will use either. Raises ModelRefused."""
        with ThreadPoolExecutor(1) as beside:
            hashed = beside.submit(self._hasher.digests, wanted.source, wanted.weights_digest)
            network = _read(wanted, Donors())
            return LoadedNetwork(network, _with_adapter(_trunk(wanted, hashed.result().trunk), wanted), {})

    def _donors(self, wanted: Wanted, weights: WeightDigests) -> Donors:
        names = _part_names(wanted, _trunk(wanted, weights.trunk), weights)
        return Donors(*[next(iter(self._networks.get(name, ())), None) for name in names])


def _read(wanted: Wanted, donors: Donors) -> DecoderNetwork:
    return read_network(
        *(wanted.shape, wanted.files, wanted.dtype, wanted.precision, wanted.device, wanted.head),
        donors,
        wanted.adapter and wanted.adapter[0],
    )


def _part_names(wanted: Wanted, trunk: Trunk, weights: WeightDigests) -> tuple[str, str]:
    """Of the trunk and of what comes after it, where they lie."""
    head = f"{wanted.head} {wanted.shape.tied} {weights.head}"
    return digest_of(f"{wanted.device} {trunk.digest}".encode()), digest_of(
        f"{wanted.device} {trunk.digest} {head}".encode()
    )


def _with_adapter(trunk: Trunk, wanted: Wanted) -> Trunk:
    if wanted.adapter is None:
        return trunk
    adapter, digest = wanted.adapter
    return adapted(trunk, digest, adapter.invocation)


def _trunk(wanted: Wanted, weights: str) -> Trunk:
    shape = wanted.shape
    # How far positions go, how many tokens there are and what the head is made of change no key and no value.
    network = msgspec.structs.replace(shape, positions=0, vocabulary=0, tied=False, rope={}, logit_cap=None)
    encode = msgspec.json.Encoder(order="deterministic").encode
    precision = "dense" if PRECISIONS[wanted.precision] is dense else wanted.precision  # dense has several names
    return trunk_of(
        weights=weights,
        network=encode(network),
        rope=encode(shape.rope),
        precision=f"{str(wanted.dtype).removeprefix('torch.')}, {precision}, {wanted.arithmetic}",
        layout=f"{wanted.block_tokens} tokens x {shape.layers} layers x {shape.kv_heads} heads x {shape.head_width}",
    )
