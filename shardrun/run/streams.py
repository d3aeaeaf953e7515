"""What workers print, line by line: whole lines only, so that neither the screen nor a log shows half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO


class LineSplitter:
    """Cuts a stream of bytes into lines. A carriage return overwrites, as on a terminal: the last state counts."""

    def __init__(self, longest: int = 1 << 16) -> None:
        self._longest = longest
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes. A line of more than `longest` bytes comes out in pieces."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        while len(self._rest) > self._longest:
            lines.append(self._rest[: self._longest])
            self._rest = self._rest[self._longest :]
        return [_text(line) for line in lines]

    def close(self) -> list[str]:
        """The last line, if it was left without an end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class RankLog:
    """The log file of one rank, appended to. Lines are held back until `release`. A full disk ends the log, never the
    run. A run that had nothing to do leaves no trace: `take_back`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problem: str | None = None
        self._ended = False
        self._held: list[str] | None = []
        self._file: BinaryIO | None = None
        self._before: os.stat_result | None = None

    def write(self, lines: list[str]) -> None:
        """Append `lines`."""
        if self._held is not None:
            self._held += lines
        elif not self._ended:
            try:
                if self._file is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._before = self.path.stat() if self.path.exists() else None
                    self._file = self.path.open("ab", buffering=0)
                self._file.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
            except OSError as error:
                self._ended = True
                self._problem = f"{self.path}: {error.strerror}; the log of this rank ends here"

    def take_problem(self) -> str | None:
        """Why the log ended, told once."""
        problem, self._problem = self._problem, None
        return problem

    def release(self) -> None:
        """From here on lines go to the file; those held back go first."""
        if self._held is not None:
            held, self._held = self._held, None
            self.write(held)

    def take_back(self) -> None:
        """Make the file what it was, its time included, and close it; of a file that was not there nothing is left."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self._before is None:
                self.path.unlink()
                self.path.parent.rmdir()  # the last log to go takes the folder along
            else:
                self._file.truncate(self._before.st_size)
                os.utime(self._file.fileno(), ns=(self._before.st_atime_ns, self._before.st_mtime_ns))
        self.close()

    def close(self) -> None:
        """Close the file; what was never released is dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None
