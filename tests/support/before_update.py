"""A run before its first update."""

import torch

from ghostbatch.data import load, open_feed
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, image_format, use_gpu_layers
from ghostbatch.train.update import Update


def before_update(recipe, device="cpu", kind=Update, micro=None):
    """Return what computes the updates of a run, none of which is done."""
    data, device = load(recipe.data), torch.device(device)
    state = State(recipe.plan(data.info.samples), data.info, device)
    split = split_batch(recipe, state.model, micro, 1)
    if device.type == "cuda":
        use_gpu_layers(state.model, recipe, one_rank=True)
    settings = {"batch": recipe.batch, "seed": recipe.seed, "augment": recipe.augment}
    feed = open_feed(data, device=device, **image_format(state.model, recipe, device), **settings)
    return kind(state, feed, split, Ranks())
