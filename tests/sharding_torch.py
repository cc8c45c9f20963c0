"""DTensor, FSDP2 and DDP: tests/test_torch_sharding.py starts this in each of several processes.

python tests/sharding_torch.py gloo 2
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import cupynorm.torch
from cupynorm.torch import LayerNorm, RMSNorm

SHAPE = (8, 12, 64)


def drawn(*shape: int, device: str) -> Any:
    return torch.randn(shape).to(device)  # on the CPU, so that all processes draw the same values


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(norm: str, arrays: Any, relu: Any, dy: Any) -> Any:
    leaves = [array.detach().requires_grad_() for array in arrays]
    y = getattr(cupynorm.torch, norm)(*leaves, relu=relu)
    return y, torch.autograd.grad(y, leaves, dy)


def check_rows_stay_where_they_are(mesh: DeviceMesh) -> None:
    device = mesh.device_type
    x, dy = drawn(*SHAPE, device=device), drawn(*SHAPE, device=device)
    weight, bias = drawn(64, device=device), drawn(64, device=device)
    for norm in ("rms_norm", "layer_norm"):
        for relu in (None, (0.0, 1.0)):
            expected = gradients(norm, (x, weight, bias), relu, dy)
            for axis in (0, 1):
                rows = [Shard(axis)]
                arrays = [
                    distribute_tensor(x, mesh, rows),
                    *(distribute_tensor(a, mesh, [Replicate()]) for a in (weight, bias)),
                ]
                split = distribute_tensor(dy, mesh, rows)
                with CommDebugMode() as communicated:
                    y, (dx, *sums) = gradients(norm, arrays, relu, split)
                assert communicated.get_total_counts() == 0
                assert y.placements == dx.placements == tuple(rows)
                assert all(total.placements == (Partial("sum"),) for total in sums)
                torch.testing.assert_close(y.full_tensor(), expected[0], rtol=0, atol=0)
                torch.testing.assert_close(dx.full_tensor(), expected[1][0], rtol=0, atol=0)
                for total, whole in zip(sums, expected[1][1:], strict=True):
                    torch.testing.assert_close(total.full_tensor(), whole)


def check_eager_calls_go_straight_to_dtensor(mesh: DeviceMesh) -> None:
    """No mode looks on here. torch's way by autograd in Python would double the host's time."""
    device, kinds = mesh.device_type, ([Shard(0)], [Replicate()], [Shard(0)])
    plain = [drawn(*shape, device=device) for shape in (SHAPE, SHAPE[-1:], SHAPE)]
    split = [distribute_tensor(a, mesh, kind) for a, kind in zip(plain, kinds, strict=True)]
    found = []
    for x, weight, dy in (plain, split):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        with torch.no_grad():
            inferred = cupynorm.torch.rms_norm(*leaves)
        y = cupynorm.torch.rms_norm(*leaves)
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        assert not inferred.requires_grad
        for function in (y.grad_fn, first[0].grad_fn):
            assert not function.name().startswith("GeneratedBackwardFor"), function
        second = torch.autograd.grad(first[0].pow(2).sum(), leaves)
        found.append((inferred, y, *first, *second))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected)


def check_second_derivatives(mesh: DeviceMesh) -> None:
    """Those of a sum over all gradients. torch's own operations compute them."""
    device = mesh.device_type
    arrays = [drawn(*shape, device=device) for shape in (SHAPE, (64,), (64,), SHAPE, SHAPE)]

    def second(norm: str, arrays: Any, relu: Any, has_residual: bool) -> Any:
        x, weight, bias, residual, dy = leaves = [a.detach().requires_grad_() for a in arrays]
        y = getattr(cupynorm.torch, norm)(
            x, weight, bias, relu=relu, residual=residual if has_residual else None
        )
        read = leaves[: 3 + has_residual]
        of = torch.autograd.grad(y[0] if has_residual else y, read, dy, create_graph=True)
        total = sum(whole(g).pow(2).sum() for g in of)
        return torch.autograd.grad(total, [*read[:2], *read[3:], dy])

    for norm in ("rms_norm", "layer_norm"):
        for relu, has_residual in ((None, False), ((-0.5, 1.0), False), ((-0.5, 1.0), True)):
            expected = second(norm, arrays, relu, has_residual)
            for rows in (Shard(0), Shard(1), Shard(2), Replicate()):
                kinds = (rows, Replicate(), Replicate(), rows, rows)
                split = [
                    distribute_tensor(a, mesh, [k]) for a, k in zip(arrays, kinds, strict=True)
                ]
                found = second(norm, split, relu, has_residual)
                for actual, one in zip(found, expected, strict=True):
                    torch.testing.assert_close(whole(actual), one, rtol=1e-4, atol=1e-4)


