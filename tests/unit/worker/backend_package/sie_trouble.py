"""A backend that does what its inputs say: echo, crash, exit, hang, sleep, wait, raise, refuse. Found by path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpu_worker.backends.base import EngineInput, EngineOutput, LoadedModel, ModelRefused, failed
from sie_stream.control import ModelLaunch
from sie_stream.ports import Clock

AUTOGROUP = Path("/proc/self/autogroup")


class Version(str):
    """As torch's: text by inheritance only."""

    __slots__ = ()


def standing() -> dict[str, object]:
    """How the kernel sees this process."""
    return {
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "policy": os.sched_getscheduler(0),
        "priority": os.sched_getparam(0).sched_priority,
        "autogroup": AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none",
    }


def await_file(path: str) -> None:
    """Busy for as long as a test wants, and not for as long as it guesses."""
    while not os.path.exists(path):
        threading.Event().wait(0.01)


class TroubleModel:
    memory_bytes = 1234
    weights_digest = "sha256:trouble"

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        return [self._one(item) for item in batch]

    def _one(self, item: EngineInput) -> EngineOutput:
        inputs = msgspec.json.decode(item.inputs)
        match inputs.get("do"):
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "hang":
                threading.Event().wait()
            case "await":
                await_file(inputs["file"])
            case "sleep":
                threading.Event().wait(inputs["seconds"])
            case "flood":
                for number in range(inputs["lines"]):
                    sys.stdout.write(f"line {number} {'x' * 900}\n")
                sys.stdout.flush()
            case "leave a child":
                child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
                return EngineOutput(item.request_id, msgspec.json.encode({"pid": child.pid}))
            case "raise":
                raise RuntimeError("asked to raise")
            case "nonsense":
                return EngineOutput(item.request_id, item.inputs, first_token_ms=object())  # type: ignore[arg-type]
            case "refuse":
                return failed(item, "refused", "asked to refuse")
            case "hold":
                bytearray(inputs["mb"] << 20)
            case "standing":
                return EngineOutput(item.request_id, msgspec.json.encode(standing()))
            case "environment":
                return EngineOutput(item.request_id, msgspec.json.encode({"value": os.environ.get(inputs["name"])}))
        return EngineOutput(item.request_id, item.inputs)


class TroubleBackend:
    name = "trouble"

    def __init__(self, clock: Clock) -> None:
        pass

    def load(self, launch: ModelLaunch) -> LoadedModel:
        match launch.config.get("load"):
            case "refuse":
                raise ModelRefused("digest_mismatch", "asked to refuse")
            case "raise":
                raise RuntimeError("asked to raise")
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "large":
                self._held = bytearray(2 << 30)
            case "await":
                await_file(str(launch.config["file"]))
            case "slow":
                threading.Event().wait(1.5)
        return TroubleModel()

    def unload(self, model: LoadedModel) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"trouble": Version("1.0")}
