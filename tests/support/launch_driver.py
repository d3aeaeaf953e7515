"""The launcher as a program of its own, over the worker in launch_worker: what `shardrun train` is, without a config.

python -m tests.support.launch_driver RUN_DIR '{"world_size": 2, "steps": 10, ...}' [worker arguments]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardrun import report
from shardrun.run.gathering import Party
from shardrun.run.hosts import Hosts
from shardrun.run.launch import launch
from shardrun.run.worker_process import Job


def main() -> int:
    """Launch and show, as cli.train does."""
    run_dir, options, *arguments = sys.argv[1:]
    wanted = {"world_size": 2, "steps": 10, "step_s": 0.02, "deeds": {}, **json.loads(options)}
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-m", "tests.support.launch_worker", *arguments)
    job = Job(
        {"options": wanted},
        Path(run_dir),
        wanted["world_size"],
        max_restarts=wanted.get("max_restarts", 0),
        command=command,
    )
    party = None
    if "nnodes" in wanted:
        hosts = Hosts(wanted["nnodes"], wanted["node_rank"], "127.0.0.1", wanted["port"])
        party = Party(hosts, wanted.get("same", {}), Path(run_dir), wanted.get("timeout_s", 60.0), 60.0)
    with report.TrainScreen(json=wanted.get("json", False)) as screen:
        outcome = launch(job, screen, party)
        screen.close()
        report.outcome(outcome, Path(run_dir), "the command", None, json=wanted.get("json", False))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