def check_a_weight_that_varies_is_split_with_the_rows(mesh: DeviceMesh) -> None:
    device = mesh.device_type
    x, dy = drawn(*SHAPE, device=device), drawn(*SHAPE, device=device)
    # How x is split, weight's shape, and how that and its gradient are split.
    cases: list[tuple[Any, tuple[int, ...], Any, Any]] = [
        (Shard(0), (8, 1, 64), Shard(0), Shard(0)),
        (Shard(1), (8, 1, 64), Replicate(), Partial("sum")),
        (Shard(0), (12, 64), Replicate(), Partial("sum")),
        (Shard(1), (12, 64), Shard(0), Shard(0)),
        (Shard(1), (1, 12, 64), Shard(1), Shard(1)),
    ]
    for rows, shape, of_vector, of_gradient in cases:
        weight, bias = drawn(*shape, device=device), drawn(*shape, device=device)
        expected = gradients("layer_norm", (x, weight, bias), None, dy)
        arrays = [
            distribute_tensor(x, mesh, [rows]),
            *(distribute_tensor(a, mesh, [of_vector]) for a in (weight, bias)),
        ]
        split = distribute_tensor(dy, mesh, [rows])
        with CommDebugMode() as communicated:
            y, (dx, *sums) = gradients("layer_norm", arrays, None, split)
        assert communicated.get_total_counts() == 0
        assert y.placements == dx.placements == (rows,)
        assert all(total.placements == (of_gradient,) for total in sums)
        for tensor, whole in zip((y, dx, *sums), (expected[0], *expected[1]), strict=True):
            torch.testing.assert_close(tensor.full_tensor(), whole)


def check_any_axis(mesh: DeviceMesh) -> None:
    """The first axis is normalized, and the vectors broadcast in two ways."""
    device = mesh.device_type
    x, weight, bias = (drawn(*s, device=device) for s in (SHAPE, (8, 1, 1), (12, 1)))
    split = distribute_tensor(x, mesh, [Shard(1)])
    shared = [distribute_tensor(a, mesh, [Replicate()]) for a in (weight, bias)]

    def step(*arrays: Any) -> Any:
        leaves = [array.detach().requires_grad_() for array in arrays]
        y = cupynorm.torch.layer_norm(*leaves, axis=0)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    for tensor, whole in zip(step(split, *shared), step(x, weight, bias), strict=True):
        torch.testing.assert_close(tensor.full_tensor(), whole)


def check_a_residual_stays_where_it_is(mesh: DeviceMesh) -> None:
    device = mesh.device_type
    of_rows = [drawn(*SHAPE, device=device) for _ in range(4)]  # x, residual, dy and ds
    weight = drawn(64, device=device)

    def step(x: Any, residual: Any, dy: Any, ds: Any, weight: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, residual, weight)]
        results = cupynorm.torch.rms_norm(leaves[0], leaves[2], residual=leaves[1])
        return *results, *torch.autograd.grad(results, leaves, (dy, ds))

    for dtype in (torch.float32, torch.bfloat16):
        of_rows[0], of_rows[2] = of_rows[0].to(dtype), of_rows[2].to(dtype)
        expected = step(*of_rows, weight)
        for axis in (0, 1):
            rows = [Shard(axis)]
            split = [distribute_tensor(t, mesh, rows) for t in of_rows]
            shared = distribute_tensor(weight, mesh, [Replicate()])
            with CommDebugMode() as communicated:
                *found, dweight = step(*split, shared)
            assert communicated.get_total_counts() == 0
            assert dweight.placements == (Partial("sum"),)
            torch.testing.assert_close(dweight.full_tensor(), expected[-1])
            for tensor, whole in zip(found, expected[:-1], strict=True):
                assert tensor.placements == tuple(rows)
                torch.testing.assert_close(tensor.full_tensor(), whole, rtol=0, atol=0)


def check_drawn_placements_with_a_residual(mesh: DeviceMesh) -> None:
    """x, the residual, dy and ds each have a placement of their own."""
    device, random = mesh.device_type, Random(59)
    places = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for i in range(16):
        norm, axis = random.choice(["rms_norm", "layer_norm"]), random.choice([-1, (-2, -1)])
        relu = random.choice([None, (-0.5, 1.0)])
        function = functools.partial(getattr(cupynorm.torch, norm), axis=axis, relu=relu)
        shape = SHAPE[-1:] if axis == -1 else SHAPE[-2:]
        arrays = [*(drawn(*SHAPE, device=device) for _ in range(4)), drawn(*shape, device=device)]
        # In the first draws only one of the arrays is split.
        of_each = [[random.choice(places)] for _ in range(4)]
        if i < 4:
            of_each = [[Shard(0) if i == j else Replicate()] for j in range(4)]

        def step(x: Any, residual: Any, dy: Any, ds: Any, weight: Any, norm: Any = function) -> Any:
            leaves = [t.detach().requires_grad_() for t in (x, residual, weight)]
            results = norm(leaves[0], leaves[2], residual=leaves[1])
            return *results, *torch.autograd.grad(results, leaves, (dy, ds))

        split = [
            distribute_tensor(t, mesh, p)
            for t, p in zip(arrays, [*of_each, [random.choice(places[:2])]], strict=True)
        ]
        *found, dweight = step(*split)
        *expected, of_weight = step(*arrays)
        for tensor, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor.full_tensor(), whole, rtol=0, atol=0)
        torch.testing.assert_close(dweight.full_tensor(), of_weight)


