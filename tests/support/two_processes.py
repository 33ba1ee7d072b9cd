"""What needs a group of processes: tensor parallelism of attention, and FSDP2 compiled.

    python tests/support/two_processes.py MEETING_FILE tensor
    python tests/support/two_processes.py MEETING_FILE sharded

Two processes meet over gloo at a file that does not exist yet; the first prints what it compared.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from headwise.model.transformer import Decoder
from headwise.shape import Shape

BASE = Shape(
    dim=12, depth=2, num_heads=4, head_dim=6, v_head_dim=10, num_kv_heads=2, ffn_dim=14,
    causal=True, windows=(3, 0), qk_rope_head_dim=4, vocab_size=17,
)  # fmt: skip
TENSOR = {
    "KV heads": BASE.replace(qkv_bias=True, out_bias=True),
    "gates, neighbours, two modules": BASE.replace(
        attn_gate="head", rope_interleaved=True, average=2, qk_norm="free"
    ),
}
SHARDED = {"KV heads": BASE, "latent": BASE.replace(num_kv_heads=4, kv_lora_rank=5)}


def filled(shape: Shape, separate: bool) -> nn.Module:
    """A model with drawn numbers, equal in all processes."""
    torch.manual_seed(0)
    model = Decoder(shape, separate=separate)
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.3)
    return model.double()


def near(name: str, found: torch.Tensor, wanted: torch.Tensor, rtol: float = 1e-9) -> None:
    error = (found - wanted).abs().max() / wanted.abs().max()
    if not error <= rtol:
        raise SystemExit(f"{name}: off by {error:.2g}")


def tensor(rank: int) -> None:
    """Separate projections cut by heads with torch's own styles; then one product cut by rows and
    put together again."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    by_heads = {f"{name}_proj": ColwiseParallel() for name in "qkv"}
    by_heads |= {"out": RowwiseParallel(), "gate": ColwiseParallel()}
    whole = {"qkv": ColwiseParallel(output_layouts=Replicate())}
    whole |= {"out": RowwiseParallel(input_layouts=Replicate())}
    torch.manual_seed(1)
    x = torch.randint(17, (3, 7))
    for name, shape in TENSOR.items():
        for separate, plan in ((True, by_heads), (False, whole)):
            alone, cut = (filled(shape, separate) for _ in range(2))
            for block in cut.blocks:
                there = {
                    at: s for at, s in plan.items() if at in dict(block.attention.named_children())
                }
                parallelize_module(block.attention, mesh, there)
                parallelize_module(
                    block.feed, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
            y, wanted = cut(x)[0], alone(x)[0]
            near(f"{name}: outputs", y, wanted)
            for out in (y, wanted):
                (out - out.mean()).square().sum().backward()
            for (at, p), q in zip(cut.named_parameters(), alone.parameters(), strict=True):
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                near(f"{name}: gradient of {at}", grad, q.grad)
            if rank == 0:
                print(f"{name}, separate={separate}: equal")


def sharded(rank: int) -> None:
    """FSDP2, compiled, two shapes in one process, from the meta device as torchtitan does it."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for name, shape in SHARDED.items():
        alone = filled(shape, False).float()
        with torch.device("meta"):
            cut = Decoder(shape)
        for block in cut.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(cut, mesh=mesh)
        cut.to_empty(device="cpu")
        cut.reset_parameters()
        if not all(p.to_local().isfinite().all() for p in cut.parameters()):
            raise SystemExit(f"{name}: reset left a parameter as it was")
        state = {at: p.detach() for at, p in alone.named_parameters()}
        set_model_state_dict(cut, state, options=StateDictOptions(full_state_dict=True))
        for block in cut.blocks:
            block.compile()
        other = copy.deepcopy(alone)
        for step in range(3):
            torch.manual_seed(10 + step)
            x = torch.randint(17, (4, 7))  # the same for both: gradients are means
            y, wanted = cut(x)[0], other(x)[0]
            near(f"{name}: outputs of step {step}", y, wanted, 1e-4)
            for model, out in ((cut, y), (other, wanted)):
                nn.functional.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.5 * p.grad
                        p.grad = None
        for (at, p), q in zip(cut.named_parameters(), other.named_parameters(), strict=True):
            assert isinstance(p, DTensor)
            near(f"{name}: {at}", p.full_tensor(), q[1], 1e-4)
        if rank == 0:
            print(f"{name}: equal")


def process(rank: int, meeting: str, what: str) -> None:
    """One of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    {"tensor": tensor, "sharded": sharded}[what](rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that torch is loaded once.
    torch.multiprocessing.start_processes(
        process, args=(sys.argv[1], sys.argv[2]), nprocs=2, start_method="fork"
    )
