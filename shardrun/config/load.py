"""From a file and override words to a Config, or to one error with every problem in it; and back to YAML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shardrun.config.document import CORE_TYPES, Document, Problem, dotted, read_document
from shardrun.config.overrides import apply_overrides
from shardrun.config.problems import problems_of, shown
from shardrun.config.schema import ADDED, Config
from shardrun.errors import ConfigError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate a config with the overrides laid over it; paths become absolute, defaults are filled.

    `recipe` and `init_from` are relative to the config file (in an override: to where the command is started), as
    `run.dir` is to where the command is started. Raises ConfigError with all problems, each with its place.
    """
    document = read_document(_text(path), str(path))
    apply_overrides(document, overrides)
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        raise ConfigError(f"{path}:1:1: a config is a section (key: value lines), found {shown(document.data)}")
    _fill(document, path)
    config = None
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        document.problems.extend(problems_of(error, document))
    if config is None or document.problems:
        raise _error(document.problems)
    return config


def from_mapping(data: Mapping[str, Any]) -> Config:
    """A Config from plain data as `config.model_dump(mode="json")` gives it: what a worker receives.

    Paths are taken as they are. Raises ConfigError with all problems.
    """
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        raise _error(problems_of(error, Document(data))) from None


def resolved_yaml(config: Config) -> str:
    """The config as YAML that runs again as it is: paths absolute, every default written out."""
    document = config.model_dump(mode="json")
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two `meaning`s, a line for each key: `train.max_grad_norm: saved 1.0, now 0.5`."""
    lines = []
    saved, now = {**ADDED, **saved}, {**ADDED, **now}
    for key in sorted({*saved, *now}):
        before, after = (json.dumps(side[key], sort_keys=True) if key in side else "not set" for side in (saved, now))
        if before != after:
            lines.append(f"{key}: saved {before}, now {after}")
    return lines


def _error(problems: Sequence[Problem]) -> ConfigError:
    """One error, its problems in reading order; at one place in the order of the schema."""
    return ConfigError([str(problem) for problem in sorted(problems, key=lambda problem: problem.place)])


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or our 1.2 loader would take for something else than text."""

    yaml_implicit_resolvers = {key: list(known) for key, known in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012 - PyYAML's own table

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes rare line breaks (such as U+0085) bare and folds them when it reads; in double quotes it escapes.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _name, (_pattern, _first) in CORE_TYPES.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a config is a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a config file") from None


def _fill(document: Document, path: Path) -> None:
    """Defaults that depend on the file, and absolute paths, on the data before it is validated."""
    data = document.data
    for key in [key for key, value in data.items() if value is None and key in Config.model_fields]:
        del data[key]  # a section with nothing under it says nothing
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
        run.setdefault("name", stem)
        folder = run.setdefault("dir", f"runs/{run['name']}")
        if isinstance(folder, str):
            run["dir"] = _absolute(folder, Path.cwd())
    for key, check in (("recipe", _recipe_problem), ("init_from", _weights_problem)):
        written = data.get(key)
        if not isinstance(written, str) or not written:
            continue
        place = document.place((key,))
        if key != "recipe" or written.endswith(".py") or "/" in written:
            data[key] = _absolute(written, Path.cwd() if place.word else path.parent)
        if text := check(data[key]):
            document.problems.append(Problem(place, f"{dotted((key,))}: {text}"))


def _absolute(written: str, base: Path) -> str:
    return os.path.abspath(base / Path(written).expanduser())


def _recipe_problem(recipe: str) -> str:
    if recipe.endswith(".py"):
        return "" if Path(recipe).is_file() else f"there is no file {recipe}"
    if _MODULE.fullmatch(recipe):
        return ""
    return f"text {recipe!r} is neither a Python file (.py) nor the name of a module"


def _weights_problem(weights: str) -> str:
    if not weights.endswith(".safetensors"):
        return f"{weights} is no .safetensors file; convert it first (no pickle is ever read)"
    return "" if Path(weights).is_file() else f"there is no file {weights}"