def check_split_columns_are_gathered(mesh: DeviceMesh) -> None:
    x, weight = drawn(*SHAPE, device=mesh.device_type), drawn(64, device=mesh.device_type)
    split = distribute_tensor(x, mesh, [Shard(2)])
    y = cupynorm.torch.rms_norm(split, distribute_tensor(weight, mesh, [Shard(0)]))
    torch.testing.assert_close(y.full_tensor(), cupynorm.torch.rms_norm(x, weight))


def check_no_rows_on_some(mesh: DeviceMesh) -> None:
    x, weight = drawn(1, 64, device=mesh.device_type), drawn(64, device=mesh.device_type)
    arrays = [
        distribute_tensor(x, mesh, [Shard(0)]),
        distribute_tensor(weight, mesh, [Replicate()]),
    ]
    y, (dx, dweight) = gradients("rms_norm", arrays, None, distribute_tensor(x, mesh, [Shard(0)]))
    expected, (expected_dx, expected_dweight) = gradients("rms_norm", (x, weight), None, x)
    torch.testing.assert_close(y.full_tensor(), expected)
    torch.testing.assert_close(dx.full_tensor(), expected_dx)
    torch.testing.assert_close(dweight.full_tensor(), expected_dweight)


def check_wrong_calls(mesh: DeviceMesh) -> None:
    """DTensor makes a RuntimeError of any error. These are those of other tensors."""
    x, weight = drawn(*SHAPE, device=mesh.device_type), drawn(64, device=mesh.device_type)

    def split(array: Any, axis: int = 0) -> Any:
        return distribute_tensor(array, mesh, [Shard(axis)])

    def whole(array: Any) -> Any:
        return distribute_tensor(array, mesh, [Replicate()])

    norm, module = cupynorm.torch.rms_norm, RMSNorm(63, device=mesh.device_type)
    gated = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * z)
    scaled = cupynorm.fuse("rms_norm", epilogue=lambda y, factor, z: y * factor * z)
    module.weight = nn.Parameter(whole(module.weight.detach()))
    calls: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: norm(split(x), whole(weight[:63])),
            ValueError,
            "weight must have the shape of x's normalized axes, (64,), or broadcast to x's shape, "
            f"{SHAPE}; got (63,)",
        ),
        *(
            (
                lambda residual=residual: norm(split(x, 1), residual=residual),
                ValueError,
                f"residual must have shape {SHAPE}, got {tuple(residual.shape)}",
            )
            for residual in (split(x[:3]), split(x[0]), split(x[..., 1:], 1), whole(weight))
        ),
        (
            lambda: norm(split(x), weight),
            TypeError,
            "weight must be a DTensor, as x is; got a Tensor",
        ),
        (
            lambda: norm(x, None, whole(weight)),
            TypeError,
            "bias must be a plain tensor, as x is; got a DTensor",
        ),
        (
            lambda: norm(split(x), quantize=cupynorm.Quantize("int8", "row")),
            TypeError,
            "x must be a plain tensor with quantize, got a DTensor",
        ),
        (
            lambda: norm(x, quantize=cupynorm.Quantize("int8", whole(weight[:1]))),
            TypeError,
            "quantize.scale must be a plain tensor, as x is; got a DTensor",
        ),
        (
            lambda: gated(split(x), z=x),
            TypeError,
            "z must be a DTensor, as x is; got a Tensor",
        ),
        (
            lambda: scaled(split(x), factor=weight[0], z=x),
            TypeError,
            "z must be a DTensor, as x is; got a Tensor",
        ),
        (
            lambda: gated(x, z=split(x)),
            TypeError,
            "z must be a plain tensor, as x is; got a DTensor",
        ),
        (
            lambda: norm(split(x.int())),
            TypeError,
            "x.dtype must be float64, float32, float16 or bfloat16, got torch.int32",
        ),
        (
            lambda: norm(split(x), eps=-1.0),
            ValueError,
            "eps must be a finite number of at least 0, got -1.0",
        ),
        (
            lambda: norm(split(x), out_dtype="float32"),
            TypeError,
            "out_dtype must be a torch.dtype or None, got 'float32'",
        ),
        (
            lambda: module(split(x)),
            ValueError,
            f"x must end in the axes of normalized_shape, (63,); got shape {SHAPE}",
        ),
    ]
    for call, kind, message in calls:
        try:
            call()
        except Exception as error:
            assert (type(error), str(error)) == (kind, message), error  # noqa: PT017
        else:
            raise AssertionError(f"no error, where there should be: {message}")


