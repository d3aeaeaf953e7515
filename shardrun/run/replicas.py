"""Whether the replicas still are replicas: a digest of every parameter on every rank, compared over the ranks.

[Note: what a comparison finds] A bit that flips in the memory of one rank, a kernel that computes something else there,
a recipe that writes to a parameter of its own rank. Every step overwrites the trained parameters of a replica by those
of their owners, so that what happens between two comparisons may be made good, or reach all ranks alike: then no
comparison finds it any more. Hence it comes before an update, not after it, and before every save.

[Note: the digest] Each chunk of 1024 words of 64 bits is multiplied by odd random numbers and summed modulo 2**64; the
sums are hashed. The numbers are odd, so any change within one word changes its sum for certain; any other change does
but for an accident. Unlike a cryptographic hash this runs at the speed of memory, and on the device.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.comm.group import listed
from shardrun.errors import DivergenceError, by_all
from shardrun.run.model import distinct_parameters

Spread = tuple[Communicator, Collection[str]]
CHUNK = 1 << 10
"""Words; the numbers that they are multiplied by stay in a core's first cache."""
FORMER_CHUNK = 1 << 14
"""Of the parameter digests in checkpoints of format 1."""
_WORDS = 1 << 22  # at a time on a device, whose products are written out


def compare_replicas(
    comm: Communicator, model: nn.Module, spread: Sequence[Spread], prevented: str, *, in_parts: bool
) -> dict[str, str]:
    """Return if every parameter is the same on all ranks that have it, bit for bit; collective, nothing is changed.

    `spread` has the parameters that only some ranks train alike, by path, with the communicator of these; `in_parts`:
    a rank may be without what others have. Gives the digests that were compared, by path; none in a world of one.

    DivergenceError on all ranks otherwise, naming the first tensor and the ranks that differ; `prevented` is what does
    not happen then, as its first words. Tied parameters count once; buffers are each rank's own.
    """
    if comm.world_size == 1:
        return {}
    digests = parameter_digests(model)
    local = {path for _, paths in spread for path in paths}
    sets = [(comm, digests.keys() - local), *((group, digests.keys() & set(paths)) for group, paths in spread)]
    differs = False
    for group, paths in sets:
        held = sorted((path, digests[path]) for path in paths)
        differs |= bool(group.compare("replicas", "", {"digests": repr(held)}).differing)
    if in_parts:  # other ranks may be in groups of which this one knows nothing
        differs = comm.compare("replicas of all groups", "", sums=[int(differs)]).sums[0] > 0
    if not differs:
        return digests
    every: list[dict[str, str]] = comm.agree("replica digests", digests)
    shown = {path: _holders(path, every, some=in_parts) for path in sorted(set().union(*every))}
    differing = [path for path, held in shown.items() if len(set(held.values())) > 1]
    if not differing:  # of frozen parts the ranks hold different ones
        return digests
    first, more = differing[0], f" ({len(differing)} of {len(digests)} parameters in all)" if len(differing) > 1 else ""
    raise by_all(
        DivergenceError(
            f"{prevented}, because {first}{more} is not the same on all ranks: {_sides(shown[first])}. "
            "Nothing of it is saved; look for faulty memory, and for a recipe that writes to parameters on its own"
        )
    )


def _holders(path: str, every: Sequence[Mapping[str, str]], *, some: bool) -> dict[int, str]:
    """Rank -> its digest of `path`; `some`: a rank may be without it."""
    return {rank: held.get(path, "none") for rank, held in enumerate(every) if path in held or not some}


def parameter_digests(model: nn.Module) -> dict[str, str]:
    """The digest of every parameter by path, tied ones once; local."""
    return digests_of({path: parameter.data for path, parameter in distinct_parameters(model).items()})


def digests_of(tensors: Mapping[str, Tensor], chunk: int = CHUNK) -> dict[str, str]:
    """The digest of each tensor; local."""
    return {name: digest(tensor, chunk) for name, tensor in tensors.items()}


def joint_digest(digests: Mapping[str, str]) -> str:
    """sha256 (hex) over names and digests, in their order."""
    return hashlib.sha256("\n".join(f"{name} {one}" for name, one in digests.items()).encode()).hexdigest()


def digest(tensor: Tensor, chunk: int = CHUNK) -> str:
    """64 bits (hex) of shape, dtype and all bytes of `tensor`, see [Note: the digest]; on any device, local."""
    content = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # words have to begin where memory can be read as such
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    chunks = len(words) // chunk * chunk
    numbers = _numbers(tensor.device)[:chunk]
    rows = words[:chunks].view(-1, chunk)
    sums = [torch.mv(rows, numbers)] if rows.device.type == "cpu" else _sums(rows, numbers)
    rest = words[chunks:]
    sums.append((rest * numbers[: len(rest)]).sum().reshape(1))
    content.update(torch.cat(sums).cpu().numpy().tobytes())
    content.update(bytes(raw[whole:].tolist()))
    return content.hexdigest()


def _sums(rows: Tensor, numbers: Tensor) -> list[Tensor]:
    """As torch.mv, which CUDA has not for integers; sums overflow, which is meant."""
    some = _WORDS // len(numbers)
    return [(rows[at : at + some] * numbers).sum(1) for at in range(0, len(rows), some)]


@cache
def _numbers(device: torch.device) -> Tensor:
    """(FORMER_CHUNK,) int64, odd and random; the same in every process."""
    generator = torch.Generator().manual_seed(20261)
    return (torch.randint(-(2**63), 2**63 - 1, (FORMER_CHUNK,), generator=generator) | 1).to(device)


def _sides(held: Mapping[int, str]) -> str:
    """Which ranks hold the same, the most first; where there is no most, that nobody can say who is right."""
    ranks: dict[str, list[int]] = {}
    for rank, one in held.items():
        ranks.setdefault(one, []).append(rank)
    ordered = Counter({one: len(members) for one, members in ranks.items()}).most_common()
    (right, most), *others = ordered
    if most > others[0][1]:
        wrong = sorted(rank for one, _ in others for rank in ranks[one])
        return f"{_named(wrong)} differ{'s' if len(wrong) == 1 else ''} from {_named(ranks[right])}, who agree"
    return f"{' and '.join(_named(ranks[one]) for one, _ in ordered)} differ, and nobody can say who is right"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
