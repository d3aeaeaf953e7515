"""Start shardrun (or the launcher over the pretended worker) as a program, and see that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.store import newest

ROOT = Path(__file__).resolve().parents[2]
MARK = "LAUNCH_TEST_MARK"


@dataclass
class Program:
    """A program under test. All processes that it starts carry a mark of their own in their environment."""

    process: subprocess.Popen[str]
    mark: str
    out: Path
    err: Path

    @property
    def stdout(self) -> str:
        """What came so far on stdout."""
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        """What came so far on stderr."""
        return self.err.read_text()

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until stdout has `text`."""
        until(lambda: text in self.stdout, timeout_s, f"no {text!r} in: {self.stdout}\n{self.stderr}")

    def signal(self, number: int) -> None:
        """Send a signal to the program itself."""
        self.process.send_signal(number)

    def family(self) -> dict[int, str]:
        """The living processes of this program (its own not counted): pid -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    ours = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    if ours and not dead:
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
        return found

    def ranks(self) -> dict[int, int]:
        """The pid of each worker, by rank."""
        found = {}
        for pid in self.family():
            try:
                env = dict(pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if pair)
                if "RANK" in env and os.getsid(pid) == pid:
                    found[int(env["RANK"])] = pid
            except OSError:
                continue
        return found

    def kill_rank(self, rank: int) -> None:
        """SIGKILL one worker."""
        os.kill(self.ranks()[rank], signal.SIGKILL)

    def left(self, timeout_s: float) -> dict[int, str]:
        """The processes that are still there after at most `timeout_s`."""
        end = time.monotonic() + timeout_s
        while (family := self.family()) and time.monotonic() < end:
            time.sleep(0.05)
        return family


def until(condition: Callable[[], object], timeout_s: float, message: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.02)


@contextmanager
def started(
    command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, **popen: Any
) -> Iterator[Program]:
    """A running program with its output in files under `folder`, in a session of its own; ended with all it started."""
    mark = uuid.uuid4().hex
    out, err = folder / f"out-{mark}.txt", folder / f"err-{mark}.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, **(env or {})}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    with out.open("w") as out_file, err.open("w") as err_file:
        popen = {"stdout": out_file, "stderr": err_file, "start_new_session": True, "cwd": folder, **popen}
        process = subprocess.Popen(command, env=environment, text=True, **popen)
    program = Program(process, mark, out, err)
    try:
        yield program
    finally:
        for pid in [*([process.pid] if process.poll() is None else []), *program.family()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def final_tensors(run_dir: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint's files, as bytes; their headers name the run."""
    found = newest(run_dir)
    assert found is not None
    assert found.complete, found.why
    content = {}
    for path in sorted(found.path.rglob("*.safetensors")):
        raw = path.read_bytes()
        content[str(path.relative_to(found.path))] = raw[8 + int.from_bytes(raw[:8], "little") :]
    return {"step": str(found.step).encode(), **content}


def pretended(folder: Path, *arguments: str, run: str = "run", **options: Any) -> list[str]:
    """The command that launches the pretended worker in `folder/run` with these options."""
    return [sys.executable, "-m", "tests.support.launch_driver", str(folder / run), json.dumps(options), *arguments]


def shardrun(*words: object) -> list[str]:
    """The real program."""
    return [sys.executable, "-m", "shardrun", *map(str, words)]


def write_config(folder: Path, *, recipe: str = "launch_linear", recipe_args: Mapping[str, Any] | None = None,
                 **sections: Mapping[str, Any]) -> Path:  # fmt: skip
    """A small two-rank config over a recipe of tests/support/recipes; sections are laid over it."""
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "recipe": str(ROOT / "tests" / "support" / "recipes" / f"{recipe}.py"),
        "recipe_args": dict(recipe_args or {}),
        "optimizer": {"name": "sgd", "lr": 0.01},
        "train": {"steps": 5, "micro_batch_size": 2, "global_batch_size": 4},
        "topology": {"world_size": 2, "backend": "gloo", "timeout_s": 60},
        "eval": {"at_end": False},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path
