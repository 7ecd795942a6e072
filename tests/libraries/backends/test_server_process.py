"""Servers started by an engine: their end, their log, and the end of all they started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.served.process import GUARD, ServerProcess, free_ports
from sie_stream.edge.clock import SystemClock
from tests.waiting import wait_until

FAMILY = """
import os, signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
open(sys.argv[1] + str(os.getpid()), "w").close()
threading.Event().wait()
"""
"""A server and a grandchild of another session, both deaf to SIGTERM."""


def family(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir()]


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


def test_stopping_ends_all_that_a_server_started(tmp_path: Path) -> None:
    server = ServerProcess("test", python(FAMILY, f"{tmp_path}/"))
    pids = wait_until(lambda: family(tmp_path) if len(family(tmp_path)) == 2 else [], "both to start")
    server.stop()
    assert not server.alive
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_server_ends_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    code = f"import os, subprocess, sys, threading\nsubprocess.Popen([sys.executable, '-I', '-S', {str(GUARD)!r}, "
    code += "str(os.getpid()), *sys.argv[1:]])\nthreading.Event().wait()"
    engine = subprocess.Popen(python(code, *python(FAMILY, f"{tmp_path}/")))
    pids = wait_until(lambda: family(tmp_path) if len(family(tmp_path)) == 2 else [], "both to start")
    engine.kill()
    engine.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the server and its child to end")


def test_a_server_that_ends_says_why() -> None:
    server = ServerProcess("test", python("import sys; print('no model here'); sys.exit(3)"))
    with pytest.raises(ModelRefused, match="no model here") as refusal:
        server.wait_ready(lambda: False, 20_000, SystemClock())
    assert refusal.value.code == "server_ended"
    assert str(server.log) in refusal.value.message


def test_a_program_that_is_not_there_is_named() -> None:
    server = ServerProcess("test", ["no-such-program"])
    with pytest.raises(ModelRefused, match="cannot start no-such-program"):
        server.wait_ready(lambda: False, 20_000, SystemClock())


def test_a_server_that_is_never_ready_is_stopped() -> None:
    server = ServerProcess("test", python("import threading; threading.Event().wait()"))
    with pytest.raises(ModelRefused) as refusal:
        server.wait_ready(lambda: False, 100, SystemClock())
    assert refusal.value.code == "server_start_timeout"
    assert not server.alive


def test_variables_reach_the_server_and_signals_are_as_usual() -> None:
    code = "import os, signal; print(os.environ['MARK'], signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    server = ServerProcess("test", python(code), ["MARK=a=b"])
    wait_until(lambda: not server.alive, "the server to end")
    assert "a=b True" in server.last_words()
    server.close()
    assert not server.log.exists()


def test_ports_are_free_and_differ() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert all(1024 <= port < 65_536 for port in ports)


def test_the_guard_needs_nothing_of_ours() -> None:
    done = subprocess.run(
        python(f"import runpy; runpy.run_path({str(GUARD)!r})"),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (0, "")
