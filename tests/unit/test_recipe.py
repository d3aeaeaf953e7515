"""Recipes: loaded from file or module, checked at once, with errors that name the file and what is missing."""

from __future__ import annotations

import hashlib
import pickle
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardrun.errors import ConfigError, UsageError
from shardrun.run.recipe import Recipe, World, load_recipe

WHOLE = """
import dataclasses, pydantic, torch

class Inner(pydantic.BaseModel):
    depth: int = 1

class Args(pydantic.BaseModel):
    width: int = 3
    rate: float = pydantic.Field(0.5, ge=0.0, alias="speed")
    inner: Inner = Inner()
    list_of: list[Inner] = []
    by_name: dict[str, Inner] = {}

@dataclasses.dataclass
class Batch:
    x: torch.Tensor

def build_model(args):
    return torch.nn.Linear(args.width, 1)

def build_data(args, split):
    return [torch.ones(args.width)] * (4 if split == "train" else 2)

def collate(samples):
    return Batch(torch.stack(samples))

def loss(model, batch):
    return model(batch.x).sum(), len(batch.x)
"""
WORLD = World(rank=1, world_size=3)


def written(folder: Path, text: str, name: str = "my-model.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_file_becomes_a_recipe(tmp_path: Path) -> None:
    source = written(tmp_path, WHOLE)
    recipe = load_recipe(source, {"width": 5})
    model = recipe.build_model(WORLD)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    data = recipe.build_data("val")
    assert len(data) == 2
    assert recipe.collate is not None
    loss_sum, weight = recipe.loss(model, recipe.collate(data), WORLD)
    assert (loss_sum.dim(), weight) == (0, 2)
    assert recipe.sha256 == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    assert (recipe.metrics, recipe.on_save, recipe.bytes_per_token) == (None,) * 3


def test_classes_of_a_recipe_file_can_be_pickled(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, WHOLE), {})
    assert recipe.collate is not None
    batch = recipe.collate([torch.ones(2)])
    again = pickle.loads(pickle.dumps(batch))
    assert type(again) is type(batch)
    assert torch.equal(again.x, batch.x)


def test_two_recipes_of_one_name_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = load_recipe(written(tmp_path / "a", WHOLE), {})
    second = load_recipe(written(tmp_path / "b", WHOLE), {})
    assert sys.modules[first.module.__name__] is first.module
    assert sys.modules[second.module.__name__] is second.module


def test_a_file_leaves_no_cache_and_may_import_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "neighbour_of_recipe.py").write_text("WIDTH = 9\n")
    load_recipe(written(tmp_path, WHOLE + "\nfrom neighbour_of_recipe import WIDTH\n"), {})
    cached = [path.name for path in (tmp_path / "__pycache__").iterdir()]
    assert [name.split(".")[0] for name in cached] == ["neighbour_of_recipe"]


