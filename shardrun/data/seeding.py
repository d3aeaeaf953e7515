"""Where every random number comes from: seeds derived from integers; the streams of this process, saved and put back.

Seeds are derived by hashing, so they are the same on every machine, for ever, and neighbouring numbers give unrelated
streams. Saved streams are plain bytes (JSON and integers), never pickle.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from shardrun.errors import CheckpointError, UsageError

PREFIX = "rng/"
PYTHON, NUMPY, TORCH, CUDA = "rng/python", "rng/numpy", "rng/torch", "rng/cuda"


class Purpose(IntEnum):
    """First part of a derived seed, so that two uses never share a stream. Numbers are for ever."""

    MODEL = 1  # building the model
    ORDER = 2  # the order of samples in an epoch
    ITEM = 3  # dataset[i]
    COLLATE = 4  # putting a micro-batch together
    MICRO_BATCH = 5  # forward and backward of a micro-batch
    EVALUATION = 6
    RESHARD = 7  # the streams of a rank that goes on from a checkpoint of another world size


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2**63) from integers of up to 127 bits: BLAKE2b over the parts in order, stable for ever."""
    try:
        encoded = b"".join(int(part).to_bytes(16, "little", signed=True) for part in parts)
    except OverflowError:
        raise UsageError(f"seed parts {parts}: one is beyond 127 bits; use a smaller seed") from None
    digest = hashlib.blake2b(encoded, digest_size=8, person=b"shardrun seed").digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the streams of this process: python, numpy's global one, torch on CPU and on every CUDA device."""
    seed_host(seed)
    if torch.cuda.is_available():  # torch.manual_seed looks after all devices that there might be, and takes its time
        torch.cuda.manual_seed_all(seed)


def seed_host(seed: int) -> None:
    """As `seed_all`, without the devices' streams: for code that runs on the host alone, such as `dataset[i]`.

    torch's CPU generator takes the low 32 bits of a seed, which is why seeds are hashed rather than counted.
    """
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed {seed} is outside 0 .. 2**63 - 1; make one with derive_seed")
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)


def rng_states() -> dict[str, torch.Tensor]:
    """The streams of this process as uint8 tensors (bytes,), by name.

    `rng/python`, `rng/numpy` (its global stream), `rng/torch` (CPU) and, once this process uses CUDA, `rng/cuda` of
    the current device. Raises `UsageError` when numpy's global stream was exchanged for another kind.
    """
    states = {PYTHON: _python_state(), NUMPY: _numpy_state(), TORCH: torch.get_rng_state().clone()}
    if _uses_cuda():
        states[CUDA] = torch.cuda.get_rng_state().clone()
    return states


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """Put back what `rng_states` returned, to the bit. Names that do not start with `rng/` are left alone.

    All streams are checked before the first one is replaced. Raises `CheckpointError` naming each that is missing,
    unknown or malformed; nothing has changed then.
    """
    setters, problems = _setters(states)
    if problems:
        raise CheckpointError("random streams do not fit; no stream was replaced: " + "; ".join(problems))
    for setter in setters:
        setter()


def rng_misfits(states: Mapping[str, torch.Tensor]) -> list[str]:
    """What `restore_rng` would refuse, a line for each stream; nothing is replaced."""
    return _setters(states)[1]


def rng_for_device(states: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """`states` for a process on another kind of device than the one that saved them, and a note on what differs.

    A CUDA stream that is missing is this process's own; one for which there is no device is left out.
    """
    fitted, notes = dict(states), []
    if CUDA not in fitted and _uses_cuda():
        fitted[CUDA] = torch.cuda.get_rng_state().clone()
        notes.append(f"{CUDA} is not in the checkpoint: the random stream of the CUDA device starts anew")
    elif CUDA in fitted and not torch.cuda.is_available():
        del fitted[CUDA]
        notes.append(f"{CUDA} of the checkpoint is left out: there is no CUDA device here")
    return fitted, notes


def _setters(states: Mapping[str, torch.Tensor]) -> tuple[list[Callable[[], object]], list[str]]:
    """A call for each stream that replaces it, all tried beforehand; and what is wrong, a line each."""
    saved = {name: state for name, state in states.items() if name.startswith(PREFIX)}
    needed = {PYTHON, NUMPY, TORCH} | ({CUDA} if _uses_cuda() else set())
    problems = [f"{name}: missing" for name in sorted(needed - saved.keys())]
    setters: list[Callable[[], object]] = []
    for name in sorted(saved):
        try:
            setters.append(_setter(name, saved[name]))
        except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            problems.append(f"{name}: {str(error).partition(chr(10))[0]}")
    return setters, problems


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _as_bytes(document: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document, separators=(",", ":")).encode()), dtype=torch.uint8)


def _python_state() -> torch.Tensor:
    version, words, gauss = random.getstate()
    return _as_bytes([version, list(words), None if gauss is None else float(gauss).hex()])


def _numpy_state() -> torch.Tensor:
    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != "MT19937":
        kind = state["bit_generator"] if isinstance(state, dict) else type(state).__name__
        raise UsageError(f"numpy's global stream is {kind}, expected MT19937; use a Generator of your own instead")
    words, position = state["state"]["key"], state["state"]["pos"]
    return _as_bytes([words.tolist(), int(position), int(state["has_gauss"]), float(state["gauss"]).hex()])


def _setter(name: str, state: torch.Tensor) -> Callable[[], object]:
    """A call without arguments that replaces one stream, after the state was tried on a scratch stream."""
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise ValueError(f"expected uint8 of one dimension, found {state.dtype} of shape {tuple(state.shape)}")
    state = state.cpu()
    if name == PYTHON:
        return _python_setter(json.loads(bytes(state.numpy())))
    if name == NUMPY:
        return _numpy_setter(json.loads(bytes(state.numpy())))
    if name == TORCH:
        torch.Generator().set_state(state)
        return lambda: torch.set_rng_state(state)
    if name == CUDA:
        if not torch.cuda.is_available():
            raise ValueError("saved from a CUDA device, and there is none here")
        torch.Generator(device="cuda").set_state(state)
        return lambda: torch.cuda.set_rng_state(state)
    raise ValueError(f"unknown; this version knows {PYTHON}, {NUMPY}, {TORCH}, {CUDA}")


def _python_setter(document: Any) -> Callable[[], object]:
    version, words, gauss = document
    state = (version, tuple(words), None if gauss is None else float.fromhex(gauss))
    random.Random().setstate(state)
    return lambda: random.setstate(state)


def _numpy_setter(document: Any) -> Callable[[], object]:
    words, position, has_gauss, gauss = document
    if len(words) != 624 or not 0 <= position <= 624 or has_gauss not in (0, 1):
        found = f"{len(words)}, {position} and {has_gauss}"
        raise ValueError(f"expected 624 words, a position of at most 624 and a flag of 0 or 1; found {found}")
    state = {
        "bit_generator": "MT19937",
        "state": {"key": np.array(words, dtype=np.uint32), "pos": int(position)},
        "has_gauss": int(has_gauss),
        "gauss": float.fromhex(gauss),
    }
    np.random.RandomState().set_state(state)
    return lambda: np.random.set_state(state)
