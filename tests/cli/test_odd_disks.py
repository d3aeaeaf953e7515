"""Real file systems that are full or cannot be written to, mounted in a namespace of their own; Linux only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT, write_config


def _mounted(options: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `command` where `folder` is a tmpfs with these options."""
    script = f'mount -t tmpfs -o {options.split(";")[0]} none "$0"; {";".join(options.split(";")[1:])} exec "$@"'
    return subprocess.run(
        ["unshare", "-rm", "sh", "-ec", script, str(folder), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder to mount on; skips where nothing can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("a full disk needs one of a few MB, which only unshare mounts without being root: not installed")
    if (tried := _mounted("size=1m", place, "true")).returncode:
        pytest.skip(f"a full disk needs one of a few MB, which only root or a user namespace mounts: {tried.stderr}")
    return place


_SAVE_UNTIL_FULL = """
import sys
from pathlib import Path
from shardrun.errors import CheckpointError
from tests.checkpoints.saver import held, put
folder = Path(sys.argv[1])
for step in range(1, 30):
    try:
        put(folder, step)
    except CheckpointError as error:
        print(error)
        break
print(held(folder) == [*range(step - 1, 0, -1)], step, [*(folder / "checkpoints" / ".staging").iterdir()])
"""


def test_a_disk_that_is_full_half_way_through_a_save_keeps_what_was_saved(folder: Path) -> None:
    done = _mounted("size=108k", folder, sys.executable, "-c", _SAVE_UNTIL_FULL, str(folder))
    error, state = done.stdout.splitlines()
    assert f"{folder}/checkpoints: cannot save: No space left on device" in error, done.stderr
    assert "bytes are free there" in error
    intact, step, left = state.split(maxsplit=2)
    assert (intact, left) == ("True", "[]")
    assert int(step) > 2


_TRAIN_AND_LOOK = """
import subprocess, sys
from pathlib import Path
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.store import scan
code = subprocess.run([sys.executable, "-m", "shardrun", "train", *sys.argv[1:]]).returncode
found = scan(Path(sys.argv[2].removeprefix("run.dir=")))
print(code, [one.step for one in found], [inspect(one.path, verify=True)["problems"] for one in found])
"""


def test_a_disk_that_is_full_in_the_background_ends_the_run_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    sections = {"checkpoint": {"every": 1, "keep": 100, "async": True}, "train": {"steps": 100}}
    config = write_config(
        tmp_path, recipe="run_plain", recipe_args={"samples": 400}, optimizer={"name": "adamw"}, **sections
    )
    run_dir = f"run.dir={folder / 'run'}"
    done = _mounted("size=400k", folder, sys.executable, "-c", _TRAIN_AND_LOOK, str(config), run_dir)
    code, rest = done.stdout.splitlines()[-1].split(maxsplit=1)
    steps, problems = json.loads(f"[{rest.replace('] [', '], [')}]")
    assert code == "3", done.stdout + done.stderr
    assert re.search("cannot save: (No space left on device|there is not enough room)", done.stderr)
    assert "this checkpoint needs" in done.stderr
    assert steps == [*range(len(steps), 0, -1)]
    assert len(steps) > 2
    assert problems == [[]] * len(steps)


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    words = ["-m", "shardrun", "train", str(write_config(tmp_path)), f"run.dir={folder / 'run'}"]
    done = _mounted('size=1m; mount -o remount,ro "$0";', folder, sys.executable, *words)
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"{folder / 'run'}: cannot be used as run folder: Read-only file system" in done.stderr
    assert "saved step" not in done.stdout
