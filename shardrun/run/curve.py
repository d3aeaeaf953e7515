"""loss.svg: the loss of a run as a picture, drawn from its metrics.jsonl without a plotting library."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from shardrun.run.metrics import NAME, read_rows

PICTURE = "loss.svg"

Point = tuple[float, float]

_WIDTH, _HEIGHT = 960, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 78, 62
_MOST_SPREAD = 30.0  # beyond this ratio of the highest to the lowest loss the axis is logarithmic
_SMOOTHED_FROM = 20  # points; fewer are shown as they are
_MOST_DOTS = 60

# Presentation attributes would do for light alone; classes let the dark scheme change the colours.
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: #57606a }
.title { font-size: 18px; font-weight: 600; fill: #1f2328 }
.paper { fill: #ffffff } .grid { stroke: #e4e7eb; stroke-width: 1 } .axis { stroke: #8c959f; stroke-width: 1 }
.raw { fill: none; stroke: #9ec5f4; stroke-width: 1 }
.smooth { fill: none; stroke: #1f6feb; stroke-width: 2; stroke-linejoin: round }
.val { fill: none; stroke: #bc4c00; stroke-width: 1.5 } .dot { fill: #bc4c00; stroke: #ffffff; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .title { fill: #f0f6fc }
.paper { fill: #0d1117 } .grid { stroke: #262c36 } .axis { stroke: #656c76 }
.raw { stroke: #264d80 } .smooth { stroke: #58a6ff }
.val { stroke: #f0883e } .dot { fill: #f0883e; stroke: #0d1117 }
}
"""


