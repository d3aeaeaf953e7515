"""`shardrun` and `python -m shardrun`."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Read the command line, run the command, leave with its exit code.

    A request to stop that comes before a launch has taken the signals over, or after it, leaves with 130.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        asked.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        from shardrun.cli.app import app

        app(prog_name="shardrun")
    except BaseException as error:
        # Compiled code on the way (pydantic) turns the exception that a handler raises into one of its own.
        if asked and not (isinstance(error, SystemExit) and error.code != 1):
            sys.stderr.write("interrupted\n")
            sys.exit(130)
        raise


if __name__ == "__main__":
    main()
