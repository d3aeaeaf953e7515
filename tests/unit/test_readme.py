"""README and docs against the program: commands, codes, paths, names and examples are those that exist."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer.main

import shardrun as sr
from shardrun import errors, report
from shardrun.cli.app import app
from shardrun.config.load import load
from shardrun.errors import ConfigError, ShardrunError
from shardrun.run.stops import DEFAULT_WINDOWS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
TEXT = README.read_text()
NOT_OURS = {"--nproc-per-node", "--pid", "--max-restarts", "--ntasks-per-node"}  # options of torchrun and py-spy

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands() -> dict[str, click.Command]:
    group = typer.main.get_command(app)
    return dict(group.commands)  # type: ignore[attr-defined]


def section(title: str, text: str = TEXT) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {title!r}"
    return found[1]


def fenced(language: str, title: str, number: int = 0) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    return str(blocks[number])


def rows(text: str) -> list[list[str]]:
    """Cells of the body of the one table in `text`."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_commands_are_those_of_the_program() -> None:
    told = {re.match(r"`shardrun ([a-z-]+)", row[0])[1] for row in rows(section("The commands"))}  # type: ignore[index]
    assert told == commands().keys()


@each_page
def test_every_option_exists(page: Path) -> None:
    known = {opt for command in commands().values() for param in command.params for opt in param.opts} | {"--help"}
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())) - NOT_OURS
    assert told - known == set()


def test_the_exit_codes_are_those_of_the_errors() -> None:
    told = {int(code): meaning for code, meaning in rows(section("Exit codes"))}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ShardrunError)]
    assert told.keys() == {0, *(kind.exit_code for kind in kinds)}
    assert told == {0: "done", **report.CODES}


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+)(?: [a-z]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = set(re.findall(r"(?:`|^ {4})make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert told - (targets | set(phony.split())) == set()


def test_the_demo_is_told_as_make_runs_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    written = makefile.replace("$(QUICK)", "configs/quickstart.yaml").replace("$(DEMO)", "runs/demo")
    told = re.findall(r"^ {4}shardrun (.*)$", section("Try it"), re.MULTILINE)
    assert told == re.findall(r"-m shardrun ([^;\n]*)", written)


@each_page
def test_links_and_paths_resolve(page: Path) -> None:
    text = page.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    paths = re.findall(r"\b(?:shardrun|tests|configs|recipes|docs)/[\w/.-]+\.(?:py|md|yaml)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []
    assert links or paths


def defined(path: Path) -> set[str]:
    """Names of functions and classes in a file, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_what_is_pointed_at_in_a_file_is_there(page: Path) -> None:
    pointers = re.findall(r"`([\w/]+\.py)::([\w.]+)`", page.read_text())
    assert pointers
    assert [f"{path}::{name}" for path, name in pointers if name not in defined(ROOT / path)] == []


def test_the_phases_are_those_of_a_step() -> None:
    told = [row[0] for row in rows(section("The way of a batch", (ROOT / "docs" / "step.md").read_text()))]
    entered = re.findall(r'comm\.enter\("(\w+)"', (ROOT / "shardrun" / "step" / "joint_step.py").read_text())
    assert told == [phase for phase in entered if phase != "idle"]


def test_the_length_of_a_verification_is_the_default() -> None:
    assert f"At most {DEFAULT_WINDOWS} windows" in (ROOT / "docs" / "checkpoint.md").read_text()


# ---- the examples --------------------------------------------------------------------------------------------------


def test_the_config_is_good(tmp_path: Path) -> None:
    config = tmp_path / "example.yaml"
    config.write_text(fenced("yaml", "A config").replace("../recipes", str(ROOT / "recipes")))
    settings = load(config)
    assert settings.topology.world_size == 2
    assert settings.parts["default"].optimizer.options[0].model_dump()["weight_decay"] == 0.0


def test_mistakes_in_a_config_read_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(
        f"recipe: {ROOT / 'recipes' / 'gpt.py'}\n"
        "optimizer: {name: adamw, lr: 3e-4, beta: [0.9, 0.95]}\n"
        "train: {steps: 100, micro_batch_size: 3, global_batch_size: 16}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(Path("bad.yaml"))
    assert caught.value.problems == re.findall(r"^ {4}(bad\.yaml:.*)$", section("A config"), re.MULTILINE)


def test_the_recipe_is_one(tmp_path: Path) -> None:
    from shardrun.run.recipe import World, load_recipe

    file = tmp_path / "spiral.py"
    file.write_text(fenced("python", "A recipe"))
    recipe, world = load_recipe(str(file), {"hidden": 3}), World(0, 1)
    points, label = recipe.build_data("train")[:5]
    loss, weight = recipe.loss(recipe.build_model(world), (points, label), world)
    loss.backward()  # type: ignore[no-untyped-call]
    assert (weight, len(recipe.build_data("val"))) == (5, 2000)


def test_the_library_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    module = types.ModuleType("readme_example")
    exec(compile(fenced("python", "The library"), "README.md", "exec"), module.__dict__)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("32 0.") and line.endswith("['0.bias']") for line in lines), lines


def test_the_example_with_experts_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a world of one; on several ranks it runs in tests/ranks/test_readme_experts.py."""
    monkeypatch.delenv("RANK", raising=False)
    module = types.ModuleType("readme_experts")
    exec(compile(fenced("python", "The library", 1), "README.md", "exec"), module.__dict__)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["32"] * 3
    assert all(float(line.split()[1]) > 0 for line in lines)


def test_the_short_examples_of_the_library_run() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    comm = sr.Communicator.single()
    names: dict[str, Any] = {"sr": sr, "torch": torch, "model": model, "comm": comm, "num_tokens": 3}
    names["session"] = sr.SelectedDataParallel(comm, model, sr.select_parameters(model))
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = [line.strip() for line in section("The library").splitlines()]
    begin = next(number for number, line in enumerate(lines) if line.startswith("zero1 ="))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for line in lines[begin : begin + 8]:
        names["loss_mean"] = model(torch.ones(3, 4)).mean()
        if line.startswith("ddp.reduce"):
            torch.autograd.backward(names["loss_mean"])
        exec(line, names)
    assert set(names["zero1"].split) == {"muon", "adamw"}
    assert names["store"].optimizer is not None
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