def test_a_module_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package_of_recipe").mkdir()
    (tmp_path / "package_of_recipe" / "__init__.py").touch()
    source = written(tmp_path / "package_of_recipe", WHOLE, "fine.py")
    recipe = load_recipe("package_of_recipe.fine", {})
    assert recipe.sha256 == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=r"no module named 'package_of_recipe\.fin' can be imported"):
        load_recipe("package_of_recipe.fin", {})
    written(tmp_path / "package_of_recipe", "import not_there_at_all", "broken.py")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_recipe("package_of_recipe.broken", {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere/model.py", "cannot read .*nowhere/model.py: No such file"),
        ("no module", "'no module' is neither the path of a .py file nor the name of a module"),
        ("not_there_at_all", "no module named 'not_there_at_all' can be imported"),
    ],
)
def test_a_source_that_is_not_there(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(source, {})


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its name must end with"):
        load_recipe(written(tmp_path, WHOLE, "model.yaml"), {})


def test_errors_of_the_recipe_keep_the_users_traceback(tmp_path: Path) -> None:
    source = written(tmp_path, "import torch\nx = undefined_name\n")
    with pytest.raises(NameError) as failure:
        load_recipe(source, {})
    last = traceback.extract_tb(failure.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.line) == (source, 2, "x = undefined_name")
    assert not any(getattr(module, "__file__", None) == source for module in sys.modules.values())
    with pytest.raises(SyntaxError) as wrong:
        load_recipe(written(tmp_path, "def loss(:\n"), {})
    assert (wrong.value.filename, wrong.value.lineno) == (source, 1)


def test_everything_missing_is_named_at_once(tmp_path: Path) -> None:
    source = written(tmp_path, "def built_model(args): ...\ndef get_data(): ...\n")
    with pytest.raises(ConfigError) as refusal:
        load_recipe(source, {})
    assert refusal.value.problems == [
        f"{source}: Args is missing; a recipe needs `class Args(pydantic.BaseModel)`",
        f"{source}: build_model is missing (found built_model; did you mean that?); "
        "a recipe needs `def build_model(args[, world])`",
        f"{source}: build_data is missing; a recipe needs `def build_data(args, split)`",
        f"{source}: loss is missing; a recipe needs `def loss(model, batch[, world])`",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("def build_model(): ...", r"build_model\(\) cannot be called as build_model\(args\[, world\]\): too many"),
        ("def build_model(args, size): ...", "missing a required argument: 'size'"),
        ("def build_model(args, world, size): ...", "missing a required argument: 'size'"),
        ("def build_data(args): ...", r"cannot be called as build_data\(args, split\)"),
        ("def loss(batch): ...", r"cannot be called as loss\(model, batch\[, world\]\)"),
        ("def collate(): ...", r"cannot be called as collate\(samples\)"),
        ("def global_name(path): ...", r"global_name\(path\) cannot be called as global_name\(path, world\)"),
        ("def on_save(model): ...", r"cannot be called as on_save\(model, folder\)"),
        ("def metrics(): ...", r"cannot be called as metrics\(loss, weight\)"),
        ("async def loss(model, batch): ...", "loss is a coroutine or a generator"),
        ("def build_data(args, split): yield 1", "build_data is a coroutine or a generator"),
        ("loss = 3", "loss is 3, expected a function"),
        ("class Args: pass", "expected a class that derives from pydantic.BaseModel"),
        ("bytes_per_token = 0", r"bytes_per_token is 0 \(int\), expected a positive number"),
        ("def bytes_per_token(args): return 'x'", r"bytes_per_token is 'x' \(str\), expected a positive number"),
    ],
)
def test_wrong_forms_are_refused_naming_file_and_form(tmp_path: Path, changed: str, said: str) -> None:
    source = written(tmp_path, f"{WHOLE}\n{changed}\n")
    with pytest.raises(ConfigError, match=said) as refusal:
        load_recipe(source, {})
    assert all(problem.startswith(f"{source}: ") for problem in refusal.value.problems)


def test_extra_parameters_with_defaults_and_bytes_per_token_by_function(tmp_path: Path) -> None:
    extra = "def build_model(args, size=2): return torch.nn.Linear(args.width, size)\n"
    extra += "def bytes_per_token(args): return args.width / 2\n"
    recipe = load_recipe(written(tmp_path, WHOLE + extra), {"width": 7})
    assert recipe.build_model(WORLD).weight.shape == (2, 7)
    assert recipe.bytes_per_token == 3.5


def test_world_is_passed_only_where_it_is_asked_for(tmp_path: Path) -> None:
    extra = """
def build_model(args, *, world):
    model = torch.nn.Linear(args.width, 1)
    model.world = world
    return model

def loss(model, batch, world):
    return torch.tensor(0.0), world.rank
"""
    recipe = load_recipe(written(tmp_path, WHOLE + extra), {})
    model = recipe.build_model(WORLD)
    assert model.world == WORLD
    assert recipe.loss(model, None, WORLD)[1] == 1


