"""Whether saved state fits this run: every misfit at once, with the saved and the expected value.

Nothing here reads a file or knows a tensor: both sides are plain JSON, as it stands in a record's meta and in a
manifest. Each line can be shown to a user as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, Protocol

from shardrun.shard.contract import Contract, ParameterSpec

_MOST_LINES = 40
_ABSENT = object()
_OF_A_RECORD = ("optimizer", "numerics", "layout")


class Shaped(Protocol):
    """A tensor, or its entry in a header."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def violations(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Where the meta of a saved record (see `Zero2Record`) does not fit the meta that this session would write.

    Compares version, group, topology, contract, optimizer, numerics, layout and fragments; what else a meta holds is
    progress, not identity. A section that `expected` lacks is not compared.
    """
    found = [
        f"record {key} saved {_show(saved.get(key))}, this run {_show(expected[key])}"
        for key in ("version", "group")
        if key in expected and saved.get(key) != expected[key]
    ]
    same_world = True
    if "world_size" in expected:
        found += world_violations(saved.get("world_size"), expected["world_size"])
        same_world = saved.get("world_size") == expected["world_size"]
        if same_world and "rank" in expected and saved.get("rank") != expected["rank"]:
            found.append(f"record of rank {saved.get('rank')}, this is rank {expected['rank']}")
    found += group_violations(saved, expected)
    if "fragments" in expected and same_world and not found:
        found += _limited(differences(saved.get("fragments"), expected["fragments"], "fragments"))
    return found


def world_violations(saved: Any, expected: Any) -> list[str]:
    """The line about a changed world size, or nothing."""
    if saved == expected:
        return []
    ways = f"resume with --reshard, or use `shardrun reshard`; or go on with topology.world_size={saved}"
    return [f"world size saved {saved}, this run {expected} ({ways})"]


def _members_violation(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The line about groups that are on other ranks, or nothing."""
    if saved == expected:
        return []
    told = [
        f"{name} on ranks {','.join(map(str, ranks))}"
        for side in (saved, expected)
        for name, ranks in sorted(side.items())
    ]
    before, now = ", ".join(told[: len(saved)]), ", ".join(told[len(saved) :])
    return [f"groups saved {before}, this run {now} (resume with --reshard; or go on with the topology of then)"]


