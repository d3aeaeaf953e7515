"""Text for recipes: bytes from files or from the Python installation itself, cut into windows for two splits."""

from __future__ import annotations

import glob
import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import Dataset

from shardrun.errors import UsageError

Split = Literal["train", "val"]

IGNORE = -100  # torch's own ignore_index: a label that counts neither in the loss nor in the weight
BLOCK_BYTES = 8192
VAL_EVERY = 10


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and where they came from. `sha256` covers the bytes alone."""

    content: bytes
    files: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def read_text(source: str | Sequence[str]) -> Text:
    """The text that a recipe's argument names: `"builtin"`, or one or several globs (`**` goes into folders).

    Files are taken in sorted order of their paths, each once, and joined by one newline. Relative globs start at
    the current folder. Raises `UsageError` when a glob matches no file or the text is empty.
    """
    if source == "builtin":
        return builtin_text()
    patterns = [source] if isinstance(source, str) else list(source)
    paths: set[Path] = set()
    for pattern in patterns:
        found = {Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()}
        if not found:
            raise UsageError(
                f"text: {pattern!r} matches no file (looked in {Path.cwd()}); "
                'give a glob such as "corpus/**/*.txt", or "builtin" for the text that ships with Python'
            )
        paths |= found
    ordered = sorted(paths, key=lambda path: path.as_posix())
    content = b"\n".join(path.read_bytes() for path in ordered)
    if not content.strip():
        raise UsageError(f"text: the {len(ordered)} file(s) matched by {patterns} hold no text; name other files")
    return Text(content, tuple(path.as_posix() for path in ordered))


def builtin_text() -> Text:
    """English text that every CPython carries: the language reference of `pydoc_data.topics`, about 370 kB.

    Topics come in sorted order. The topics quote each other at length, so a paragraph is kept only where it stands
    first: what validation measures has then not been trained on. The text differs a little between Python versions,
    which the data identity in a checkpoint makes visible.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    seen: set[str] = set()
    kept: list[str] = []
    for name in sorted(topics):
        for paragraph in topics[name].replace("\r\n", "\n").split("\n\n"):
            key = paragraph.strip()
            if key and key not in seen:
                seen.add(key)
                kept.append(paragraph.strip("\n").rstrip())
    return Text("\n\n".join(kept).encode("utf-8") + b"\n", ("pydoc_data.topics",))


def split_ranges(length: int, split: Split) -> list[tuple[int, int]]:
    """Byte ranges (start, stop) of a split. Neither split sees a byte of the other.

    The text is cut into blocks of 8 KiB (less when it is short) and every tenth block is for validation, so both
    splits sample the whole text. Neighbouring training blocks form one range.
    """
    if split not in ("train", "val"):
        raise UsageError(f'split {split!r} is unknown; it is "train" or "val"')
    block = max(1, min(BLOCK_BYTES, length // VAL_EVERY))
    ranges: list[tuple[int, int]] = []
    for number, start in enumerate(range(0, length, block)):
        stop = min(start + block, length)
        if ((number % VAL_EVERY) == VAL_EVERY - 1) != (split == "val"):
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


class ByteTextDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows over the bytes of a text: item -> (inputs, labels), both int64 of shape (context,).

    A byte is a token (256 of them) and `labels[i]` is the byte after `inputs[i]`. Windows start every `stride` bytes
    of a range of `split_ranges`. With `stride == context`, the default, every byte of the split but the first of each
    range is a label exactly once; a smaller stride gives overlapping windows on purpose. The last window of a range
    is filled up with zeros, labelled `IGNORE`. `identity` is a hash of everything that decides what the items are.
    """

    def __init__(self, text: Text, split: Split, *, context: int, stride: int | None = None) -> None:
        stride = context if stride is None else stride
        if context < 1 or not 1 <= stride <= context:
            raise UsageError(f"stride {stride} with context {context}: both are at least 1, and stride at most context")
        self.context = context
        self._bytes = torch.frombuffer(bytearray(text.content), dtype=torch.uint8)
        ranges = split_ranges(len(text.content), split)
        self._windows = [(at, stop) for start, stop in ranges for at in range(start, stop - 1, stride)]
        if not self._windows:
            raise UsageError(f"the {split} split of a text of {len(text.content)} bytes has no window; give more text")
        described = f"bytes/1 {text.sha256} {split} {ranges} context={context} stride={stride}"
        self.identity = hashlib.sha256(described.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, range_stop = self._windows[index]
        piece = self._bytes[start : min(start + self.context + 1, range_stop)].to(torch.int64)
        filled = piece.numel() - 1
        inputs = torch.zeros(self.context, dtype=torch.int64)
        labels = torch.full((self.context,), IGNORE, dtype=torch.int64)
        inputs[:filled] = piece[:-1]
        labels[:filled] = piece[1:]
        return inputs, labels
