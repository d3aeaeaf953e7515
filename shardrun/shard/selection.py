"""Which parameters of the real, full, rank-local model a session covers. Nothing is read, moved or copied."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardrun.errors import SelectionError
from shardrun.shard.contract import Contract, ParameterSpec

TRAINABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WRAPPERS = ("_orig_mod",)  # torch.compile


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All (path, Parameter) in definition order, every alias included, without the prefixes of torch's wrappers."""
    named = [(path_in(model, path), parameter) for path, parameter in model.named_parameters(remove_duplicate=False)]
    seen: set[str] = set()
    return [(path, parameter) for path, parameter in named if not (path in seen or seen.add(path))]  # type: ignore[func-returns-value]


def name_globally(model: nn.Module, name: Callable[[str], str]) -> None:
    """Let the tensors of `model`, a part of a larger one, be known by the path `name(path)` that they have there.

    From here on these are their paths for selections, sessions, records and messages. Local; SelectionError where a
    name is no text or is given twice.
    """
    paths = [path for path, _ in model.named_parameters(remove_duplicate=False)]
    paths += [path for path, _ in model.named_buffers(remove_duplicate=False)]
    given: dict[str, str] = {}
    for path in dict.fromkeys(map(clean_path, paths)):
        found = name(path)
        if not isinstance(found, str) or not found:
            raise SelectionError(f"global_name: {path} is named {found!r}, expected a dotted path")
        if given.setdefault(found, path) != path:
            raise SelectionError(f"global_name: {given[found]} and {path} are both named {found}; name them apart")
    _global_names[model] = {path: found for found, path in given.items()}


_global_names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def path_in(model: nn.Module, path: str) -> str:
    """The path by which a tensor of `model` is known."""
    clean = clean_path(path)
    return _global_names.get(model, {}).get(clean, clean)


