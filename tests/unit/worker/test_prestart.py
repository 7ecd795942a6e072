"""Which engines a worker starts before a model asks for them."""

from __future__ import annotations

import pytest

from gpu_worker.main import known_backends
from sie_stream.errors import ConfigError

INSTALLED = ("onnx", "sklearn", "torch")


@pytest.mark.parametrize(
    ("names", "found"), [("", ()), ("torch", ("torch",)), (" torch , sklearn,torch,", ("torch", "sklearn"))]
)
def test_names_are_separated_by_commas(names: str, found: tuple[str, ...]) -> None:
    assert known_backends("setting prestart_engines", names, INSTALLED) == found


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as refusal:
        known_backends("setting prestart_engines", "sklearn,troch", INSTALLED)
    assert str(refusal.value) == (
        "setting prestart_engines: 'troch' is not installed here. "
        "Installed: onnx, sklearn, torch. Did you mean 'torch'?"
    )
