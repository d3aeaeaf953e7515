"""A worker without torch: steps with a pretended collective between two ranks, and every way to end badly.

The job's options give `steps`, `step_s` and per rank what to do at which step: {"1": {"at": 3, "do": "raise"}}.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from typing import Any, NoReturn

from shardrun.errors import CheckpointError, CommunicatorError, StoppedAfterSave
from shardrun.run.tether import Tether


class Wire:
    """One byte to and fro per step between rank 0 and rank 1, over the store's socket; the connection is the peer."""

    def __init__(self, tether: Tether, timeout_s: float) -> None:
        self._peer: socket.socket | None = None
        if tether.world_size == 1:
            return
        if tether.rank == 0:
            with socket.socket(fileno=int(os.environ["SHARDRUN_STORE_FD"])) as listening:
                listening.settimeout(60.0)  # node 0 of several hosts hands it over non-blocking
                assert listening.getsockname() == (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                self._peer = listening.accept()[0]
        else:
            self._peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        self._peer.settimeout(timeout_s)

    def exchange(self, byte: bytes) -> bytes:
        """The peer's byte, or CommunicatorError."""
        if self._peer is None:
            return byte
        try:
            self._peer.sendall(byte)
            answer = self._peer.recv(1)
        except OSError as error:
            raise CommunicatorError(f"collective failed: {error}") from error
        if not answer:
            raise CommunicatorError("collective failed: connection closed by peer")
        return answer


def misbehave(deed: str) -> None:
    """One way to end badly, or to make noise."""
    if deed == "raise":
        raise ValueError("bad label 7")
    if deed == "refuse":
        raise CheckpointError("step-0000000001: hash of model.safetensors differs")
    if deed == "exit3":
        sys.exit(3)
    if deed == "exit_text":
        sys.exit("no more data")
    if deed == "os_exit0":
        os._exit(0)
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "sleep":
        time.sleep(600)
    if deed == "child":
        subprocess.Popen(["sleep", "600"])
    if deed == "child_then_raise":
        subprocess.Popen(["sleep", "600"])
        raise ValueError("bad label 7")
    if deed == "fork_and_end":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        child.start()
        child.terminate()
        child.join(5)
        if child.is_alive():
            raise RuntimeError("SIGTERM did not end a forked process")
    if deed == "warn":
        warnings.warn("odd value", stacklevel=1)
    if deed == "half_line":
        print("half a line", end="", flush=True)
        time.sleep(0.3)
        print(" and the rest", flush=True)


def body(tether: Tether) -> int:
    """The steps of the job, until the end, a request to stop or a misdeed."""
    options: dict[str, Any] = tether.job()["options"]
    deed = options["deeds"].get(str(tether.rank), {"at": 0, "do": ""})
    if options.get("already"):
        return already(tether, options)
    if tether.rank == 0 and options.get("hangs"):
        hang(tether, options["hangs"])
    wire = Wire(tether, options.get("timeout_s", 60.0))
    if tether.rank == 0:
        tether.send("start", world_size=tether.world_size, device="cpu", backend="none", first_step=0,
                    total_steps=options["steps"], tables=[])  # fmt: skip
    for step in range(1, options["steps"] + 1):
        tether.status.set(step, "forward", step - 1)
        if deed["at"] == step:
            misbehave(deed["do"])
        time.sleep(options["step_s"])
        tether.status.set(step, "reduce", step)
        stop = b"\1" in (b"\1" if tether.stop_requested else b"\0") + wire.exchange(
            b"\1" if tether.stop_requested else b"\0"
        )
        print(f"user print {step}", flush=True)
        if tether.rank == 0:
            tether.send("step", step=step, total_steps=options["steps"], loss=1.0 / step, lr=0.1)
        if stop:
            save(tether, step, options)
    if tether.rank == 0:
        tether.send("finished", step=options["steps"])
    return 0


def already(tether: Tether, options: dict[str, Any]) -> int:
    """Say what a finished run says, with a line of the user's own before."""
    if tether.rank == 0:
        print("user print while loading", flush=True)
        tether.send("resumed", step=options["steps"], path="a checkpoint")
        tether.send("start", world_size=tether.world_size, device="cpu", backend="none",
                    first_step=options["steps"], total_steps=options["steps"], tables=[])  # fmt: skip
        tether.send("finished", step=options["steps"], already=True)
    return 0


def hang(tether: Tether, after: str) -> NoReturn:
    """Come no further than the user's own loading, or than the start."""
    tether.send("note", text="about to load")
    if after == "start":
        tether.send("start", world_size=tether.world_size, device="cpu", backend="none", first_step=0,
                    total_steps=None, tables=[])  # fmt: skip
    else:
        print("user print while loading", flush=True)
    time.sleep(600)
    raise AssertionError


def save(tether: Tether, step: int, options: dict[str, Any]) -> NoReturn:
    """Pretend to save, and stop."""
    tether.status.set(step, "save", step)
    time.sleep(options.get("save_s", 0.0))
    if tether.rank == 0:
        tether.send("stopped", step=step, path=f"step-{step:010}")
    raise StoppedAfterSave


if __name__ == "__main__":
    if "--name-error" in sys.argv:
        undefined_name  # type: ignore[name-defined]  # noqa: B018, F821 - what a typing mistake at import looks like
    code = Tether.from_env().run(body)
    if "--hang-at-exit" in sys.argv:
        time.sleep(600)
    sys.exit(code)
