"""The tree that inspect-ckpt draws: its order, its totals, its width; and the bar of what is read."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardrun import report
from shardrun.cli import inspect_ckpt
from shardrun.cli.tensor_tree import Column, grown, totals, tree_table
from tests.golden.runs import put


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "bytes": 4, "alias_of": None, **more}


def drawn(rows: list[dict[str, Any]], *, width: int = 200, unicode: bool = True) -> list[str]:
    columns = [
        Column("bytes", lambda one: str(one["bytes"]), lambda total: f"{total['bytes']:,}", right=True),
        Column("sha256", lambda one: "0123456789ab", goes=1),
        Column("dtype", lambda one: "float32", goes=2),
    ]
    out = io.StringIO()
    tree = grown(rows, lambda name: name.split("."))
    Console(file=out, width=width).print(tree_table("all", tree, columns, width=width, unicode=unicode))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_blocks_come_in_the_order_of_their_numbers_under_their_totals() -> None:
    lines = drawn([row(f"blocks.{number}.w") for number in (10, 9)] + [row("head.bias"), row("head.weight")])
    assert lines[1:] == [
        "all              16",
        "├─ blocks         8",
        "│  ├─ 9.w         4  0123456789ab  float32",
        "│  └─ 10.w        4  0123456789ab  float32",
        "└─ head           8",
        "   ├─ bias        4  0123456789ab  float32",
        "   └─ weight      4  0123456789ab  float32",
    ]


@pytest.mark.parametrize(("width", "head"), [(40, "bytes  sha256        dtype"), (30, "bytes  dtype"), (20, "bytes")])
def test_where_it_is_narrow_the_least_needed_columns_go(width: int, head: str) -> None:
    lines = drawn([row("a.w"), row("b.w")], width=width)
    assert lines[0].split() == head.split()
    assert all(len(line) <= width for line in lines)


def test_a_terminal_without_unicode_gets_plain_lines() -> None:
    assert [line.split()[0] for line in drawn([row("a"), row("b")], unicode=False)[2:]] == ["|-", "`-"]


def test_ties_count_once_and_norms_add_up() -> None:
    def stats(norm: float, low: float | None) -> dict[str, Any]:
        return {"elements": 2, "norm": norm, "min": low, "max": low, "zeros": 1, "nonfinite": 0}

    found = totals([row("a", stats=stats(3.0, 1.0)), row("b", stats=stats(4.0, None)), row("c", alias_of="a")])
    assert (found["tensors"], found["bytes"]) == (2, 8)
    assert found["stats"] == {"elements": 4, "norm": 5.0, "min": 1.0, "max": 1.0, "zeros": 2, "nonfinite": 0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bytes_that_are_read_are_a_bar_on_a_terminal_and_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path, 3)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    assert inspect_ckpt.run(path, verify=True, stats=True, json=True) == 0
    assert "reading" in screen.getvalue()
    monkeypatch.setattr(sys, "stderr", silent := io.StringIO())
    assert inspect_ckpt.run(path, verify=True, stats=True) == 0
    assert silent.getvalue() == ""


def test_all_bytes_that_were_promised_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, read = [], []
    monkeypatch.setattr(report.Reading, "expect", lambda self, nbytes: expected.append(nbytes))
    monkeypatch.setattr(report.Reading, "read", lambda self, nbytes: read.append(nbytes))
    one, other = put(tmp_path, 2), put(tmp_path, 3)
    for options in ({"verify": True, "stats": True}, {"stats": True}, {"other": other}, {"verify": True, "other": one}):
        inspect_ckpt.run(one, json=True, **options)
        assert sum(expected) == sum(read) > 0
