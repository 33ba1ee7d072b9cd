"""The processes that share one training, in torch.distributed's words.

torchrun describes them in the environment (`launch.from_env`). Without it there is one process and
nothing is communicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.lm.launch import World
from headwise.model.transformer import Decoder

T = TypeVar("T")


@contextlib.contextmanager
def process_group(world: World, device: torch.device) -> Iterator[None]:
    """Meet the other processes, and leave them at the end."""
    if world.size == 1:
        yield
        return
    backend, bound = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, bound = "nccl", device
    dist.init_process_group(backend, timeout=timedelta(hours=1), device_id=bound)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device(world: World, device: torch.device) -> torch.device:
    """The device of this process: each process of a machine has a GPU of its own."""
    if device.type != "cuda" or world.size == 1:
        return device
    if world.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"every process needs a GPU of its own, got {torch.cuda.device_count()} for process "
            f"{world.local_rank + 1} of a machine"
        )
    return torch.device("cuda", world.local_rank)


# ---- communication


def all_reduce(world: World, tensor: Tensor) -> Tensor:
    """The sum over the processes, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast(world: World, tensor: Tensor | None, like: Tensor) -> Tensor:
    """The main process's tensor, for all; its size, dtype and device are those of `like`."""
    if tensor is None:
        full = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        full = tensor.to(like.device)
    if world.size > 1:
        dist.broadcast(full, 0)
    return full


def wait_for_all(world: World) -> None:
    """Return when every process is here."""
    if world.size > 1:
        dist.barrier()


def broadcast_result(world: World, work: Callable[[], T]) -> T:
    """What `work` returns in the main process, for all; a UsageError is raised in all."""
    if world.size == 1:
        return work()
    # Both travel together: if the others waited for a result that never comes, an error in the main
    # process would look like a hang.
    result_and_error: list[Any] = [None, None]
    if world.is_main:
        try:
            result_and_error[0] = work()
        except UsageError as e:
            result_and_error[1] = str(e)
    dist.broadcast_object_list(result_and_error)
    result, error = result_and_error
    if error is not None:
        raise UsageError(error)
    return result


def map_sharded(world: World, stack: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """work(stack): each process works on an equal share of the matrices, padded with zeros, and
    all gather the results."""
    if world.size == 1:
        return work(stack)
    # Every process works on the same number of matrices, because all_gather takes equal shares. The
    # padding is dropped at the end.
    each = -(-stack.shape[0] // world.size)
    share = stack[world.rank * each : (world.rank + 1) * each]
    padding = share.new_zeros(each - len(share), *share.shape[1:])
    done = work(torch.cat((share, padding))).contiguous()
    gathered = done.new_empty(each * world.size, *done.shape[1:])
    dist.all_gather_into_tensor(gathered, done)
    return gathered[: stack.shape[0]]


# ---- models and tensors, replicated (DDP) or in shards (FSDP2)


def parallelise(model: Decoder, shard: str, world: World, device: torch.device) -> Any:
    """The module to call: the model itself, in DDP, or with every block's parameters in shards
    (FSDP2)."""
    if world.size == 1:
        return model
    if shard == "ddp":
        device_ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A block is one unit of FSDP: its parameters are gathered just before it runs.
    mesh = init_device_mesh(device.type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def gradient_sync(module: Any, world: World, enabled: bool) -> Iterator[None]:
    """Whether backward passes inside exchange gradients: only the last micro-batch of a step
    does."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if enabled else module.no_sync():
            yield
        return
    if world.size > 1:
        module.set_requires_gradient_sync(enabled)
    yield


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor lies in shards over the processes."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False  # the common case; importing DTensor takes a second
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_shard(tensor: Any) -> Tensor:
    """The rows of a tensor that lie in this process: all of them, unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full_tensor(shard: Tensor, like: Any) -> Tensor:
    """The complete tensor, gathered from shards that are cut as `like` is."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()


def shard_of(full: Tensor, like: Any) -> Tensor:
    """The rows of a complete tensor that lie in this process in `like`."""
    if not is_sharded(like):
        return full
    # FSDP cuts the first axis into equal runs of rows, rounded up; the last ones may be shorter or
    # empty.
    rows = -(-full.shape[0] // like.device_mesh.size())
    first = like.device_mesh.get_local_rank() * rows
    return full[first : first + rows]
