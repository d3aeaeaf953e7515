"""Entry of a process of one contender, started like a worker of `shardrun train`; tied to its parent before torch."""

from __future__ import annotations

import signal
import sys

from shardrun.run.tether import STOP_SIGNALS, Tether


def main() -> int:
    """Do this rank's part of the job that the environment names; returns the exit code."""

    def body(tether: Tether) -> int:
        from shardrun.bench.contender import run_contender

        return run_contender(tether.job(), tether)

    tether = Tether.from_env()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # there is nothing to save
    return tether.run(body)


if __name__ == "__main__":
    sys.exit(main())
