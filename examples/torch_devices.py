"""Norms over several GPUs by torch: a DTensor of rows, and a model that FSDP2 splits.

    python examples/torch_devices.py

takes all GPUs there are, a process each, over NCCL; without one, two processes on the CPU over
gloo. ``--devices 4`` says how many.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import cupynorm.torch


def show(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def split_rows(mesh: DeviceMesh) -> None:
    """Normalize x, split over its rows: what do the devices say to each other?"""
    world, device = mesh.size(), mesh.device_type
    rows = torch.randn(8 * world, 64, 512).to(device)  # on the CPU, so that all draw the same
    x = distribute_tensor(rows, mesh, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(torch.ones(512, device=device), mesh, [Replicate()])
    weight.requires_grad_()

    with CommDebugMode() as exchanged:
        y = cupynorm.torch.rms_norm(x, weight)
        dx, dweight = torch.autograd.grad(y.square().sum(), (x, weight))
    assert exchanged.get_total_counts() == 0
    assert y.placements == dx.placements == x.placements
    show(f"forward and backward of {world} x {tuple(x.to_local().shape)}: nothing is exchanged")
    show(f"the weight's gradient is a sum over devices, still to be made: {dweight.placements}")

    with CommDebugMode() as exchanged:
        total = dweight.redistribute(placements=[Replicate()]).to_local()
    show(f"made, it took {exchanged.get_total_counts()} all-reduce of {total.numel()} values")

    alone = rows.requires_grad_(), torch.ones(512, device=device, requires_grad=True)
    expected = torch.autograd.grad(cupynorm.torch.rms_norm(*alone).square().sum(), alone)
    torch.testing.assert_close(total, expected[1], rtol=1e-5, atol=1e-5)  # in another order
    torch.testing.assert_close(dx.full_tensor(), expected[0])


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def train(mesh: DeviceMesh, norm: type[nn.Module], width: int = 64, steps: int = 10) -> list[float]:
    """Return the losses of a model whose parameters each device has a share of."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, norm) for _ in range(3))).to(mesh.device_type)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        rows = torch.randn(16 * mesh.size(), width, generator=generator)
        mine = rows[mesh.get_local_rank() :: mesh.size()].to(mesh.device_type)
        loss = (model(mine) - mine.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / mesh.size())
    return losses


def work(rank: int, world: int, directory: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    meeting = {"init_method": f"file://{directory}/rendezvous", "rank": rank, "world_size": world}
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **meeting)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **meeting)
    try:
        mesh = init_device_mesh(device, (world,))
        torch.manual_seed(0)
        split_rows(mesh)
        losses = {
            name: train(mesh, norm)
            for name, norm in (
                ("torch.nn.RMSNorm", nn.RMSNorm),
                ("cupynorm.torch.RMSNorm", cupynorm.torch.RMSNorm),
            )
        }
        for name, (first, *_, last) in losses.items():
            show(f"FSDP2, {name:<24} first loss {first:.4f}, last {last:.4f}")
        theirs, mine = (torch.tensor(values) for values in losses.values())
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        dist.barrier()  # gloo aborts a process whose peer left in the middle of a collective
    finally:
        dist.destroy_process_group()
    # DTensor's caches keep the mesh, and with it gloo's threads (torch 2.13). Where one has yet to
    # release a tensor as the interpreter ends, the process aborts: leave without ending it.
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    world = parser.parse_args().devices
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(work, (world, directory), nprocs=world)


if __name__ == "__main__":
    main()
