"""Data parallelism on torch: an all-reduce by hand in Keras, and DDP without Keras."""

import os
from typing import Any

from unisono.bench.nets import PER_REPLICA, data, make
from unisono.bench.racer import Pass, fit_pass, loop_pass


def _join(num_replicas: int) -> int:
    import torch.distributed as dist

    rank = int(os.environ["BENCH_RANK"])
    store = dist.FileStore(os.environ["BENCH_STORE"], num_replicas)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_replicas)
    return rank


def keras_all_reduce(net: str, num_steps: int, num_replicas: int) -> Pass:
    """Keras' `fit` in each process on its own rows; gradients are averaged in `optimizer.apply`."""
    import torch
    import torch.distributed as dist

    rank = _join(num_replicas)
    model = make(net)
    apply = model.optimizer.apply

    def average_then_apply(grads: Any, trainable_variables: Any = None) -> Any:
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        parts = (flat / num_replicas).split([g.numel() for g in grads])
        grads = [p.view(g.shape) for p, g in zip(parts, grads, strict=True)]
        return apply(grads, trainable_variables)

    model.optimizer.apply = average_then_apply
    batch = PER_REPLICA[net]
    own = slice(rank, None, num_replicas)
    return fit_pass(model, net, batch * num_steps * num_replicas, batch, rows=own)


def raw_ddp(net: str, num_steps: int, num_replicas: int) -> Pass:
    """A torch module in DistributedDataParallel, over one fixed batch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    _join(num_replicas)
    model = DistributedDataParallel(_module(net).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), 5e-3, momentum=0.9)
    x, y = _batch(net)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return loop_pass(step, num_steps)


def lightning(net: str, num_steps: int, num_replicas: int) -> Pass:
    """Lightning Fabric with the strategy "ddp", over one fixed batch."""
    import lightning
    import torch

    _join(num_replicas)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, num_nodes=num_replicas, strategy="ddp")
    fabric.launch()
    module = _module(net)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 5e-3, 0.9))
    x, y = _batch(net)

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return loop_pass(step, num_steps)


def accelerate(net: str, num_steps: int, num_replicas: int) -> Pass:
    """Accelerate, over one fixed batch."""
    import torch
    from accelerate import Accelerator

    os.environ |= {"RANK": os.environ["BENCH_RANK"], "WORLD_SIZE": str(num_replicas)}
    # Required, though the process group exists already.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    _join(num_replicas)
    accelerator = Accelerator(cpu=True)
    module = _module(net)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), 5e-3, 0.9))
    x, y = _batch(net)

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()

    return loop_pass(step, num_steps)


def _batch(net: str) -> tuple[Any, Any]:
    import torch

    x, y = data(net, PER_REPLICA[net])
    images = torch.from_numpy(x).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last), torch.from_numpy(y)


def _module(net: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if net == "digits":
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    if net == "mnist":
        return nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 25, 10),
        )  # fmt: skip
    return _mini_googlenet()


def _mini_googlenet() -> Any:
    import torch
    from torch import nn

    def conv(before: int, after: int, size: int, stride: int = 1, padding: int = 0) -> Any:
        layers = nn.Conv2d(before, after, size, stride, padding), nn.BatchNorm2d(after), nn.ReLU()
        return nn.Sequential(*layers)

    class Inception(nn.Module):
        def __init__(self, before: int, narrow: int, wide: int) -> None:
            super().__init__()
            self.narrow, self.wide = conv(before, narrow, 1), conv(before, wide, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return torch.cat([self.narrow(x), self.wide(x)], 1)

    class Downsample(nn.Module):
        def __init__(self, before: int, filters: int) -> None:
            super().__init__()
            self.conv, self.pool = conv(before, filters, 3, stride=2), nn.MaxPool2d(3, 2)

        def forward(self, x: Any) -> Any:
            return torch.cat([self.conv(x), self.pool(x)], 1)

    return nn.Sequential(
        conv(3, 96, 3, padding=1), Inception(96, 32, 32), Inception(64, 32, 48),
        Downsample(80, 80), Inception(160, 112, 48), Inception(160, 96, 64),
        Inception(160, 80, 80), Inception(160, 48, 96), Downsample(144, 96),
        Inception(240, 176, 160), Inception(336, 176, 160), nn.AvgPool2d(7), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(336, 10),
    )  # fmt: skip
