"""What a communicator is made from, checked in full before any socket is opened."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardrun.comm.fingerprint import MAX_RANKS
from shardrun.errors import ConfigError

MAX_TIMEOUT_S = 7 * 24 * 3600.0
DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_INIT_TIMEOUT_S = 300.0


def is_loopback(address: str) -> bool:
    """Whether `address` names this machine only: localhost, 127.0.0.0/8 or ::1. Host names are not looked up."""
    if address.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_timeout(seconds: float) -> bool:
    """Whether a collective or a rendezvous can be given so many seconds."""
    return 0 < seconds <= MAX_TIMEOUT_S


@dataclass(frozen=True)
class CommunicatorConfig:
    """Where and as whom to join a world. Nothing is opened by making one; every problem is named at once.

    Trusted networks only: the rendezvous has neither authentication nor encryption. Another address than loopback
    needs `allow_non_loopback=True`. `run_id` guards against joining another run by mistake; it is not a secret.
    """

    rank: int
    world_size: int
    backend: str = "gloo"
    local_rank: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long a collective may take; `Communicator.timeout` gives a block of them another time."""
    init_timeout_s: float = DEFAULT_INIT_TIMEOUT_S
    """How long the ranks wait for each other at the rendezvous."""
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    store_fd: int | None = None
    """Rank 0 only: a socket that already listens on `master_addr:master_port`, used for the store."""
    init_file: Path | None = None
    """Rendezvous through this file instead of a port (one machine)."""
    agent_store: bool = False
    """torch's elastic agent holds the store (torchrun); where it listens is outside our control."""
    one_host: bool = True
    """All ranks are on this machine; only then may an agent's store have a name that is not loopback."""
    allow_non_loopback: bool = False
    shared_memory: bool = True
    """Let ranks of one host read each other's buckets in place (gloo); False: all of them travel over sockets."""
    run_id: str = ""

    def __post_init__(self) -> None:
        problems = [*self._range_problems(), *self._address_problems()]
        if problems:
            raise ConfigError(problems)

    def _range_problems(self) -> list[str]:
        problems = []
        if self.world_size < 1:
            problems.append(f"world_size is {self.world_size}; it must be at least 1")
        elif self.world_size > MAX_RANKS:
            problems.append(f"world_size is {self.world_size}; it must be at most {MAX_RANKS}")
        elif not 0 <= self.rank < self.world_size:
            problems.append(
                f"rank is {self.rank}; with world_size {self.world_size} it must be 0 to {self.world_size - 1}"
            )
        if self.local_rank < 0:
            problems.append(f"local_rank is {self.local_rank}; it must be at least 0")
        if self.backend not in ("gloo", "nccl"):
            problems.append(f"backend is {self.backend!r}; it must be 'gloo' or 'nccl'")
        for name, seconds in (("timeout_s", self.timeout_s), ("init_timeout_s", self.init_timeout_s)):
            if not is_timeout(seconds):
                problems.append(f"{name} is {seconds}; it must be above 0 and at most {MAX_TIMEOUT_S:.0f}")
        return problems

    def _address_problems(self) -> list[str]:
        problems = []
        if self.master_port is not None and not 0 < self.master_port < 65536:
            problems.append(f"master_port is {self.master_port}; it must be 1 to 65535")
        if self.world_size > 1 and self.init_file is None and self.master_port is None:
            problems.append("neither master_port nor init_file is given; a world of more than one needs a rendezvous")
        if not (is_loopback(self.master_addr) or self.allow_non_loopback or (self.agent_store and self.one_host)):
            problems.append(
                f"master_addr is {self.master_addr!r}, which is not loopback; the rendezvous has no authentication "
                "and no encryption: set allow_non_loopback only on a network that you trust"
            )
        return problems

    @property
    def loopback(self) -> bool:
        """Whether the data sockets are to be kept on loopback."""
        return not self.allow_non_loopback

    @staticmethod
    def from_env(
        environ: Mapping[str, str] | None = None,
        *,
        backend: str = "gloo",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        init_timeout_s: float = DEFAULT_INIT_TIMEOUT_S,
        allow_non_loopback: bool = False,
        shared_memory: bool = True,
    ) -> CommunicatorConfig:
        """The config that torchrun (or shardrun's launcher) put into the environment of this rank.

        SHARDRUN_INIT_FILE, a path that no file has yet, takes the place of MASTER_ADDR and MASTER_PORT on one machine.
        """
        env = os.environ if environ is None else environ
        missing = [key for key in ("RANK", "WORLD_SIZE") if key not in env]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} not in the environment; start by torchrun or `shardrun train`")
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        one_host = env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]) == env["WORLD_SIZE"]
        store_fd, init_file = env.get("SHARDRUN_STORE_FD"), env.get("SHARDRUN_INIT_FILE")
        return CommunicatorConfig(
            rank=_integer(env, "RANK", 0),
            world_size=_integer(env, "WORLD_SIZE", 1),
            backend=backend,
            local_rank=_integer(env, "LOCAL_RANK", 0),
            timeout_s=timeout_s,
            init_timeout_s=init_timeout_s,
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_integer(env, "MASTER_PORT", 0) or None,
            store_fd=None if store_fd is None else int(store_fd),
            init_file=None if init_file is None else Path(init_file),
            agent_store=agent,
            one_host=one_host,
            allow_non_loopback=allow_non_loopback,
            shared_memory=shared_memory,
            run_id=env.get("SHARDRUN_RUN_ID", ""),
        )


def _integer(env: Mapping[str, str], key: str, default: int) -> int:
    text = env.get(key, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{key} in the environment is {text!r}; it must be an integer") from None
