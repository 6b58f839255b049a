"""A small Lightning module, and the same training as a plain loop: the oracle."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ghostbatch as gb
from ghostbatch.integrations.lightning import LargeBatch
from ghostbatch.optional import import_lightning

L = import_lightning()

BATCH, BASE_BATCH, GHOST, CLIP = 16, 4, 4, 0.3  # the square root of 16 / 4 is 2
SIZES = {"batch": BATCH, "base_batch": BASE_BATCH, "ghost": GHOST, "clip": CLIP}
SAMPLES = 64
LR, GAMMA = 0.1, 0.3


def data():
    """Return samples with a batch statistic that depends on which of them form a ghost."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network():
    """Return the same network with batch norm each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Module(L.LightningModule):
    """The network with SGD and drops of the rate after some epochs, or updates."""

    def __init__(self, milestones=(1, 2), interval="epoch", schedule=True):
        super().__init__()
        self.network = network()
        self.milestones, self.interval, self.schedule = list(milestones), interval, schedule

    def training_step(self, batch, _):
        """Return the loss."""
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        """Return the optimizer for batches of 4, and its scheduler."""
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        if not self.schedule:
            return optimizer
        drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, self.milestones, gamma=GAMMA)
        scheduler = {"scheduler": drops, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def loader(size):
    """Return batches in the order of the data; a sampler of Lightning's own would shuffle."""
    dataset = TensorDataset(*data())
    if isinstance(size, gb.data.ExactBatchSampler):
        return DataLoader(dataset, batch_sampler=size)
    sampler = DistributedSampler(dataset, shuffle=False) if dist.is_initialized() else None
    return DataLoader(dataset, batch_size=size, sampler=sampler)


def fit(module, callback, *, size=BATCH, resume=None, **options):
    """Fit a module with the callback; return its Trainer."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **options},
        callbacks=[callback],
    )
    trainer.fit(module, loader(size) if size else None, ckpt_path=resume)
    return trainer


def noise_scale():
    """Return an instrument for `plain_loop`."""
    return gb.GradientNoiseScale(network(), process_group=gb.LOCAL)


def plain_loop(updates, drops, *, ranks=1, parts=1, ghost=GHOST, scale=None, exact=False):
    """Return the network of a plain loop with rates of 0.2, and its distance after each update.

    Each part of a batch holds the samples of rank 0, then those of rank 1: every R-th one each. If
    ``exact``, the batches are those of the stream. ``scale`` gets the gradients of the parts.
    """
    model = gb.to_ghost(network(), ghost, process_group=gb.LOCAL)
    walked, distances = gb.WeightDistance(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=2 * LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, gamma=GAMMA)
    x, y = data()
    stream = gb.data.PermutationStream(SAMPLES, BATCH, seed=0)
    for update in range(updates):
        start = update * BATCH % SAMPLES
        chosen = torch.arange(start, start + BATCH).view(parts, -1, ranks).mT.flatten()
        chosen = stream.indices(update) if exact else chosen
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x[chosen]), y[chosen], reduction="none")
        if scale is not None:
            shards = losses.chunk(parts * ranks)
            scale.update([gradients(model, shard) for shard in shards], len(shards[0]))
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        distances.append(walked.distance().total)
    return model, distances


def gradients(model, losses):
    """Return the gradients of the mean of ``losses``."""
    return torch.autograd.grad(losses.mean(), list(model.parameters()), retain_graph=True)


def assert_equal(module, model):
    """Compare weights and running statistics."""
    expected = model.state_dict()
    for name, tensor in module.network.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def large_batch(**options):
    """Return the callback."""
    return LargeBatch(**{**SIZES, **options})


def assert_equal_noise(callback, scale):
    """Compare the noise scale that a callback measured with another one."""
    found, expected = callback.gradient_noise_scale.estimate(), scale.estimate()
    assert found.updates == expected.updates
    assert (found.signal, found.noise) == pytest.approx((expected.signal, expected.noise), rel=1e-3)
