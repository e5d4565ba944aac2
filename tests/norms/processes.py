"""Run a function in several processes connected by gloo, and return the results."""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def together(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank; return the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (world, _free_port(), folder, function, args), nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    leave(function(rank, *args), Path(folder), rank, world)


def leave(result: Any, folder: Path, rank: int, world: int) -> None:
    """Store a result as ``<rank>.pt``, wait up to a minute until all processes have, and exit.

    The group is not destroyed: with gloo this can hang, and its threads can abort the process during the teardown.
    """
    part = folder / f"{rank}.part"
    torch.save(result, part)
    part.rename(folder / f"{rank}.pt")
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.pt"))) < world and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