def check_compiled(mesh: DeviceMesh) -> None:
    compiled = torch.compile(cupynorm.torch.layer_norm, backend="aot_eager", fullgraph=True)
    x, weight = drawn(*SHAPE, device=mesh.device_type), drawn(64, device=mesh.device_type)
    split = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    shared = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    y = compiled(split, shared)
    torch.testing.assert_close(y.full_tensor(), cupynorm.torch.layer_norm(x, weight))
    y.backward(distribute_tensor(x, mesh, [Shard(0)]))
    assert shared.grad.placements == (Partial("sum"),)
    assert split.grad.placements == (Shard(0),)


def check_traced_with_open_sizes(mesh: DeviceMesh) -> None:
    x = drawn(*SHAPE, device=mesh.device_type)
    split = distribute_tensor(x, mesh, [Shard(0)])
    traced = make_fx(lambda t: cupynorm.torch.rms_norm(t), tracing_mode="symbolic")(split)
    assert torch.ops.cupynorm.norm_forward.default in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(split).full_tensor(), cupynorm.torch.rms_norm(x))


def model(norms: tuple[Any, Any], device: str) -> nn.Module:
    torch.manual_seed(0)
    rms, layer = norms
    return nn.Sequential(rms(64), nn.Linear(64, 64), layer(64), nn.Linear(64, 8)).to(device)


def train(net: nn.Module, rank: int, world: int, device: str) -> list[float]:
    """Return the losses of some steps. Each process has its share of every batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        batch = torch.randn(16, 64, generator=generator)[rank::world].to(device)
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses


def check_training(mesh: DeviceMesh, rank: int, world: int) -> None:
    device = mesh.device_type
    ours, theirs = (RMSNorm, LayerNorm), (nn.RMSNorm, nn.LayerNorm)
    expected = train(DistributedDataParallel(model(theirs, device)), rank, world, device)
    assert expected[-1] < expected[0]
    replicated = DistributedDataParallel(model(ours, device))
    sharded = model(ours, device)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    alone = fully_shard(nn.LayerNorm(64, device=device), mesh=mesh)
    assert "a subclass of" in cupynorm.torch.replace_norms(alone).left[""]
    wrapped_before = [DistributedDataParallel(model(theirs, device)), model(theirs, device)]
    for linear in (wrapped_before[1][1], wrapped_before[1][3]):
        fully_shard(linear, mesh=mesh)
    fully_shard(wrapped_before[1], mesh=mesh)
    for net in wrapped_before:
        assert len(cupynorm.torch.replace_norms(net).replaced) == 2
    for net in (replicated, sharded, *wrapped_before):
        torch.testing.assert_close(
            torch.tensor(train(net, rank, world, device)), torch.tensor(expected)
        )


def main(rank: int, backend: str, world: int, directory: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    device, gpu = "cpu", None
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        device, gpu = "cuda", torch.device("cuda", rank % gpus)
        torch.cuda.set_device(gpu)
        if gpus < world:
            os.environ["NCCL_HOSTID"] = str(rank)  # two hosts may share a GPU, two processes not
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world,
        init_method=f"file://{directory}/rendezvous",  # a free port might get taken
        device_id=gpu,
    )
    try:
        mesh = init_device_mesh(device, (world,))
        torch.manual_seed(0)
        check_rows_stay_where_they_are(mesh)
        check_eager_calls_go_straight_to_dtensor(mesh)
        check_second_derivatives(mesh)
        check_a_weight_that_varies_is_split_with_the_rows(mesh)
        check_any_axis(mesh)
        check_a_residual_stays_where_it_is(mesh)
        check_drawn_placements_with_a_residual(mesh)
        check_split_columns_are_gathered(mesh)
        check_no_rows_on_some(mesh)
        check_wrong_calls(mesh)
        check_compiled(mesh)
        check_traced_with_open_sizes(mesh)
        check_training(mesh, rank, world)
        if rank == 0:
            print(f"all right: {backend}, {world} processes, torch {torch.__version__}")
        dist.barrier()  # gloo aborts a process whose peer leaves in the middle of a collective
    finally:
        dist.destroy_process_group()
    # DTensor's caches keep the mesh, and with it gloo's threads (torch 2.13). If a thread has yet
    # to release a tensor when the interpreter ends, the process aborts. So leave without ending the
    # interpreter.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    backend, world = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(main, (backend, world, directory), nprocs=world)
