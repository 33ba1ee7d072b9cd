"""The processes that share one training: who we are among them, and what goes between them.

torchrun says it in the environment (RANK, WORLD_SIZE, LOCAL_RANK); without it there is one process
and nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.model.transformer import Decoder

SHARDS = ("ddp", "fsdp")
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int = 0
    world: int = 1
    local: int = 0  # on this machine

    @property
    def first(self) -> bool:
        return self.rank == 0


def told() -> Ranks:
    """What the environment says."""
    return Ranks(
        *(
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
        )
    )


@contextlib.contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Meet the other processes, and leave them at the end."""
    if ranks.world == 1:
        yield
        return
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo", timeout=timedelta(hours=1), device_id=device if gpu else None
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def place(ranks: Ranks, device: torch.device) -> torch.device:
    """Each process of a machine has a GPU of its own."""
    if device.type != "cuda" or ranks.world == 1:
        return device
    if ranks.local >= torch.cuda.device_count():
        raise UsageError(
            f"every process needs a GPU of its own, got {torch.cuda.device_count()} for process "
            f"{ranks.local + 1} of a machine"
        )
    return torch.device("cuda", ranks.local)


def add_up(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The sum over the processes, in place."""
    if ranks.world > 1:
        dist.all_reduce(tensor)
    return tensor


def from_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """What the first process gets from `work`, told to all; its UsageError is everybody's."""
    if ranks.world == 1:
        return work()
    box: list[Any] = [None, None]
    if ranks.first:
        try:
            box[0] = work()
        except UsageError as e:
            box[1] = str(e)
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise UsageError(box[1])
    return box[0]


def sent(ranks: Ranks, tensor: Tensor | None, like: Tensor) -> Tensor:
    """A whole tensor that the first process has, sized and placed as `like`, for all."""
    full = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if tensor is None
        else tensor.to(like.device)
    )
    if ranks.world > 1:
        dist.broadcast(full, 0)
    return full


# ---- parameters, whole or in shards


def shared(model: Decoder, shard: str, ranks: Ranks, device: torch.device) -> Any:
    """The module to call: the model itself, in DDP, or with every block's parameters cut into
    shards (FSDP2)."""
    if ranks.world == 1:
        return model
    if shard == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def sending(module: Any, last: bool) -> Iterator[None]:
    """Gradients go between the processes only with the last part of a step."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if last else module.no_sync():
            yield
        return
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)
    yield


def mine(tensor: Any) -> Tensor:
    """The part of a tensor that lies here: all of it, or a shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def all_of(part: Tensor, like: Any) -> Tensor:
    """The whole of what lies in parts as `like` does."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()


def part_of(full: Tensor, like: Any) -> Tensor:
    """The rows of a whole tensor that lie here in `like`."""
    if not hasattr(like, "to_local"):
        return full
    rows = -(-full.shape[0] // like.device_mesh.size())
    at = like.device_mesh.get_local_rank() * rows
    return full[at : at + rows]


def dealt(ranks: Ranks, stack: Tensor, work: Any) -> Tensor:
    """work(stack), the matrices of a stack dealt out over the processes and collected again."""
    if ranks.world == 1:
        return work(stack)
    each = -(-stack.shape[0] // ranks.world)
    some = stack[ranks.rank * each : (ranks.rank + 1) * each]
    some = torch.cat((some, some.new_zeros(each - len(some), *some.shape[1:])))
    done = work(some).contiguous()
    out = done.new_empty(each * ranks.world, *done.shape[1:])
    dist.all_gather_into_tensor(out, done)
    return out[: stack.shape[0]]
