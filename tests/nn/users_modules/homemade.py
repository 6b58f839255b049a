"""A user's module with functions that build networks, and some that do not."""

from torch import nn

asked = {}
constant = 3


def picky(num_classes, in_channels):
    """Take two of the arguments."""
    del in_channels
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


def greedy(**arguments):
    """Take whatever is given, and record it."""
    asked.update(arguments)
    return nn.Identity()


def careless():
    """Return no network."""
    return "a network"


def demanding(width):
    return nn.Linear(width, width)
