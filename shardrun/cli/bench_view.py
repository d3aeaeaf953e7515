"""What `bench` shows on a screen: a row for each contender, how each was set up, and what does not count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardrun.cli.inspect_view import plain_table, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_SPEED = ["", ">step s", ">min", ">max", ">tokens/s", ">x compute", ">beyond s", ">shardrun / it", "result"]
_MEMORY = ["", ">peak memory", ">gradients", ">optimizer state", ">first step s"]


def bench_view(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The document of a comparison."""
    count, threads = document["world_size"], document["threads_per_rank"]
    yield (
        f"{count} rank{'s' * (count != 1)} on {document['device']}, {threads} thread{'s' * (threads != 1)} each, "
        f"{document['weight_per_step']:,} tokens per step; {document['steps']} steps in each of {document['rounds']} "
        f"rounds after {document['warmup_steps']} to warm up"
    )
    contenders: Sequence[Mapping[str, Any]] = document["contenders"]
    yield plain_table(_SPEED, [_speed(one) for one in contenders])
    yield plain_table(_MEMORY, [_memory(one) for one in contenders if one["step_s"] is not None])
    yield "\n".join(_meaning(document))
    yield "\n".join(
        f"{one['name']}: {one['what']}" + (f"\n  {one['configuration']}" if one["configuration"] else "")
        for one in contenders
    )
    if void := [f"{one['name']} is void: {one['why']}" for one in contenders if one["status"] == "void"]:
        yield "\n".join(void)


def _speed(one: Mapping[str, Any]) -> list[str]:
    if one["step_s"] is None:
        return [one["name"], *["-"] * (len(_SPEED) - 2), one["why"]]
    return [
        one["name"],
        *(f"{one['step_s'][key]:.4g}" for key in ("median", "min", "max")),
        f"{one['tokens_per_s']:,.0f}",
        f"{one['ratio']:.3f}",
        f"{one['beyond_compute_s']:.3g}",
        f"{one['shardrun_ratio']:.3f}",
        one["status"],
    ]


def _memory(one: Mapping[str, Any]) -> list[str]:
    held = [size(one[key]) for key in ("peak_bytes", "gradient_bytes", "state_bytes")]
    return [one["name"], *held, f"{one['first_window_s']:.2f}"]


def _meaning(document: Mapping[str, Any]) -> Iterator[str]:
    yield "step: of the slowest rank, from fetching its data to the end of its update; median, min, max of all rounds"
    yield "x compute, beyond, shardrun / it: of the medians of the same round; the median over the rounds"
    yield "memory, gradients, state: of the worst rank; first step: from the start of the process to the end of it"
    if (reference := document["reference"]) is not None:
        tolerance = document["tolerance"]
        yield (
            f"valid: losses within {tolerance['loss']:g} of those of {reference}, and trained parameters within "
            f"{tolerance['distance']:g} of the way that {reference} went from the start"
        )


def pairs_view(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The document of paired steps."""
    yield (
        f"one rank on {document['device']}: {document['pairs']} pairs of a step of shardrun and one of a plain torch "
        f"loop in one process, after {document['warmup_pairs']} to warm up"
    )
    rows = []
    for name, key in (("wall", "wall"), ("CPU", "cpu")):
        one = document[key]
        low, high = one["interval"]
        seconds = [f"{one['shardrun_s']:.5g}", f"{one['plain_s']:.5g}"]
        rows.append([name, *seconds, f"{one['ratio']:.4f}", f"{low:.4f} to {high:.4f}"])
    yield plain_table(["time", ">shardrun s", ">plain s", ">ratio", "95 % interval of the median ratio"], rows)
    differing = document["differing"]
    yield (
        f"void: {differing[0]} and {len(differing) - 1} more parameters differ at the end"
        if differing
        else "all parameters are the same to the bit at the end"
    )
