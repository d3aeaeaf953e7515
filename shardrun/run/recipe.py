"""A recipe: the user's own file or module that gives model, data and loss. Loaded, checked, and called through here."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import nn

from shardrun.errors import ConfigError, UsageError
from shardrun.run.compiling import compiled
from shardrun.run.recipe_args import validate_args
from shardrun.run.recipe_form import find_functions, takes_world


@dataclass(frozen=True)
class World:
    """What a recipe is told of the world, in the functions that ask for `world`."""

    rank: int
    world_size: int
    axes: Mapping[str, int] = field(default_factory=dict)
    """Name -> size, of the axes of the topology."""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    """Name -> this rank's place on the axis."""
    groups: Mapping[str, dist.ProcessGroup | None] = field(default_factory=dict)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """torch's process group of the ranks that differ from this one in `axis` only; None where there are none."""
        return self.groups.get(axis)


class Recipe:
    """A loaded recipe with its validated arguments. Its methods add `world` where the recipe's own signature has it."""

    def __init__(self, source: str, module: ModuleType, arguments: Mapping[str, Any], digest: str | None) -> None:
        self.source = source
        self.module = module
        self.sha256 = digest
        functions = find_functions(module, source)
        self.args = validate_args(functions["Args"], arguments, source)
        self._build_model, self._build_data, self._loss = (functions[n] for n in ("build_model", "build_data", "loss"))
        self._loss_takes_world = takes_world(self._loss)
        self.collate: Callable[[list[Any]], Any] | None = functions.get("collate")
        self.metrics: Callable[[float, int], dict[str, float]] | None = functions.get("metrics")
        self.global_name: Callable[[str, World], str] | None = functions.get("global_name")
        self.on_save: Callable[[nn.Module, Path], None] | None = functions.get("on_save")
        self.bytes_per_token = _bytes_per_token(module, self.args, source)
        self.hf_config = _hf_config(functions, self.args, source)
        """The model's config.json for transformers, recorded in every checkpoint; None without the function."""

    def build_model(self, world: World) -> nn.Module:
        """The model as the recipe builds it; seed the random streams before."""
        extra = {"world": world} if takes_world(self._build_model) else {}
        model = self._build_model(self.args, **extra)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{self.source}: build_model returned {type(model).__name__}, expected a torch.nn.Module; "
                "return the model itself"
            )
        return model

    def build_data(self, split: str) -> Any:
        """The data set of a split, "train" or "val"; its length and items are the loader's to check."""
        return self._build_data(self.args, split)

    def factory(self, name: str) -> Callable[..., torch.optim.Optimizer]:
        """What `optimizer.factory` names in the recipe; ConfigError if there is no such function or class."""
        found = getattr(self.module, name, None)
        if callable(found):
            return cast(Callable[..., torch.optim.Optimizer], found)
        if found is not None:
            raise ConfigError(
                f"optimizer.factory: {name} of {self.source} is {found!r}, expected a torch.optim.Optimizer class, or "
                f"a function that makes one: {name}(param_groups, lr=..., **factory_options)"
            )
        callables = [key for key, value in vars(self.module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, callables, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; define it there, or import it there"
        raise ConfigError(f"optimizer.factory: {self.source} has no {name}{hint}")

    def compile(self, *, deterministic: bool) -> None:
        """From now on `loss`, and the model in it, goes through torch.compile."""
        self._loss = compiled(self._loss, f"{self.source}: loss", deterministic=deterministic)

    def loss(self, model: nn.Module, batch: Any, world: World) -> tuple[torch.Tensor, int | torch.Tensor]:
        """The loss SUM over a micro-batch and its weight, checked as by `check_loss`."""
        extra = {"world": world} if self._loss_takes_world else {}
        return self.check_loss(self._loss(model, batch, **extra))

    def check_loss(self, result: object) -> tuple[torch.Tensor, int | torch.Tensor]:
        """What `loss` returned, as (loss_sum, weight), or a `UsageError` that says what is wrong with it.

        The sum is a float32 or float64 tensor of no dimensions. The weight is an int of at least 0; a 0-dim integer
        tensor on an accelerator stays a tensor, because reading it would make the host wait for every micro-batch.
        """
        where = f"{self.source}: loss returned"
        if not isinstance(result, tuple) or len(result) != 2:
            raise UsageError(f"{where} {_described(result)}, expected a pair (loss_sum, weight)")
        loss_sum, weight = result
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim() != 0:
            raise UsageError(
                f"{where} a loss that is {_described(loss_sum)}, expected a tensor of no dimensions: "
                'the SUM over the micro-batch, as with reduction="sum"'
            )
        if loss_sum.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{where} a loss of {loss_sum.dtype}, expected torch.float32 or torch.float64; "
                "call .float() on what is summed, before it is summed"
            )
        return loss_sum, self._checked_weight(weight)

    def _checked_weight(self, weight: object) -> int | torch.Tensor:
        where = f"{self.source}: loss returned a weight that is"
        if isinstance(weight, torch.Tensor):
            whole = weight.dim() == 0 and not weight.is_floating_point() and not weight.is_complex()
            if not whole or weight.dtype == torch.bool:
                raise UsageError(
                    f"{where} {_described(weight)}, expected an integer tensor of no dimensions, or an int"
                )
            if weight.device.type != "cpu":
                return weight
            weight = int(weight)
        if isinstance(weight, bool) or not isinstance(weight, SupportsIndex):
            raise UsageError(
                f"{where} {_described(weight)}, expected an int: how many tokens or samples are in the sum, "
                "such as labels.numel()"
            )
        count = operator.index(weight)
        if count < 0:
            raise UsageError(f"{where} {count}, expected at least 0")
        return count


def load_recipe(source: str, args: Mapping[str, Any]) -> Recipe:
    """The recipe at `source`, a path of a Python file or the dotted name of an importable module.

    Loading runs its code. An exception raised by that code comes out as it is, with its own traceback; everything
    else that is wrong raises `ConfigError`: no such file or module, a name or signature that is missing, arguments
    that its `Args` refuses (all of them at once, as `recipe_args.x`).
    """
    if source.endswith(".py") or "/" in source:
        module, digest = _load_file(Path(source))
    else:
        module, digest = _load_module(source)
    return Recipe(source, module, args, digest)


def _load_file(path: Path) -> tuple[ModuleType, str | None]:
    """Run the file as a module of its own, known to `sys.modules` so that dataclasses and pickle find it."""
    path = path.absolute()
    try:
        code = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"recipe: cannot read {path}: {error.strerror}; give a Python file or a module name"
        ) from None
    name = f"shardrun_recipe_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ConfigError(f"recipe: {path} is not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a recipe may import its neighbours, as a script may
    sys.modules[name] = module
    try:
        # Compiled from the bytes that were hashed, and without leaving a __pycache__ in the user's folder.
        exec(compile(code, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module, hashlib.sha256(code).hexdigest()


def _load_module(name: str) -> tuple[ModuleType, str | None]:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"recipe: {name!r} is neither the path of a .py file nor the name of a module")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module is there; what it imports is not
        raise ConfigError(
            f"recipe: no module named {name!r} can be imported ({error.name} is missing); "
            "give the path of a .py file, or install the package or put its folder on PYTHONPATH"
        ) from None
    file = getattr(module, "__file__", None)
    return module, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


def _bytes_per_token(module: ModuleType, args: Any, source: str) -> float | None:
    """The recipe's `bytes_per_token`, a number or a function of its arguments; None without one."""
    value = getattr(module, "bytes_per_token", None)
    if callable(value):
        value = value(args)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{source}: bytes_per_token is {_described(value)}, expected a positive number")
    return float(value)


def _hf_config(functions: Mapping[str, Any], args: Any, source: str) -> dict[str, Any] | None:
    """What the recipe's `hf_config` says of the model, as plain JSON that names what transformers is to build."""
    if "hf_config" not in functions:
        return None
    config = functions["hf_config"](args)
    where = f"{source}: hf_config returned"
    if not isinstance(config, dict):
        raise ConfigError(f"{where} {_described(config)}, expected a dict, such as config.to_dict() gives")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} a dict that is not plain JSON: {error}") from None
    names = plain.get("architectures")
    if not isinstance(plain.get("model_type"), str) or not isinstance(names, list) or len(names) != 1:
        raise ConfigError(
            f"{where} model_type {plain.get('model_type')!r} and architectures {names!r}, expected the type and the "
            'one class that transformers is to build, such as "llama" and ["LlamaForCausalLM"]'
        )
    return plain


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r} ({type(value).__name__})"
