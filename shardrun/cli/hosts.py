"""What the hosts of a run compare before they start it together."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardrun import __version__
from shardrun.config.schema import Config
from shardrun.run.gathering import Party
from shardrun.run.hosts import Hosts

# What a host may have in another place, or show differently.
_OWN = frozenset({"run.dir", "recipe", "init_from", "log.stdout"})


def party_of(settings: Config, hosts: Hosts, options: Mapping[str, Any]) -> Party:
    """This host as it comes to the others: the config, what was asked for, the recipe's text, the versions."""
    same = dict(_flat(settings.model_dump(mode="json"), ""))
    same |= {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    same |= {"recipe": Path(settings.recipe).name, "recipe's sha256": _sha256(settings.recipe)}
    if settings.init_from is not None:
        same |= {"init_from": settings.init_from.name}
    same |= {"shardrun": __version__, "torch": _version("torch"), "python": platform.python_version()}
    plain: dict[str, Any] = json.loads(json.dumps(same, default=str))
    topology = settings.topology
    # A launcher may hang on the disk of its logs as long as a rank may on that of a save.
    patience_s = max(topology.timeout_s, topology.save_timeout_s)
    return Party(hosts, plain, settings.run.dir, patience_s, topology.init_timeout_s)


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif name not in _OWN:
            yield name, value


def _sha256(recipe: str) -> str | None:
    """Of the recipe's file; None for a module, and for a file that is not there, which the workers will tell."""
    path = Path(recipe)
    return hashlib.sha256(path.read_bytes()).hexdigest() if recipe.endswith(".py") and path.is_file() else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