def test_all_arguments_that_do_not_hold_are_named_at_once(tmp_path: Path) -> None:
    source = written(tmp_path, WHOLE)
    with pytest.raises(ConfigError) as refusal:
        load_recipe(source, {"widht": 4, "speed": -1, "inner": {"depth": "deep"}, "rate": 2})
    assert refusal.value.problems == [
        f"recipe_args.widht: unknown argument, found 4; did you mean 'width'? (Args of {source})",
        f"recipe_args.rate: unknown argument, found 2; known: by_name, inner, list_of, speed, width (Args of {source})",
        f"recipe_args.speed: Input should be greater than or equal to 0; found -1 (Args of {source})",
        "recipe_args.inner.depth: Input should be a valid integer, unable to parse string as an integer; "
        f"found 'deep' (Args of {source})",
    ]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"inner": {"dept": 2}}, "recipe_args.inner.dept"),
        ({"list_of": [{}, {"dept": 2}]}, "recipe_args.list_of.1.dept"),
        ({"by_name": {"a": {"dept": 2}}}, "recipe_args.by_name.a.dept"),
    ],
)
def test_unknown_keys_are_refused_at_any_depth(tmp_path: Path, given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: unknown argument, found 2; did you mean 'depth'"):
        load_recipe(written(tmp_path, WHOLE), given)


def test_models_that_forbid_by_themselves_and_missing_arguments(tmp_path: Path) -> None:
    strict = """
class Inner(pydantic.BaseModel, extra="forbid"):
    depth: int = 1

class Args(pydantic.BaseModel, extra="forbid"):
    inner: Inner
    needed: int
"""
    with pytest.raises(ConfigError) as refusal:
        load_recipe(written(tmp_path, WHOLE + strict), {"inner": {"dept": 2}, "need": 1})
    assert [problem.partition(" (Args of")[0] for problem in refusal.value.problems] == [
        "recipe_args.need: unknown argument, found 1; did you mean 'needed'?",
        "recipe_args.inner.dept: unknown argument; found 2",
        "recipe_args.needed: missing, and it has no default",
    ]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(written(tmp_path, WHOLE), {})


@pytest.mark.parametrize(
    "weight", [0, 3, torch.tensor(3), torch.tensor(3, dtype=torch.int32), torch.tensor(5, dtype=torch.uint8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_good_losses_pass_as_they_are(recipe: Recipe, weight: Any, dtype: torch.dtype) -> None:
    loss_sum = torch.tensor(2.5, dtype=dtype)
    passed, count = recipe.check_loss((loss_sum, weight))
    assert passed is loss_sum
    assert type(count) is int
    assert count == int(weight)


def test_a_weight_on_an_accelerator_is_not_waited_for(recipe: Recipe) -> None:
    weight = torch.tensor(3, device="meta")  # reading a meta tensor fails, as reading a GPU tensor waits
    assert recipe.check_loss((torch.tensor(1.0), weight))[1] is weight


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.tensor(1.0), r"a tensor of torch.float32 and shape \(\), expected a pair \(loss_sum, weight\)"),
        ((torch.tensor(1.0), 2, 3), "a tuple of 3, expected a pair"),
        ((1.0, 2), r"a loss that is 1.0 \(float\), expected a tensor of no dimensions"),
        ((torch.ones(4), 4), r"a loss that is a tensor of torch.float32 and shape \(4,\).*the SUM"),
        ((torch.tensor(1.0, dtype=torch.bfloat16), 2), "a loss of torch.bfloat16, expected torch.float32"),
        ((torch.tensor(1), 2), "a loss of torch.int64"),
        ((torch.tensor(1.0), 2.0), r"a weight that is 2.0 \(float\), expected an int: how many tokens"),
        ((torch.tensor(1.0), True), r"a weight that is True \(bool\)"),
        ((torch.tensor(1.0), -1), "a weight that is -1, expected at least 0"),
        ((torch.tensor(1.0), torch.tensor(-2)), "a weight that is -2, expected at least 0"),
        ((torch.tensor(1.0), torch.tensor(2.0)), r"a weight that is a tensor of torch.float32 and shape \(\)"),
        ((torch.tensor(1.0), torch.tensor([2])), r"a weight that is a tensor of torch.int64 and shape \(1,\)"),
        ((torch.tensor(1.0), torch.tensor(True)), "a weight that is a tensor of torch.bool"),
        ((torch.tensor(1.0), None), "a weight that is None"),
    ],
)
def test_wrong_losses_are_refused(recipe: Recipe, result: object, said: str) -> None:
    with pytest.raises(UsageError, match=f"{recipe.source}: loss returned .*{said}"):
        recipe.check_loss(result)


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, WHOLE + "\ndef build_model(args): return torch.nn.Linear\n"), {})
    with pytest.raises(UsageError, match=r"build_model returned type, expected a torch.nn.Module"):
        recipe.build_model(WORLD)
