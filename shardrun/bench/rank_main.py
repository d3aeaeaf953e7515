"""Entry of a process that bench starts, like a worker of `shardrun train`: tied to its parent before torch loads."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun.errors import LaunchError
from shardrun.run.tether import Tether


def main() -> int:
    """Do this rank's part of the job that the environment names and leave what came of it; returns the exit code.

    The job's `body` is the place of a function, "module:name", of (job, tether) that returns plain JSON.
    """

    def run(tether: Tether) -> int:
        job = tether.job()
        _end_in_time(job, tether)
        result = pkgutil.resolve_name(job["body"])(job, tether)
        (Path(job["run_dir"]) / f"rank-{tether.rank}.json").write_text(json.dumps(result))
        return 0

    return Tether.from_env(saves=False).run(run)


def _end_in_time(job: Mapping[str, Any], tether: Tether) -> None:
    """End this process if it is still there after `limit_s` of the job, saying so: nobody waits for ever."""

    def end() -> None:
        tether.write_error(LaunchError(f"not done after {job['limit_s']:.0f} s, all that topology.timeout_s gives"))
        os._exit(LaunchError.exit_code)

    timer = threading.Timer(job["limit_s"], end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
