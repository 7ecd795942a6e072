"""Tensors by name, from whatever file holds them. Files are mapped, not read: what is never asked for costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.backends.base import ModelRefused

Size = tuple[int, ...]


class Tensors:
    """What one model's files hold. A tensor may lie in the mapped file: copy what is to be kept."""

    def __init__(
        self,
        source: Path,
        getters: Mapping[str, Callable[[], Tensor]],
        blocks: Mapping[str, Callable[[], Tensor | None]] | None = None,
    ) -> None:
        self.source = source
        self._getters = getters
        self._blocks = blocks or {}

    def __contains__(self, name: str) -> bool:
        return name in self._getters

    def __call__(self, name: str) -> Tensor:
        """Raises ModelRefused for a tensor that is missing."""
        getter = self._getters.get(name)
        if getter is None:
            raise ModelRefused(
                "weights_unreadable", f"{self.source} lacks tensors that its config.json promises: {name}."
            )
        return getter()

    def blocks(self, name: str) -> Tensor | None:
        """4-bit blocks as decoder/int4.py keeps them, if the file has the tensor in them."""
        getter = self._blocks.get(name)
        return None if getter is None else getter()


def wrong_size(source: Path, name: str, tensor: Tensor, size: Size) -> ModelRefused:
    """What to raise for a tensor that is not as large as its config says."""
    return ModelRefused(
        "weights_unreadable",
        f"{source}: the size of {name} is {tuple(tensor.shape)}, and by its config.json {size}. The two are not of one "
        "model, or the file is damaged: fetch it again.",
    )


@contextmanager
def safetensors_of(source: Path) -> Iterator[Tensors]:
    """Everything in the *.safetensors of a folder. Raises ModelRefused, also for tensors that do not fit together
    while the caller puts them together."""
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ModelRefused("weights_unreadable", f"cannot read {source}: no *.safetensors in it.")
    with ExitStack() as stack, fitting(source):
        try:
            opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        except (SafetensorError, OSError) as error:
            raise ModelRefused("weights_unreadable", f"cannot read {source}: {error}") from error
        # An open file has keys(), but is no mapping.
        yield Tensors(source, {name: partial(file.get_tensor, name) for file in opened for name in file.keys()})  # noqa: SIM118


@contextmanager
def fitting(source: Path) -> Iterator[None]:
    """Turns torch's complaint about shapes into ModelRefused."""
    try:
        yield
    except RuntimeError as error:
        raise ModelRefused("weights_unreadable", f"{source}: tensors do not fit its config.json: {error}") from error
