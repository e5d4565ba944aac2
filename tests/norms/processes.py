"""Run a function in several processes connected by gloo, and return the results."""

import os
import socket
import tempfile
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
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()  # no process leaves the group while another still uses it
    finally:
        dist.destroy_process_group()
    os._exit(0)  # threads of torch can abort a process during its teardown, after everything is done


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