def group_violations(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Misfits of one group: contract, members, optimizer, numerics, and the layout if all of these fit."""
    found: list[str] = []
    if "contract" in expected:
        found += _limited(contract_differences(saved.get("contract", []), expected["contract"]))
    if "members" in expected:
        found += _limited(differences(saved.get("members", _ABSENT), expected["members"], "members"))
    for section in _OF_A_RECORD:
        # A layout follows from the rest; told apart only where the rest is equal.
        if section in expected and not (section == "layout" and found):
            found += _limited(differences(saved.get(section, _ABSENT), expected[section], section), 10)
    return found


def contract_differences(saved: list[dict[str, Any]], expected: list[dict[str, Any]]) -> Iterator[str]:
    """One line per path that was added, is missing, or has another shape, dtype, trainable flag or tie."""
    before, now = _by_path(Contract.from_json(saved)), _by_path(Contract.from_json(expected))
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            yield f"{path}: saved ({_describe(before[path][0])}), this run does not select it"
        elif path not in before:
            yield f"{path}: this run selects it ({_describe(now[path][0])}), the checkpoint does not"
        else:
            yield from _spec_differences(path, before[path], now[path])


def shared_differences(saved: list[dict[str, Any]], expected: list[dict[str, Any]]) -> Iterator[str]:
    """One line per path of both contracts that has another shape, dtype, trainable flag or tie."""
    before, now = _by_path(Contract.from_json(saved)), _by_path(Contract.from_json(expected))
    for path in sorted(before.keys() & now.keys()):
        yield from _spec_differences(path, before[path], now[path])


def _by_path(contract: Contract) -> dict[str, tuple[ParameterSpec, str]]:
    return {spec.path: (spec, contract.specs[spec.alias].path) for spec in contract.specs}


def _describe(spec: ParameterSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}, {_flag(spec.trainable)}"


def _flag(trainable: bool) -> str:
    return "trainable" if trainable else "frozen"


def _spec_differences(path: str, before: tuple[ParameterSpec, str], now: tuple[ParameterSpec, str]) -> Iterator[str]:
    (old, old_first), (new, new_first) = before, now
    if old.shape != new.shape:
        yield f"{path}: shape saved {list(old.shape)}, this run {list(new.shape)}"
    if old.dtype != new.dtype:
        yield f"{path}: dtype saved {old.dtype}, this run {new.dtype}"
    if old.trainable != new.trainable:
        yield f"{path}: saved {_flag(old.trainable)}, this run {_flag(new.trainable)}"
    if old_first != new_first:
        yield f"{path}: saved {_tie(path, old_first)}, this run {_tie(path, new_first)}"


def _tie(path: str, first: str) -> str:
    return "as a tensor of its own" if first == path else f"tied to {first}"


def checkpoint_violations(manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Where a whole checkpoint does not fit a run.

    `expected` has the manifest's structure: topology, groups, model ({name: [dtype, shape]}), aliases ({alias: name}),
    numerics; any other section is compared as it is. A section that `expected` lacks is not compared.
    """
    topology = dict(expected.get("topology", {}))
    found = world_violations(manifest["topology"]["world_size"], topology.pop("world_size"))
    elsewhere: list[str] = []
    if not found:  # members and the like follow the world size
        saved_topology = {key: value for key, value in manifest["topology"].items() if key != "world_size"}
        if "members" in topology:
            elsewhere = _members_violation(saved_topology.pop("members", {}), topology.pop("members"))
        found += elsewhere + (_limited(differences(saved_topology, topology, "topology")) if topology else [])
    if "model" in expected:
        found += _limited(model_differences(manifest, expected))
    groups, saved_groups = expected.get("groups", {}), manifest["groups"]
    if "groups" in expected and not elsewhere:
        found += [f"group {name}: saved, not in this run" for name in sorted(saved_groups.keys() - groups.keys())]
    for name, group in groups.items() if not elsewhere else ():
        if name not in saved_groups:
            found.append(f"group {name}: not in the checkpoint")
        else:
            prefix = f"group {name}: " if len(groups) > 1 else ""
            found += [prefix + line for line in group_violations(saved_groups[name], group)]
    for section in expected.keys() - {"topology", "model", "aliases", "groups"}:
        lines = _limited(differences(manifest.get(section, _ABSENT), expected[section], section))
        hint = " (exact state, other bits from here on: go on with it by --accept-changes)"
        found += [line + hint for line in lines] if section == "numerics" else lines
    return list(dict.fromkeys(found))


def model_differences(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """One line per name that is missing, not expected, of another dtype or shape, or tied to something else.

    Both sides have `model` and `aliases`; which of two tied names is the stored one makes no difference.
    """
    before, now = _whole_model(saved), _whole_model(expected)
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            yield f"model: {name}: saved ({_spec(before[name])}), this run has no such tensor"
        elif name not in before:
            yield f"model: {name}: expected ({_spec(now[name])}), not in the checkpoint"
        else:
            (old_dtype, old_shape, old_first), (new_dtype, new_shape, new_first) = before[name], now[name]
            if old_shape != new_shape:
                yield f"model: {name}: shape saved {old_shape}, this run {new_shape}"
            if old_dtype != new_dtype:
                yield f"model: {name}: dtype saved {old_dtype}, this run {new_dtype}"
            if old_first != new_first:
                yield f"model: {name}: saved {_tie(name, old_first)}, this run {_tie(name, new_first)}"


def _whole_model(side: Mapping[str, Any]) -> dict[str, tuple[str, list[int], str]]:
    """Every name, aliases included -> dtype, shape, and the first name of its tie."""
    aliases = side.get("aliases", {})
    first: dict[str, str] = {}
    for name in sorted([*side["model"], *aliases]):
        first.setdefault(aliases.get(name, name), name)
    stored = {name: aliases.get(name, name) for name in [*side["model"], *aliases]}
    return {name: (side["model"][to][0], list(side["model"][to][1]), first[to]) for name, to in stored.items()}


def _spec(one: tuple[str, list[int], str]) -> str:
    return f"{one[0]} {one[1]}"


def differences(saved: Any, expected: Any, where: str) -> Iterator[str]:
    """Every leaf in which two JSON values differ, by dotted key."""
    if isinstance(saved, Mapping) and isinstance(expected, Mapping):
        for key in sorted(saved.keys() | expected.keys()):
            yield from differences(saved.get(key, _ABSENT), expected.get(key, _ABSENT), f"{where}.{key}")
    elif isinstance(saved, list | tuple) and isinstance(expected, list | tuple) and len(saved) == len(expected):
        for index, (one, other) in enumerate(zip(saved, expected, strict=True)):
            yield from differences(one, other, f"{where}.{index}")
    elif saved != expected or type(saved) is not type(expected):
        yield f"{where}: saved {_show(saved)}, this run {_show(expected)}"


def _show(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= 120 else f"{text[:110]}... ({len(text):,} characters)"


def _limited(lines: Iterable[str], most: int = _MOST_LINES) -> list[str]:
    found = list(lines)
    return found if len(found) <= most else [*found[: most - 1], f"... and {len(found) - most + 1} more like these"]


# ---- the pieces of a record against its own contract -----------------------------------------------------------------


def holds_whole(section: Mapping[str, Any]) -> bool:
    """Whether a record's meta, or the section of a group, is of ZeRO-1: a holder has whole parameters."""
    optimizer = section.get("optimizer")
    return isinstance(optimizer, Mapping) and optimizer.get("strategy") == "zero1"


def piece_violations(
    fragments: Mapping[str, list[int]], tensors: Mapping[str, Shaped], *, whole: bool = False
) -> list[str]:
    """Tensors of a record that are not what its fragments say: (stop - start,) per element, () per parameter.

    `whole`: state of a whole parameter, whose tensors have shapes of their own.
    """
    found = []
    for name, tensor in tensors.items():
        path = name.rpartition("/")[0]
        held = fragments.get(path)
        if held is None:
            found.append(f"{name}: this rank holds no fragment of {path or 'that name'}")
        elif not whole and tuple(tensor.shape) not in ((), (held[1] - held[0],)):
            found.append(f"{name}: shape {list(tensor.shape)}; the fragment {held} has {held[1] - held[0]} elements")
    return found


def cover_violations(
    contract: list[dict[str, Any]], held: Mapping[int, Mapping[str, list[int]]], *, whole: bool = False
) -> list[str]:
    """Where the fragments of all ranks ({rank: {path: [start, stop]}}) are not the trainable parameters, each once.

    `whole`: each in one piece.
    """
    wanted = {spec.path: prod(spec.shape) for spec in Contract.from_json(contract).distinct() if spec.trainable}
    pieces: dict[str, list[tuple[int, int, int]]] = {path: [] for path in wanted}
    found = []
    for rank, fragments in held.items():
        for path, (start, stop) in fragments.items():
            if path in pieces:
                pieces[path].append((start, stop, rank))
            else:
                found.append(f"{path}: rank {rank} holds [{start}, {stop}) of it; it is not a trainable parameter")
    for path, parts in pieces.items():
        at = 0
        for start, stop, _ in sorted(parts):
            if start != at or stop > wanted[path]:
                break
            at = stop
        else:
            if at == wanted[path] and not (whole and len(parts) > 1):
                continue
        told = ", ".join(f"rank {rank} [{start}, {stop})" for start, stop, rank in sorted(parts)) or "no rank"
        how = "by one owner" if whole else "exactly once"
        found.append(f"{path}: its {wanted[path]} elements are not held {how}: {told}")
    return found