def clean_path(path: str) -> str:
    """A dotted path without the components that torch's wrappers put in."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Selection:
    """Selected paths, in the model's definition order, each with its Parameter; aliases are all there.

    `matches` counts, per include pattern, the paths that it matched; `added` names aliases that no pattern named.
    """

    parameters: dict[str, nn.Parameter]
    unselected: dict[str, nn.Parameter]
    matches: dict[str, int]
    added: tuple[str, ...]

    def contract(self) -> Contract:
        """What this rank holds, sorted by path."""
        paths = sorted(self.parameters)
        first: dict[int, int] = {}
        for index, path in enumerate(paths):
            first.setdefault(id(self.parameters[path]), index)
        return Contract.of(
            ParameterSpec(
                path,
                tuple(self.parameters[path].shape),
                str(self.parameters[path].dtype).removeprefix("torch."),
                self.parameters[path].requires_grad,
                first[id(self.parameters[path])],
            )
            for path in paths
        )


def pattern(text: str) -> re.Pattern[str]:
    """A glob over a whole dotted path, or a regular expression after `re:` (matched anywhere in the path's start)."""
    try:
        return re.compile(text[3:] if text.startswith("re:") else translate(text))
    except re.error as error:
        raise SelectionError(f"select: {text!r} is not a regular expression: {error}") from None


class Agreeing(Protocol):
    """What a selection needs of a communicator."""

    def agree(self, tag: str, value: Any = None, error: Exception | None = None) -> list[Any]: ...


def select_parameters(
    model: nn.Module,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    *,
    comm: Agreeing | None = None,
    shapes_only: bool = False,
) -> Selection:
    """Select parameters by dotted path: `include` first, then `exclude`; SelectionError says what cannot be selected.

    Patterns are globs (`blocks.*.bias`; `*` also crosses dots) or `re:` expressions. A pattern that matches nothing is
    an error. Selecting one path of a tied parameter selects the tensor under all its paths; excluding another path of
    it is refused. An empty selection (no patterns) is valid. Local without `comm`; with it every rank calls, and what
    is wrong on one rank is raised by all, so that none waits in the next call for one that gave up here.
    `shapes_only`: for a plan, of a model that may be on the meta device.
    """
    found, problem = None, None
    try:
        found = _select(model, include, exclude, shapes_only)
    except SelectionError as error:
        problem = error
    if comm is not None:
        comm.agree("selection", error=problem)
    if found is None:
        assert problem is not None
        raise problem
    return found


def _select(model: nn.Module, include: Sequence[str], exclude: Sequence[str], shapes_only: bool) -> Selection:
    everything = dict(named_parameters(model))
    matched: dict[str, list[str]] = {}
    for text in dict.fromkeys([*include, *exclude]):
        matched[text] = [path for path in everything if pattern(text).match(path)]
        if not matched[text] and not (text == "*" and not everything):
            raise SelectionError(_nothing_matched(text, list(everything)))
    included = {path for text in include for path in matched[text]}
    excluded = {path for text in exclude for path in matched[text]}
    chosen = included - excluded
    ids = {id(everything[path]): path for path in chosen}
    added = []
    for path, parameter in everything.items():
        if path in chosen or id(parameter) not in ids:
            continue
        if path in excluded:
            raise SelectionError(
                f"select: {ids[id(parameter)]} is selected and {path} is excluded, but they are the same tensor; "
                "select or exclude both"
            )
        added.append(path)
    selected = {path: parameter for path, parameter in everything.items() if path in chosen or path in added}
    rest = {path: parameter for path, parameter in everything.items() if path not in selected}
    _refuse_unfit(selected, shapes_only)
    _refuse_overlap(selected, rest, model)
    return Selection(selected, rest, {text: len(matched[text]) for text in include}, tuple(added))


def _nothing_matched(text: str, paths: list[str]) -> str:
    nearest = difflib.get_close_matches(text.removeprefix("re:"), paths, n=3, cutoff=0.0)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return f"select: {text!r} matches none of {len(paths)} parameters{hint}"


def _refuse_unfit(selected: dict[str, nn.Parameter], shapes_only: bool) -> None:
    devices = {parameter.device: path for path, parameter in selected.items() if parameter.requires_grad}
    if len(devices) > 1 and not shapes_only:
        sides = " and ".join(f"{path} on {device}" for device, path in devices.items())
        raise SelectionError(f"select: trainable parameters of one session are on one device, found {sides}")
    for path, parameter in selected.items():
        if parameter.is_meta and not shapes_only:
            raise SelectionError(f"select: {path} is on the meta device; give it values or exclude it")
        if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise SelectionError(
                f"select: elements of {path} share memory (expanded?); give it memory of its own: clone()"
            )
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in TRAINABLE_DTYPES:
            raise SelectionError(
                f"select: {path} is {str(parameter.dtype).removeprefix('torch.')}; trainable parameters are float32, "
                "float16 or bfloat16: convert it or exclude it"
            )
        if parameter.numel() == 0:
            raise SelectionError(
                f"select: {path} is trainable and has no elements, shape {tuple(parameter.shape)}: exclude or freeze it"
            )


def _refuse_overlap(selected: dict[str, nn.Parameter], rest: dict[str, nn.Parameter], model: nn.Module) -> None:
    """A selected parameter on memory that another tensor uses would be updated twice, or torn from it; refuse it."""
    buffers = {path_in(model, path): buffer for path, buffer in model.named_buffers(remove_duplicate=False)}
    spans: dict[tuple[str, int], list[tuple[int, int, str, int]]] = {}
    for path, parameter in [*selected.items(), *rest.items(), *buffers.items()]:
        if parameter.numel() == 0 or parameter.device.type == "meta":
            continue
        storage = parameter.untyped_storage()
        extent = 1 + sum((int(n) - 1) * int(s) for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        begin = int(parameter.storage_offset()) * parameter.element_size()
        span = (begin, begin + extent * parameter.element_size(), path, id(parameter))
        spans.setdefault((str(parameter.device), storage.data_ptr()), []).append(span)
    for group in spans.values():
        widest: dict[bool, tuple[int, str, int]] = {}  # selected or not -> the span that reaches furthest so far
        for start, stop, path, key in sorted(group):
            chosen = path in selected
            for other_chosen, (reach, other, other_key) in widest.items():
                if other_key != key and start < reach and (chosen or other_chosen):
                    raise SelectionError(
                        f"select: {other} and {path} are different tensors on the same stretch of memory, and one of "
                        "them is selected; tie them (one Parameter under two names) or give each its own memory"
                    )
            if chosen not in widest or stop > widest[chosen][0]:
                widest[chosen] = (stop, path, key)
