"""Micro-batches of one rank, window by window, fetched ahead by worker processes if asked for.

What comes out depends on the seed, the position and the micro-batch's number alone: neither on the rank, the world
size, the number of workers nor on how far they ran ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sized
from functools import cached_property
from typing import Any, Protocol, cast

from torch.utils.data import IterableDataset, default_collate

from shardrun.data.fetch import Fetcher, Task
from shardrun.data.order import Window, micro_batches, next_window, rank_share, sample_indices
from shardrun.data.stream import Stream
from shardrun.errors import UsageError

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """What shardrun needs of a data set: a length, and an item by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MicroBatchLoader:
    """Feeds the trainer of one rank from a map-style data set.

    Items are fetched while python's, numpy's and torch's CPU streams are seeded from (seed, epoch, index), and put
    together by `collate` (torch's `default_collate` if None) under a seed from (seed, epoch, first place); the
    streams of the calling process are left as they were. `workers` processes fetch `prefetch` micro-batches each
    ahead, over the ends of windows and epochs. With `pin` tensors come in page-locked memory, from which a GPU copies
    them while the host goes on. Raises `UsageError` when the data set has no length or no items by index, or is empty.
    The workers end with the thread that took the first micro-batch, with `close`, or with the iterator.
    """

    def __init__(
        self,
        dataset: object,
        collate: Collate | None = None,
        *,
        seed: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        global_batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        if workers < 0 or prefetch < 1:
            raise UsageError(f"data.workers {workers} must be at least 0 and data.prefetch {prefetch} at least 1")
        self.samples = sized(dataset)
        self.identity = cast("str | None", getattr(dataset, "identity", None))
        self._fetcher = Fetcher(cast(MapDataset, dataset), collate or default_collate, seed)
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._rank, self._world_size = rank, world_size
        self._micro_batch_size, self._global_batch_size = micro_batch_size, global_batch_size
        self._workers, self._prefetch, self._pin = workers, prefetch, pin
        # What could never work is refused here and not in the middle of a run.
        micro_batches(next_window(0, self.samples, global_batch_size, drop_last), micro_batch_size)
        rank_share(0, rank, world_size)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def window(self, position: int, stop: int | None = None) -> Window:
        """The window at `position`, cut at `stop` (both in samples consumed)."""
        window = next_window(position, self.samples, self._global_batch_size, self._drop_last)
        if stop is None or window.next_position <= stop:
            return window
        kept = max(0, min(window.samples, stop - window.epoch * self.samples - window.start))
        return Window(window.epoch, window.start, window.start + kept, stop)

    def windows(
        self, position: int = 0, stop: int | None = None
    ) -> Generator[tuple[Window, Iterator[tuple[int, Any]]], None, None]:
        """Windows from `position` on, over all epochs without end, or up to the position `stop`.

        Each comes with this rank's micro-batches as (number, batch), fetched when asked for; those not taken before
        the next window are passed over. A rank without a share gets none. What was prefetched leaves no trace: the
        position to save is the `next_position` of the last window that was consumed.
        """
        if position < 0:
            raise UsageError(f"position {position} must not be negative")
        stream = Stream(self._fetcher, self._tasks(position, stop), self._workers, self._prefetch, pin=self._pin)
        self._streams.add(stream)
        try:
            while not stream.closed and (stop is None or position < stop):
                window = self.window(position, stop)
                share = stream.take(len(self._share(window)))
                yield window, share
                for _ in share:
                    pass
                position = window.next_position
        finally:
            stream.close()

    def fetch(self, window: Window, number: int) -> Any:
        """Micro-batch `number` of a window once more, in this process: the same content if the items are a function of
        index and seed alone."""
        places = micro_batches(window, self._micro_batch_size)[number]
        indices = sample_indices(self._seed, window.epoch, self.samples, places.start, places.stop, self._shuffle)
        return self._fetcher[Task(window.epoch, number, places.start, tuple(indices.tolist()))][1]

    def most_micro_batches(self, window: Window) -> int:
        """How many micro-batches of `window` the rank has that has most of them."""
        total = -(-window.samples // self._micro_batch_size)
        return -(-total // self._world_size)

    def own_micro_batches(self, window: Window) -> int:
        """How many micro-batches of `window` this rank has."""
        return len(self._share(window))

    @cached_property
    def first_batch(self) -> Any:
        """The first sample as a micro-batch of its own: what a batch looks like."""
        return self._fetcher[Task(0, 0, 0, (0,))][1]

    def close(self) -> None:
        """End the worker processes. Iterators made before end at the next window."""
        for stream in list(self._streams):
            stream.close()

    def _share(self, window: Window) -> range:
        total = -(-window.samples // self._micro_batch_size)
        return rank_share(total, self._rank, self._world_size)

    def _tasks(self, position: int, stop: int | None) -> Iterator[Task]:
        """This rank's micro-batches from `position` on: what the workers are sent, in order."""
        while stop is None or position < stop:
            window = self.window(position, stop)
            batches = micro_batches(window, self._micro_batch_size)
            share = self._share(window)
            if share:
                first, last = batches[share.start].start, batches[share.stop - 1].stop
                indices = sample_indices(self._seed, window.epoch, self.samples, first, last, self._shuffle).tolist()
                for number in share:
                    places = batches[number]
                    yield Task(
                        window.epoch, number, places.start, tuple(indices[places.start - first : places.stop - first])
                    )
            position = window.next_position


def sized(dataset: object) -> int:
    """The number of samples of a map-style data set; raises `UsageError` for anything else or an empty one."""
    name = type(dataset).__name__
    way_out = "give a data set with __len__ and __getitem__(index), for example a list"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(f"data set {name} has no item by index, so it can be neither shuffled nor resumed; {way_out}")
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"data set {name} has no length, so its epochs have no end; {way_out}")
    samples = len(cast(Sized, dataset))
    if samples < 1:
        raise UsageError(f"data set {name} is empty: 0 samples; check the recipe's arguments")
    return samples
