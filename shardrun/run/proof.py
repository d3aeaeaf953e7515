"""The report of a proof: what was run and where, what was compared, the verdict, and what is not claimed. No torch."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardrun import __version__
from shardrun.checkpoint.manifest import canonical_json, sha256
from shardrun.errors import VerificationError

_WIDTH = 96
_ALWAYS = (
    "another machine, another number of ranks or another version of torch",
    "what the recipe takes from outside itself (clock, network, files that change, modules that it imports, random "
    "generators of its own): a change is seen only if it falls into these windows",
)


@dataclass(frozen=True)
class Compared:
    """How many values of one kind were compared, and where the first that differs stands."""

    what: str
    values: int
    first: str | None = None
    how: str = "bit-identical"
    """How they are equal if none differs."""

    @property
    def verdict(self) -> str:
        """What came out, in a few words."""
        return "differs" if self.first else self.how if self.values else "-"


@dataclass(frozen=True)
class Proof:
    """What came of a proof. `claim`: what follows if nothing differs; `more` belongs to its kind and goes into JSON."""

    subject: str
    claim: str
    rows: Sequence[Compared]
    first: str | None
    facts: Mapping[str, Any]
    not_claimed: Sequence[str]
    seconds: float
    hints: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    how: str = "bit-identical"
    """How the two sides are equal if nothing differs."""

    @property
    def exit_code(self) -> int:
        """0, or that of VerificationError."""
        return 0 if self.first is None else VerificationError.exit_code

    @property
    def values(self) -> int:
        """How many values were compared."""
        return sum(row.values for row in self.rows)

    @property
    def verdict(self) -> str:
        """In one or two words."""
        return self.how if self.first is None else "different"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `more` lies over it."""
        return {
            "verdict": self.verdict,
            "subject": self.subject,
            "claim": self.claim if self.first is None else None,
            "compared": [
                {"what": row.what, "values": row.values, "verdict": row.verdict, "first_difference": row.first}
                for row in self.rows
            ],
            "values": self.values,
            "first_difference": self.first,
            "hints": list(self.hints),
            "not_claimed": list(self.not_claimed),
            "seconds": round(self.seconds, 1),
            "facts": self.facts,
            **self.more,
        }

    def to_text(self) -> str:
        """One page."""
        title = "Report of shardrun verify-resume"
        lines = [title, "=" * len(title), ""]
        lines += _labelled("subject", self.subject)
        lines += _labelled("verdict", f"{self.verdict.upper()}: {self.values:,} values compared")
        if self.first is not None:
            lines += _labelled("difference", self.first)
        else:
            lines += _labelled("claim", self.claim)
        lines += _labelled("time", f"{self.seconds:.1f} s")
        for name, value in self.facts.items():
            lines += _labelled(name, _flat(value))
        lines += ["", "Compared", ""]
        lines += [f"  {row.what:<36} {row.values:>14,}  {row.verdict}" for row in self.rows]
        for head, texts in (("Notes", self.hints), ("Not claimed", self.not_claimed)):
            if texts:
                lines += ["", head, ""]
                lines += [line for text in texts for line in _wrapped(f"- {text}", "  ", "    ")]
        return "\n".join(lines) + "\n"


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(text, f"{label:<12} ", " " * 13)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_flat(one)}" for key, one in value.items() if one is not None)
    return str(value)


# ---- what a reader has to know ---------------------------------------------------------------------------------------


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What was run and where, from the manifest of a checkpoint that was written on this machine just now."""
    config, numerics = manifest["config"], manifest["numerics"]
    topology = manifest["topology"]
    return {
        "config": {"sha256": sha256(canonical_json(manifest["meaning"])), "name": config["run"]["name"]},
        "recipe": dict(manifest["recipe"]),
        "data": {key: manifest["data"].get(key) for key in ("identity", "samples")},
        "ranks": {"world size": topology["world_size"], "device": numerics["device"], "seam": numerics["seam"]},
        "versions": {
            "shardrun": __version__,
            "torch": numerics["torch"],
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            **numerics["processor"],
            "threads per rank": numerics["threads"],
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _processor() -> str:
    """The name of the processor as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def limits(manifest: Mapping[str, Any] | None, *, unsteady: str | None = None) -> Iterator[str]:
    """What no proof of this kind can claim of a run with this manifest. `unsteady`: where its data changed."""
    if unsteady is not None:
        yield f"that the data of a resumed run are those of one that never stopped: {unsteady}"
    if manifest is not None and manifest["data"].get("identity") is None:
        yield (
            "that the data are those of an earlier start: the data set gives no `identity`, only its length is compared"
        )
    yield from _ALWAYS
