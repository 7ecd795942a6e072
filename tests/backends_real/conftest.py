"""Environments of other people's servers, made by `make test-backends`. A test skips when its own is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.backends_real.environments import ROOT, SMOLLM2, interpreter


@pytest.fixture(autouse=True)
def servers_may_start(no_settings_from_outside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of these tests lists the servers that `make test-backends` installs."""
    pythons = [ROOT / f".venv-{name}" / "bin" / "python" for name in ("triton", "vllm", "sglang")]
    tritons = pythons[0].parents[1].glob("lib/python3.*/site-packages/pytriton/tritonserver/bin/tritonserver")
    monkeypatch.setenv("SIE_STREAM_LAUNCHABLE_SERVERS", ",".join(map(str, (*pythons, *tritons))))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"no weights at {SMOLLM2.relative_to(ROOT)}: run `make models`")
    return SMOLLM2


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Triton's binary, its folder of backends (with the stub of this Python in it), and variables it needs."""
    python = interpreter("triton")
    (site,) = (python.parents[1] / "lib").glob("python3.*/site-packages")
    root = site / "pytriton" / "tritonserver"
    backends = tmp_path_factory.mktemp("triton") / "backends"
    shutil.copytree(root / "backends", backends, symlinks=True)
    release = site.parent.name.removeprefix("python")
    libraries = site / "nvidia_pytriton.libs"
    # Both find their libraries by a path from where they lie, so they are linked instead of moved.
    python_backend = backends / "python"
    (python_backend / "libtriton_python.so").unlink()
    (python_backend / "libtriton_python.so").symlink_to(root / "backends" / "python" / "libtriton_python.so")
    stub = root / "python_backend_stubs" / release / "triton_python_backend_stub"
    (python_backend / stub.name).symlink_to(stub)
    prefix = Path((python.parents[1] / "pyvenv.cfg").read_text().partition("home = ")[2].splitlines()[0]).parent
    environment = [
        f"PATH={python.parent}:/usr/bin:/bin",
        f"LD_LIBRARY_PATH={prefix / 'lib'}:{libraries}",
    ]
    return root / "bin" / "tritonserver", backends, environment
