"""The form of a recipe: which names it must have, which it may have, and what each is called with."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from shardrun.errors import ConfigError

# Name -> what shardrun passes by position; "[world]" is passed by name, and only where the function asks for it.
REQUIRED = {
    "build_model": ("args", "[world]"),
    "build_data": ("args", "split"),
    "loss": ("model", "batch", "[world]"),
}
OPTIONAL = {
    "collate": ("samples",),
    "metrics": ("loss", "weight"),
    "on_save": ("model", "folder"),
    "global_name": ("path", "world"),
    "hf_config": ("args",),
}


def find_functions(module: ModuleType, source: str) -> dict[str, Any]:
    """The recipe's `Args` and functions by name; raises `ConfigError` with everything that is missing or misshapen."""
    problems = []
    found: dict[str, Any] = {}
    args_class = getattr(module, "Args", None)
    if args_class is None:
        problems.append(_missing(module, "Args", "class Args(pydantic.BaseModel)", source))
    elif not (isinstance(args_class, type) and issubclass(args_class, BaseModel)):
        problems.append(f"{source}: Args is {args_class!r}, expected a class that derives from pydantic.BaseModel")
    found["Args"] = args_class
    for name, parameters in (REQUIRED | OPTIONAL).items():
        function = getattr(module, name, None)
        if function is None:
            if name in REQUIRED:
                problems.append(_missing(module, name, f"def {_form(name, parameters)}", source))
            continue
        problem = _misfit(function, name, parameters)
        if problem:
            problems.append(f"{source}: {problem}")
        found[name] = function
    if problems:
        raise ConfigError(problems)
    return found


def takes_world(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter named `world`."""
    return "world" in inspect.signature(function).parameters


def _form(name: str, parameters: tuple[str, ...]) -> str:
    return f"{name}({', '.join(parameters)})".replace(", [world]", "[, world]")


def _misfit(function: object, name: str, parameters: tuple[str, ...]) -> str | None:
    """What is wrong with a recipe's function, or None if it can be called as shardrun calls it."""
    if not callable(function):
        return f"{name} is {function!r}, expected a function {_form(name, parameters)}"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return f"{name} is a coroutine or a generator, expected an ordinary function {_form(name, parameters)}"
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: its own call will tell
        return None
    positional = [parameter for parameter in parameters if parameter != "[world]"]
    by_name = {"world": None} if "[world]" in parameters and takes_world(function) else {}
    try:
        signature.bind(*positional, **by_name)
    except TypeError as error:
        return f"{name}{signature} cannot be called as {_form(name, parameters)}: {error}"
    return None


def _missing(module: ModuleType, name: str, form: str, source: str) -> str:
    names = [key for key in vars(module) if not key.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    hint = f" (found {near[0]}; did you mean that?)" if near else ""
    return f"{source}: {name} is missing{hint}; a recipe needs `{form}`"
