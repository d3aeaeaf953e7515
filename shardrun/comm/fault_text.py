"""A plan of faults as text (faults.py has its words): read, or refused with the words that are possible."""

from __future__ import annotations

from dataclasses import dataclass

from shardrun.errors import UsageError

KINDS = ("fail", "delay", "hang", "stop", "kill", "lie")
LIES = ("fingerprint", "vote", "parameter")
STEP_PHASES = ("collect", "agree", "reduce", "normalise", "decide", "propose", "gather", "vote", "commit", "idle")
PHASES = ("start-up", "data", "forward", "backward", "replicas", *STEP_PHASES, "validation", "save", "between steps")
"""Every phase that a communicator is in, in a library step and under the trainer."""
FOR_EVER_S = 1e9
_NOTHING_RAISES = ("commit", "idle")


@dataclass(frozen=True)
class Fault:
    """One fault of a plan; `text` is how it was written."""

    text: str
    kind: str
    rank: int
    phase: str | None
    nth: int
    """In the phase: 0 where it begins, n its n-th collective. Without a phase: the number of the collective."""
    step: int | None = None
    every: bool = False
    """In every step, not only at the first such place."""
    lasts_s: float = FOR_EVER_S
    after_s: float = 0.0
    """How long after the place it happens; the rank goes on meanwhile."""
    about: str = ""
    path: str | None = None

    def is_at(self, phase: str, nth: int, step: int, collective: int, of_step: int) -> bool:
        """Whether a rank is at its place: `nth` in `phase`; a collective that begins has a number, also in its step."""
        if self.step is not None and self.step != step:
            return False
        if self.phase is not None:
            return (phase, nth) == (self.phase, self.nth)
        return self.nth == (of_step if self.every or self.step is not None else collective)


def read(text: str, world_size: int | None = None) -> tuple[Fault, ...]:
    """The faults of a plan; UsageError with every one that cannot be meant."""
    faults, problems = [], []
    for part in text.split(";"):
        words = _Words(part)
        try:
            faults.append(_read(words, world_size))
        except UsageError as error:
            problems.append(f"fault {words.text!r}: {error}")
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(faults)


class _Words:
    """The words of one fault, taken from the left."""

    def __init__(self, text: str) -> None:
        self.left = text.split()
        self.text = " ".join(self.left)

    def take(self, *possible: str, what: str = "") -> str:
        """The next word, which must be one of `possible` if any are given."""
        word = self.left[0] if self.left else ""
        if not word or (possible and word not in possible):
            raise self.refusal(word, what or " or ".join((", ".join(possible[:-1]), possible[-1])).removeprefix(" or "))
        return self.left.pop(0)

    def refusal(self, found: str, possible: str) -> UsageError:
        """What was found where something else is possible."""
        return UsageError(
            f"found {found!r} where it may have {possible}" if found else f"ends where it must have {possible}"
        )

    def come(self, *expected: str) -> bool:
        """Whether one of `expected` comes next, or nothing."""
        return not self.left or self.left[0] in expected

    def seconds(self, possible: str = "a time such as 0.5 s") -> float:
        """A time such as "0.5 s" or "0.5s"."""
        word = self.take(what=possible)
        try:
            value = float(word.removesuffix("s"))
        except ValueError:
            value = -1.0
        if not 0.0 < value <= FOR_EVER_S:
            raise self.refusal(word, possible)
        if not word.endswith("s"):
            self.take("s")
        return value

    def integer(self, word: str, what: str, least: int = 1) -> int:
        """`word` as an integer of at least `least`."""
        if not (word.isascii() and word.isdigit()) or int(word) < least:
            raise self.refusal(word, f"{what}, an integer from {least}")
        return int(word)


def _read(words: _Words, world_size: int | None) -> Fault:
    kind = words.take(*KINDS)
    words.take("rank")
    number = "the number of a rank"
    rank = words.integer(words.take(what=number), number, 0)
    if world_size is not None and rank >= world_size:
        raise UsageError(f"rank is {rank}; with world_size {world_size} it must be 0 to {world_size - 1}")
    lasts_s, about, path, after_s = FOR_EVER_S, "", None, 0.0
    if kind == "delay" or (kind in ("hang", "stop") and not words.come("at") and words.left[0] == "for"):
        words.take("by" if kind == "delay" else "for")
        lasts_s = words.seconds()
    elif kind == "lie":
        words.take("about")
        about = words.take(*LIES)
        if about == "parameter" and not words.come("at"):
            path = words.take()
    if kind in ("stop", "kill") and not words.come("at"):
        after_s = words.seconds("at, or a time such as 0.5 s")
        words.take("after")
    else:
        words.take("at")
    phase, nth = _place(words)
    if kind == "fail" and phase in _NOTHING_RAISES:
        raise UsageError(f"in phase {phase} nothing may raise; delay, hang, stop and kill are possible there")
    step, every = _step(words)
    return Fault(words.text, kind, rank, phase, nth, step, every, lasts_s, after_s, about, path)


def _place(words: _Words) -> tuple[str | None, int]:
    """The phase and the number in it, or None and the number of a collective."""
    end = words.left.index("of") if "of" in words.left else len(words.left)
    name, words.left = words.left[:end], words.left[end:]
    if name[:1] == ["collective"]:
        return None, words.integer(" ".join(name[1:]), "the number of a collective")
    phase, colon, number = " ".join(name).partition(":")
    if phase not in PHASES:
        raise words.refusal(phase, f"collective K or one of the phases {', '.join(PHASES)}")
    return phase, words.integer(number, "the number of a collective in that phase") if colon else 0


def _step(words: _Words) -> tuple[int | None, bool]:
    """The number of the step, or whether every step is meant."""
    if not words.left:
        return None, False
    words.take("of")
    if words.take("step", "every") == "every":
        words.take("step")
        step, every = None, True
    else:
        what = "the number of a step"
        step, every = words.integer(words.take(what=what), what), False
    if words.left:
        raise words.refusal(words.left[0], "its end, or ; and another fault")
    return step, every
