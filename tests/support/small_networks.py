"""Small networks that runs under test name as ``python:small_networks:FUNCTION``."""

import logging
import os
from urllib.error import HTTPError

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def narrow(num_classes=10, *, in_channels=1, image_size=28):
    """Return a small F1: two hidden layers of 32, each Linear, BatchNorm, ReLU."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, num_classes)),
    )


def talking(num_classes=10, *, in_channels=1, image_size=28):
    """Return the network above, and log a line as ghostbatch does."""
    logging.getLogger("ghostbatch.ops").info("building %s", "it")
    return narrow(num_classes, in_channels=in_channels, image_size=image_size)


def unreachable(*_, **__):
    """Fail as a download does, with an error whose arguments pickle does not keep."""
    raise HTTPError("http://weights", 404, "Not Found", {}, None)


def dropping(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network with a convolution, two norms and both kinds of dropout."""
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 4, 5, stride=3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(4 * (image_size // 3 - 1) ** 2, 32)),
        *(nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes)),
    )


def without_norms(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network without batch norm."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))


class OtherNorm(nn.BatchNorm1d):
    """A batch norm that conversion does not know."""


def other_norms(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network with one plain norm and five of a class that conversion does not know."""
    network = narrow(num_classes, in_channels=in_channels, image_size=image_size)
    return network.extend(OtherNorm(num_classes) for _ in range(5))


class BadOnRankOne(nn.Module):
    """Makes one sample infinite in training on the second rank."""

    def forward(self, x):
        if not self.training or os.environ["RANK"] != "1":
            return x
        return torch.cat([x[:1] * torch.inf, x[1:]])


def bad_on_rank_one(num_classes=10, *, in_channels=1, image_size=28):
    """Return the network above with a bad layer after its first three."""
    network = dropping(num_classes, in_channels=in_channels, image_size=image_size)
    return network.insert(3, BadOnRankOne())


class Noisy(nn.Module):
    """Draws numbers by itself in training."""

    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


def drawing(num_classes=10, *, in_channels=1, image_size=28):
    """Return the first network above with a layer that draws numbers by itself."""
    network = narrow(num_classes, in_channels=in_channels, image_size=image_size)
    return network.insert(4, Noisy())


class NoisyOnTheHost(nn.Module):
    """Draws a number on the CPU in training."""

    def forward(self, x):
        return x * float(torch.rand(())) if self.training else x


def drawing_on_the_host(num_classes=10, *, in_channels=1, image_size=28):
    """Return the first network above with a layer that draws on the CPU."""
    network = narrow(num_classes, in_channels=in_channels, image_size=image_size)
    return network.insert(4, NoisyOnTheHost())


class Waits(nn.Module):
    """Reads a value of its input on the host."""

    def forward(self, x):
        return x if float(x.detach().sum()) < 1e9 else x / 2


def waiting(num_classes=10, *, in_channels=1, image_size=28):
    """Return the first network above with a layer that waits for the device."""
    network = narrow(num_classes, in_channels=in_channels, image_size=image_size)
    return network.insert(4, Waits())


class HeadInFp32(nn.Linear):
    """A linear layer that autocast leaves alone."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def head_in_fp32(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network whose last layer computes in fp32."""
    pixels = in_channels * image_size**2
    layers = nn.Flatten(), nn.Linear(pixels, 16), nn.BatchNorm1d(16), nn.ReLU()
    return nn.Sequential(*layers, HeadInFp32(16, num_classes))


def tied(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network of which two layers share their weight."""
    pixels = in_channels * image_size**2
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    layers = nn.Flatten(), nn.Linear(pixels, 16), nn.BatchNorm1d(16), first, nn.ReLU(), second
    return nn.Sequential(*layers, nn.Linear(16, num_classes))


class Repeated(nn.Module):
    """Runs one block three times."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())

    def forward(self, x):
        return self.block(self.block(self.block(x)))


def repeated(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network that runs the same norm three times."""
    first = nn.Linear(in_channels * image_size**2, 16)
    return nn.Sequential(nn.Flatten(), first, Repeated(), nn.Linear(16, num_classes))


def lazy(num_classes=10, **_):
    """Return a network whose sizes are not known yet."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


def frozen(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network without trainable parameters."""
    network = narrow(num_classes, in_channels=in_channels, image_size=image_size)
    return network.requires_grad_(False)


class Recomputed(nn.Module):
    """Runs its first argument again in backward, in the older of PyTorch's two ways."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=True)


def recomputed(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network with two parts that are run again in backward."""
    first = nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.BatchNorm1d(32), nn.ReLU()
    parts = (Recomputed(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*first, *parts, nn.Linear(32, num_classes))


class Table(nn.Module):
    """Adds numbers from a table, which it makes as long as is needed and keeps."""

    def __init__(self):
        super().__init__()
        self.size = 0
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x):
        if len(x) > self.size:
            self.size = len(x)
            self.table = torch.arange(len(x), dtype=x.dtype)
        return x + self.table[: len(x)].view(-1, *(1,) * (x.dim() - 1))


class Counting(nn.Module):
    """Counts its calls in buffers, one of which it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced + 1
        self.late = torch.ones(())
        return x


def half_used(num_classes=10, *, in_channels=1, image_size=28):
    """Return a network with a layer of ones that its forward does not use."""
    network = narrow(num_classes, in_channels=in_channels, image_size=image_size)
    forward = network.forward
    network.unused = nn.Linear(3, 3, bias=False)
    nn.init.ones_(network.unused.weight)
    network.forward = lambda x: nn.Sequential(*list(network)[:-1])(x) if forward else x
    return network