def write_curve(run_dir: Path) -> Path | None:
    """Draw RUN_DIR/loss.svg anew and return its path; None, and no picture, if metrics.jsonl holds no finite loss.

    OSError as the system gives it; the picture that was there before is whole then.
    """
    rows = read_rows(run_dir / NAME)
    train, val = _points(rows, "loss"), _points(rows, "val_loss")
    if not train and not val:
        return None
    path = run_dir / PICTURE
    part = path.with_suffix(".svg.part")
    try:
        part.write_text(draw(f"Loss of {run_dir.resolve().name}", train, val), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    return path


def draw(title: str, train: Sequence[Point], val: Sequence[Point]) -> str:
    """The picture as SVG text. `train` and `val` are (step, loss) in the order of steps, finite, at least one of them.

    Its size is bounded: of all points that fall on one pixel column only the first, lowest, highest and last are drawn.
    """
    smooth = _smoothed(train) if len(train) >= _SMOOTHED_FROM else []
    frame = _frame([*train, *val])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="34">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="56">{_summary(train, val)}</text>',
        *_axes(frame),
        *_line("raw" if smooth else "smooth", frame.thinned(train)),
        *_line("smooth", frame.thinned(smooth)),
        *_line("val", frame.thinned(val)),
        *(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in frame.thinned(_dotted(val))),
        *_legend(bool(train), bool(smooth), bool(val)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---- data ----------------------------------------------------------------------------------------------------------


def _points(rows: Sequence[dict[str, Any]], key: str) -> list[Point]:
    found = []
    for row in rows:
        step, loss = row.get("step"), row.get(key)
        if isinstance(step, int) and isinstance(loss, int | float) and math.isfinite(loss):
            found.append((float(step), float(loss)))
    return found


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """An exponential mean over about a sixtieth of the run, taken forwards and backwards so that it does not lag."""
    keep = 1.0 - 1.0 / max(4.0, len(points) / 60)
    losses = [loss for _, loss in points]
    there = list(_running_mean(losses, keep))
    back = list(_running_mean(losses[::-1], keep))[::-1]
    return [(step, (one + other) / 2) for (step, _), one, other in zip(points, there, back, strict=True)]


def _running_mean(values: Sequence[float], keep: float) -> Iterator[float]:
    mean, weight = 0.0, 0.0  # divided by its own weight, so that the start is no nearer to zero than the values are
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        yield mean / weight


def _dotted(val: Sequence[Point]) -> Sequence[Point]:
    """The validations that get a dot: all, or the last alone where they would be a string of pearls."""
    return val if len(val) <= _MOST_DOTS else val[-1:]


def _summary(train: Sequence[Point], val: Sequence[Point]) -> str:
    parts = [f"step {max(points[-1][0] for points in (train, val) if points):,.0f}"]
    if train:
        parts.append(f"training loss {train[0][1]:.4g} to {train[-1][1]:.4g}")
    if val:
        parts.append(f"validation {val[-1][1]:.4g}")
    return " · ".join(parts)


# ---- geometry ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """From (step, loss) to pixels."""

    first: float
    last: float
    low: float
    high: float
    logarithmic: bool

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        return _HEIGHT - _BOTTOM - (self._scaled(loss) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def _scaled(self, loss: float) -> float:
        return math.log10(loss) if self.logarithmic else loss

    def thinned(self, points: Sequence[Point]) -> list[Point]:
        """The pixels of a line through `points`; at most four on each pixel column."""
        columns: dict[int, list[Point]] = {}
        for step, loss in points:
            at = (self.x(step), self.y(loss))
            columns.setdefault(int(at[0]), []).append(at)
        return [point for column in columns.values() for point in _extremes(column)]


def _extremes(column: Sequence[Point]) -> Iterator[Point]:
    heights = [y for _, y in column]
    kept = {0, len(column) - 1, heights.index(min(heights)), heights.index(max(heights))}
    return (column[index] for index in sorted(kept))


def _frame(points: Sequence[Point]) -> _Frame:
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)
    logarithmic = low > 0 and high / low > _MOST_SPREAD
    if first == last:
        first, last = first - 1, last + 1
    if logarithmic:
        return _Frame(first, last, low / 1.1, high * 1.1, logarithmic)
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return _Frame(first, last, low - margin, high + margin, logarithmic)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in [low, high], a few more than half of `most`."""
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _loss_ticks(frame: _Frame) -> list[float]:
    if not frame.logarithmic:
        return _ticks(frame.low, frame.high, 7)
    decades = range(math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high)) + 1)
    factors: tuple[int, ...] = (1, 2, 5) if len(decades) < 5 else (1,)
    every = max(1, len(decades) // 8)
    return [
        factor * 10.0**decade
        for decade in decades
        for factor in factors
        if decade % every == 0 and frame.low <= factor * 10.0**decade <= frame.high
    ]


# ---- parts of the picture ------------------------------------------------------------------------------------------


def _axes(frame: _Frame) -> Iterator[str]:
    left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    for loss in _loss_ticks(frame):
        y = frame.y(loss)
        yield f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text x="{left - 10}" y="{y + 4.5:.1f}" text-anchor="end">{_number(loss)}</text>'
    for step in _ticks(frame.first, frame.last, 10):
        if step != int(step):
            continue
        x = frame.x(step)
        yield f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 21}" text-anchor="middle">{int(step):,}</text>'
    yield f'<path class="axis" fill="none" d="M{left} {top}V{bottom}H{right}"/>'
    yield f'<text x="{(left + right) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">step</text>'
    middle = (top + bottom) / 2
    label = "loss (logarithmic)" if frame.logarithmic else "loss"
    yield f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">{label}</text>'


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.6g}"


def _line(kind: str, pixels: Sequence[Point]) -> Iterator[str]:
    if pixels:
        coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        yield f'<polyline class="{kind}" points="{coordinates}"/>'
    if len(pixels) == 1 and kind != "val":
        yield f'<circle class="{kind}" cx="{pixels[0][0]:.1f}" cy="{pixels[0][1]:.1f}" r="3"/>'


def _legend(train: bool, smooth: bool, val: bool) -> Iterator[str]:
    shown = [("raw" if smooth else "smooth", "training")] if train else []
    shown += [("smooth", "smoothed")] if smooth else []
    shown += [("val", "validation")] if val else []
    x = _WIDTH - _RIGHT - 112 * len(shown)
    for kind, name in shown:
        yield f'<line class="{kind}" x1="{x}" y1="52" x2="{x + 26}" y2="52"/>'
        if kind == "val":
            yield f'<circle class="dot" cx="{x + 13}" cy="52" r="4"/>'
        yield f'<text x="{x + 34}" y="56">{name}</text>'
        x += 112
