"""A network that needs more memory than there is."""

import torch
from torch import nn

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def hungry(samples, error=NO_MEMORY, *, norm=True, evaluating=False):
    """Return the builder of a network that can train on, or also evaluate, so many at a time."""

    class Hungry(nn.Module):
        def forward(self, x):
            if (self.training or evaluating) and len(x) > samples:
                raise error
            return x

    def build(num_classes, *, in_channels, image_size):
        size = in_channels * image_size**2
        layers = [nn.BatchNorm1d(size)] if norm else []
        return nn.Sequential(nn.Flatten(), Hungry(), *layers, nn.Linear(size, num_classes))

    return build
