"""Whether a run still means what its checkpoint was trained with: config, recipe file, options of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardrun.config.load import differences
from shardrun.config.schema import Config, meaning
from shardrun.errors import UsageError
from shardrun.records.fit import differences as leaf_differences

_SHOWN_OF_A_HASH = 12


def changes(manifest: Mapping[str, Any], config: Config) -> list[str]:
    """Settings that mean something else than those that the checkpoint was trained with, a line each."""
    return differences(manifest["meaning"], meaning(config))


def recipe_changes(manifest: Mapping[str, Any], source: str, sha256: str | None) -> list[str]:
    """A line if the recipe at `source` is not the file that the checkpoint was trained with."""
    saved = manifest["recipe"].get("sha256")
    if saved == sha256:
        return []
    before, now = (str(one)[:_SHOWN_OF_A_HASH] if one else "of no file" for one in (saved, sha256))
    return [f"recipe {source} was edited: sha256 saved {before}, now {now}"]


def of_world_size(line: str) -> bool:
    """Whether a line of `changes` is about the number and places of ranks, which a reshard changes and nothing else."""
    return line.startswith(("topology.world_size:", "topology.axes."))


def refusal(source: Path, changed: Iterable[str]) -> UsageError:
    """The error about going on from `source` with changes that nobody accepted."""
    lines = list(changed)
    ways = []
    if any(map(of_world_size, lines)):
        ways.append("go on at the other world size: --reshard, or first `shardrun reshard` and then --resume-from")
    if not all(map(of_world_size, lines)):
        ways.append("go on with the change: --accept-changes")
    ways.append("start anew in another folder: --fresh")
    return UsageError("\n  ".join([f"{source}: this run was trained with another config", *lines, "; ".join(ways)]))


def optimizer_misfits(
    saved: Mapping[str, Any], now: Mapping[str, Any], keys: Callable[[str, Mapping[str, Any]], Collection[str]]
) -> list[str]:
    """What of a changed optimizer cannot be accepted: another state than the saved one, a line each.

    Both sides are a record's meta["optimizer"]; `keys` gives the state tensors that exist under an optimizer's name and
    a group's options.
    """
    found = list(leaf_differences(_kind(saved), _kind(now), "optimizer"))
    if not found:
        for name, section in (("name", "groups"), ("rest", "rest_groups")):
            for number, (old, new) in enumerate(zip(saved.get(section, ()), now.get(section, ()), strict=True)):
                before, after = keys(saved[name], old), keys(now[name], new)
                if set(before) != set(after):
                    changed = ", ".join(leaf_differences(old, new, f"optimizer.{section}.{number}"))
                    found.append(f"{changed} (the saved state has {_told(before)}, this run needs {_told(after)})")
    return [f"{line}; --accept-changes cannot turn one state into another, --fresh starts anew" for line in found]


def _kind(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "strategy": optimizer.get("strategy", "zero2"),
        "name": optimizer["name"],
        "masters": optimizer["masters"],
        "option groups": len(optimizer["groups"]),
        **{key: optimizer[key] for key in ("rest", "owners") if key in optimizer},
    }


def _told(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)) or "none"
