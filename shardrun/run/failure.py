"""What a failing worker leaves behind for its launcher: the true cause, in the user's own file where there is one."""

from __future__ import annotations

import errno
import json
import os
import re
import site
import sysconfig
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardrun.errors import CallMismatch, CommunicatorError, ShardrunError
from shardrun.run.status import Status
from shardrun.run.worker_error import worker_error

_JOINT = re.compile(r"^rank (\d+): ", re.MULTILINE)
_BARE = 1000
"""Letters of a message that are kept where there is room for little."""
_OWN = str(Path(__file__).resolve().parents[1])
_FOREIGN = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in {
        _OWN,
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        *(site.getsitepackages() if hasattr(site, "getsitepackages") else ()),
    }
)


@dataclass(frozen=True)
class Seen:
    """What a rank knows of the first failure of its world, see comm.world_state.Failure."""

    kind: str
    """failed: by a fault of its own; timeout: nobody came in time; closed: a connection closed."""
    collective: int
    seconds: float
    missing: tuple[int, ...] = ()
    culprit: int | None = None


@dataclass(frozen=True)
class Failure:
    """One worker's error. `follow_up`: it failed because a peer did. `expected`: raised by shardrun on purpose.

    `exit_code` is what the run returns for it; `code` is what user code asked for by sys.exit, else None. `seen` is
    there if the world was lost. `traceback` is for the log, with the last collectives.
    """

    rank: int
    step: int
    phase: str
    collective: int
    exit_code: int
    type: str
    message: str
    file: str | None
    line: int | None
    frames: tuple[str, ...]
    traceback: str
    follow_up: bool
    expected: bool
    code: int | None
    time: float
    agreed: bool = False
    """Whether all ranks, of which there are others, raised it alike."""
    out_of_memory: bool = False
    seen: Seen | None = None

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Failure:
        """The inverse of dataclasses.asdict and JSON."""
        seen = document["seen"]
        if seen is not None:
            seen = Seen(**{**seen, "missing": tuple(seen["missing"])})
        return Failure(**{**document, "frames": tuple(document["frames"]), "seen": seen})


def describe(error: BaseException, rank: int, status: Status, seen: Seen | None = None, world_size: int = 1) -> Failure:
    """The failure that `error` means on `rank`; `seen`: what its communicator knows, if that has failed."""
    cause = _true_cause(error, rank)
    there = worker_error(str(cause))
    frames = frames_of(cause) if there is None else _of_users([there.frames])
    file, line = frames[-1][:2] if frames else (None, None)
    if isinstance(cause, SyntaxError) and cause.filename:
        file, line = cause.filename, cause.lineno
    return Failure(
        rank=rank,
        step=status.step,
        phase=status.phase,
        collective=status.collective,
        # A code that user code chose for itself would be read as one of shardrun's own.
        exit_code=cause.exit_code if isinstance(cause, ShardrunError) else 1,
        type=type(cause).__name__ if there is None else there.type,
        message=str(cause) if there is None else there.message,
        file=file,
        line=line,
        frames=tuple(f"{name}:{number} in {function}" for name, number, function in frames[-6:]),
        traceback="".join(traceback.format_exception(error)),
        follow_up=follows(error, rank, seen),
        expected=isinstance(cause, ShardrunError),
        code=_left_with(cause),
        time=time.time(),
        agreed=world_size > 1 and isinstance(cause, ShardrunError) and cause.agreed,
        out_of_memory=any(_is_out_of_memory(link) for link in _chain(error)),
        seen=seen,
    )


def write(failure: Failure, path: Path) -> None:
    """Write `failure` so that a reader sees all of it or none, its cause alone where no more fits (`ulimit -f`).

    A full disk loses it without another error.
    """
    part = path.with_suffix(".part")
    bare = replace(failure, message=failure.message[:_BARE], frames=(), traceback="")
    for one in (failure, bare):
        try:
            part.write_text(json.dumps(asdict(one)))
            part.replace(path)
            return
        except OSError:
            part.unlink(missing_ok=True)


def read(path: Path) -> Failure | None:
    """The failure in `path`; None if there is none."""
    try:
        return Failure.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def named(failure: Failure) -> str:
    """Type and message, as python shows an error; the type alone where there is no message."""
    return f"{failure.type}: {failure.message}" if failure.message else failure.type


def _left_with(error: BaseException) -> int | None:
    """The code of sys.exit(...); python gives 1 for a text."""
    if not isinstance(error, SystemExit):
        return None
    return 0 if error.code is None else error.code if isinstance(error.code, int) else 1


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _true_cause(error: BaseException, rank: int) -> BaseException:
    """The error that this rank brought into an agreement; the joint error of all ranks is raised from it."""
    if error.__cause__ is not None and str(rank) in _JOINT.findall(str(error)):
        return error.__cause__
    return error


def follows(error: BaseException, rank: int, seen: Seen | None = None) -> bool:
    """Whether a peer caused it: a failed collective, or an agreement to which only other ranks brought errors.

    A collective can also fail by a fault of this rank: `seen` tells.
    """
    named = _JOINT.findall(str(error)) if isinstance(error, ShardrunError) else []
    if named:
        return str(rank) not in named
    links = [*_chain(error)]
    if any(_is_failed_collective(link) for link in links):
        return seen is None or seen.kind != "failed"
    # torch.distributed's own family, known by name (this room does without torch): a group of the recipe's own.
    return any(kind.__name__ == "DistError" for link in links for kind in type(link).__mro__)


def _is_failed_collective(error: BaseException) -> bool:
    return isinstance(error, CommunicatorError) and not isinstance(error, CallMismatch)


def _is_out_of_memory(error: BaseException) -> bool:
    """Python, numpy and CUDA have classes for it, torch's CPU allocator has not."""
    names = [kind.__name__ for kind in type(error).__mro__]
    if "MemoryError" in names or "OutOfMemoryError" in names:
        return True
    return getattr(error, "errno", None) == errno.ENOMEM or (
        type(error) is RuntimeError and "can't allocate memory" in str(error)
    )


def frames_of(error: BaseException) -> list[tuple[str, int, str]]:
    """(file, line, function), outermost first: the user's frames in the error or in its causes, else all."""
    links = [
        [
            (frame.f_code.co_filename, number, frame.f_code.co_name)
            for frame, number in traceback.walk_tb(e.__traceback__)
        ]
        for e in _chain(error)
    ]
    return _of_users(links)


def _of_users(links: Sequence[Sequence[tuple[str, int, str]]]) -> list[tuple[str, int, str]]:
    """The user's frames of the first of `links` that has some, else all of the first."""
    users = ([frame for frame in frames if _is_user_file(frame[0])] for frames in links)
    return next(filter(None, users), [*links[0]])


def _is_user_file(name: str) -> bool:
    return not name.startswith("<") and not os.path.realpath(name).startswith(_FOREIGN)
