"""What went wrong in a loader's worker process: torch brings it as a text, with the traceback of that process in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEAD = re.compile(r"\ACaught \S+ in .*\.\nOriginal Traceback \(most recent call last\):\n")
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


@dataclass(frozen=True)
class WorkerError:
    """The error as it was raised there; `frames`: (file, line, function), outermost first, none of its causes."""

    type: str
    message: str
    frames: tuple[tuple[str, int, str], ...]


def worker_error(text: str) -> WorkerError | None:
    """The error of which torch's `text` tells; None if it is another text."""
    head = _HEAD.match(text)
    if head is None:
        return None
    # Of a chain of errors, the last is the one that came out.
    told = re.split(r"^Traceback \(most recent call last\):\n", text[head.end() :], flags=re.MULTILINE)[-1]
    end = re.search(r"^(?=[^\s])", told, re.MULTILINE)
    if end is None:
        return None
    name, _, message = told[end.start() :].rstrip("\n").partition(": ")
    if not re.fullmatch(r"[\w.]+", name):  # an error without a message, and perhaps notes to it
        name, _, message = told[end.start() :].rstrip("\n").partition("\n")
    frames = [(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(told[: end.start()])]
    return WorkerError(name.rpartition(".")[2], message, tuple(frames))
