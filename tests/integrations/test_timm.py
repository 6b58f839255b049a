"""The flags of docs/large-batch.md, in the schedules that timm's train script builds from them."""

from types import SimpleNamespace

import pytest
import torch

import ghostbatch as gb
from ghostbatch import InputError, optional

try:
    timm = optional.import_timm()
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)

from timm.scheduler import create_scheduler_v2, scheduler_kwargs

FACTOR = gb.lr_scale(4096, 128)
BASE = {"epochs": 90, "decay_milestones": [30, 60], "warmup_epochs": 5, "cooldown_epochs": 0}
LONGER = {  # 32 times each
    name: [32 * each for each in length] if isinstance(length, list) else 32 * length
    for name, length in BASE.items()
}


def rates(lengths, updates_per_epoch, *, on_updates=False, scale=1.0, sched="multistep"):
    """Return the rate before each update, as timm's train script sets it."""
    args = SimpleNamespace(
        sched=sched,
        warmup_lr=1e-5 * scale,
        min_lr=0.001 * scale,
        sched_on_updates=on_updates,
        **lengths,
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1 * scale)
    count = {"updates_per_epoch": updates_per_epoch}
    scheduler, epochs = create_scheduler_v2(optimizer, **scheduler_kwargs(args), **count)
    history = []
    for epoch in range(epochs):
        for update in range(epoch * updates_per_epoch, (epoch + 1) * updates_per_epoch):
            history.append(optimizer.param_groups[0]["lr"])
            scheduler.step_update(update + 1)
        scheduler.step(epoch + 1)
    return history


@pytest.mark.parametrize("sched", ["multistep", "cosine"])
@pytest.mark.parametrize("on_updates", [False, True])
def test_with_held_epochs_the_rates_of_each_epoch_are_scaled(sched, on_updates):
    options = {"on_updates": on_updates, "sched": sched}
    small = rates(BASE, 4, **options)
    large = rates(BASE, 4, scale=FACTOR, **options)
    assert len(large) == 360
    assert large == pytest.approx([FACTOR * rate for rate in small], rel=1e-9)


@pytest.mark.parametrize("sched", ["multistep", "cosine"])
def test_with_held_updates_the_rates_of_each_update_are_scaled(sched):
    options = {"on_updates": True, "sched": sched}
    small = rates(BASE, 32, **options)
    large = rates(LONGER, 1, scale=FACTOR, **options)
    assert len(large) == 2880
    assert large == pytest.approx([FACTOR * rate for rate in small], rel=1e-9)


@pytest.mark.parametrize(("on_updates", "drop"), [(False, 29 * 32), (True, 30 * 32 - 1)])
def test_timm_drops_one_of_its_steps_before_the_milestone(on_updates, drop):
    history = rates(BASE, 32, on_updates=on_updates)
    assert history[drop - 1 : drop + 1] == pytest.approx([0.1, 0.01])
    stretched = rates({**LONGER, "warmup_epochs": 0}, 1, on_updates=on_updates)
    assert stretched[958:960] == pytest.approx([0.1, 0.01])
