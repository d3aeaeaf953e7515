"""Entry of a process that is a rank: tied to its launcher before torch is loaded, which can take seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

from shardrun.run.tether import Tether


def main() -> int:
    """Do this rank's part of the job that the environment names; returns the exit code."""
    return Tether.from_env().run(lambda tether: work(tether.job(), tether))


def work(job: Mapping[str, Any], tether: Tether) -> int:
    """Load torch and all else, and do this rank's part of `job`; as `run_worker`."""
    # Nearly all that modules make stays: collections while they load find nothing, and took a fifth of the start. Nor
    # has any later collection to go over it, in the middle of a step.
    gc.disable()
    from shardrun.run.worker import run_worker

    gc.freeze()
    gc.enable()
    return run_worker(job, tether)


if __name__ == "__main__":
    sys.exit(main())
