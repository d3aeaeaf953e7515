"""Entry of a process that shardrun's launcher started: tied to it before torch is loaded, which can take seconds."""

from __future__ import annotations

import sys

from shardrun.run.tether import Tether


def main() -> int:
    """Do this rank's part of the job that the environment names; returns the exit code."""

    def body(tether: Tether) -> int:
        from shardrun.run.worker import run_worker

        return run_worker(tether.job(), tether)

    return Tether.from_env().run(body)


if __name__ == "__main__":
    sys.exit(main())
