"""What the Open Inference Protocol v2 asks and answers, the same over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from gpu_worker.backends.served.tensors import Tensor, TensorSpec


class ServerInfo(Struct, frozen=True):
    name: str = ""
    version: str = ""
    extensions: tuple[str, ...] = ()

    @property
    def manages_models(self) -> bool:
        return "model_repository" in self.extensions


class ModelInfo(Struct, frozen=True):
    """A model as the server describes it. Shapes are whole, with the batch dimension where there is one."""

    versions: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch_max: int | None
    """Most rows in one request; 0: requests have no batch dimension; None: the server does not say."""


class InferenceServer(Protocol):
    """One connection. Every method raises a ServerFailure; used from several threads."""

    def live(self) -> bool:
        """Whether the server answers at all. Never raises."""
        ...

    def ready(self) -> bool:
        """Whether it takes work. Never raises."""
        ...

    def info(self, timeout_s: float) -> ServerInfo: ...

    def model(self, name: str, version: str, timeout_s: float, describes_batches: bool) -> ModelInfo:
        """`describes_batches`: the server has the model_configuration extension."""
        ...

    def model_ready(self, name: str, version: str, timeout_s: float) -> bool: ...

    def load(self, name: str, timeout_s: float) -> None: ...

    def unload(self, name: str, timeout_s: float) -> None: ...

    def states(self, timeout_s: float) -> dict[str, str]:
        """State of each model in the repository by name: READY, LOADING, UNLOADING, UNAVAILABLE, or nothing."""
        ...

    def infer(
        self,
        model: str,
        version: str,
        tensors: Mapping[str, tuple[TensorSpec, Tensor]],
        outputs: Sequence[str],
        timeout_s: float,
    ) -> dict[str, Tensor]:
        """One request. BadAnswer when an output is missing or is not what it says."""
        ...

    def close(self) -> None: ...
