"""validate, schema and the manners of the command line: codes, speed, no torch, warnings about the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardrun.cli.app import app
from shardrun.config.load import load
from shardrun.config.schema import Config
from shardrun.errors import CheckpointError, LaunchError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
QUICK = ROOT / "configs" / "quickstart.yaml"

# Runs a command in this process and tells afterwards, on the last line, what it cost. The processor's time, that of
# Python's own start included: it is the same where others use the machine too.
PROBE = """
import sys, time
sys.argv = ["shardrun", *sys.argv[1:]]
from shardrun.__main__ import main
try:
    main()
except SystemExit as leave:
    code = leave.code
print(f"\\nprobe {code} {time.process_time()} {'torch' in sys.modules}")
"""


def probe(*words: str) -> tuple[int, float, bool]:
    """Exit code, seconds of the processor and whether torch was imported; the fastest of three."""
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=60)
        code, seconds, torch = done.stdout.splitlines()[-1].removeprefix("probe ").split()
        runs.append((int(code), float(seconds), torch == "True"))
    return min(runs, key=lambda run: run[1])


def bad_config(folder: Path) -> Path:
    path = folder / "bad.yaml"
    path.write_text(
        "recipe: gone.py\noptimizer: {name: lbfgs, lr: x}\n"
        "train: {stepz: 1, steps: 0, micro_batch_size: 1, global_batch_size: 1}\nlog: {}\nlog: {}\n"
    )
    return path


def test_help_is_there_in_half_a_second_without_torch() -> None:
    assert probe("--help")[::2] == (0, False)
    assert probe("--help")[1] < 0.5


def test_a_good_and_a_bad_config_are_judged_in_a_second_without_torch(tmp_path: Path) -> None:
    for path, expected in ((QUICK, 0), (bad_config(tmp_path), 2)):
        code, seconds, torch = probe("validate", str(path))
        assert (code, torch) == (expected, False)
        assert seconds < 1


def test_train_refuses_a_bad_config_without_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, seconds, torch = probe("train", str(bad_config(tmp_path)), f"run.dir={tmp_path / 'run'}")
    assert (code, torch) == (2, False)
    assert seconds < 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "inspect-ckpt", "verify-resume", "validate", "schema"])
def test_every_command_has_help_without_torch(command: str) -> None:
    assert probe(command, "--help")[::2] == (0, False)


def test_help_of_train_says_trusted_networks_only() -> None:
    text = " ".join(CliRunner().invoke(app, ["train", "--help"]).stdout.split())
    assert "Trusted networks only: the rendezvous of the ranks has neither authentication nor encryption." in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_are_good_and_print_what_runs_again(path: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(path), "run.seed=7"])
    assert result.exit_code == 0, result.output
    again = tmp_path / "again.yaml"
    again.write_text(result.stdout)
    assert load(again) == load(path, ["run.seed=7"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_the_shipped_configs_has_a_comment(path: Path) -> None:
    bare = [line for line in path.read_text().splitlines() if line.startswith(" ") and " # " not in line]
    assert bare == []


def test_the_shipped_configs_are_those_that_readme_names() -> None:
    assert [path.stem for path in CONFIGS] == [
        "bench-10m", "bench-83m", "moe", "muon", "quickstart", "single", "subset",
    ]  # fmt: skip


def test_validate_json_gives_the_config() -> None:
    result = CliRunner().invoke(app, ["validate", str(QUICK), "--json"])
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["config"] == load(QUICK).model_dump(mode="json")


def test_validate_shows_every_problem_on_stderr_and_as_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(bad_config(tmp_path)), "data.workers=x", "--json"])
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("ConfigError", 2)
    assert [problem.split(": ")[1] for problem in error["problems"]] == [
        "recipe",
        "optimizer.name",
        "optimizer.lr",
        "train.stepz",
        "train.steps",
        "log",
        "data.workers",
    ]
    assert result.stderr == "\n".join([*error["problems"], "7 problems in the config; nothing was started", ""])


def test_usage_errors_exit_with_2() -> None:
    for words in (["validate"], ["nonsense"], ["train", str(QUICK), "--stop-at", "0"], ["validate", "x", "--nonsense"]):
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, result.stdout) == (2, "")


def test_schema_describes_every_key() -> None:
    result = CliRunner().invoke(app, ["schema"])
    schema = json.loads(result.stdout)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["required"] == ["recipe", "train"]
    undescribed = [
        f"{name}.{key}"
        for name, section in schema["$defs"].items()
        for key, entry in section["properties"].items()
        if key != "name" and "description" not in entry
    ]
    assert undescribed == []


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "shardrun 0.1.0\n")


def test_the_library_door_opens_without_torch() -> None:
    code = "import sys, shardrun; shardrun.errors; shardrun.CommunicatorConfig; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_every_public_name_is_there() -> None:
    import shardrun

    assert [name for name in shardrun.__all__ if getattr(shardrun, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = shardrun.nonsense
    assert set(shardrun.__all__) <= set(dir(shardrun))


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (CheckpointError("step-5 is damaged"), 3, "error: step-5 is damaged\n"),
        (LaunchError("no port is free"), 5, "error: no port is free\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_of_the_family_is_its_message_and_its_code(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str
) -> None:
    def fail() -> int:
        raise raised

    monkeypatch.setattr("shardrun.cli.schema.run", fail)
    result = CliRunner().invoke(app, ["schema"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, said, "")


def test_an_unknown_exception_keeps_its_traceback_and_exits_with_1() -> None:
    code = "import shardrun.cli.schema as s, shardrun.__main__ as m; s.run = lambda: 1 / 0; m.main()"
    done = subprocess.run([sys.executable, "-c", code, "schema"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
