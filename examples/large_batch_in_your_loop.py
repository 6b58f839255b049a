"""A small-batch recipe adapted to a batch 16 times as large, in your own loop.

    python examples/large_batch_in_your_loop.py

A two-layer network learns a made-up rule from 4,096 samples: at batch 32, at batch 512, and at
batch 512 with the paper's remedies (learning rates scaled by the square root of the batch ratio,
ghosts of 32, as many updates as at batch 32).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ghostbatch as gb

SAMPLES = 4096
BASE_BATCH = 32
REGIME = gb.Regime(lr=0.05, epochs=2, drops=((1.5, 0.005),))  # tuned for BASE_BATCH


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Return points in 20 dimensions, labelled by the sign of a polynomial."""
    x = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()


def train(batch: int, *, adapt: bool) -> float:
    """Train at ``batch``, with or without the remedies; return the test accuracy in percent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 2))
    regime, clock = REGIME, batch
    if adapt:
        gb.to_ghost(model, ghost=BASE_BATCH)
        regime = regime.scaled(gb.lr_scale(batch, BASE_BATCH))
        clock = BASE_BATCH  # the schedule counts the updates of the small batch
    optimizer = torch.optim.SGD(
        model.parameters(), lr=regime.lr, momentum=0.9, weight_decay=regime.weight_decay
    )
    scheduler = gb.RegimeScheduler(optimizer, regime, samples_per_epoch=SAMPLES, batch=clock)

    x, y = data(seed=1)
    updates = round(regime.epochs * SAMPLES / clock)
    for _ in range(updates):
        chosen = torch.randint(SAMPLES, (batch,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()

    x, y = data(seed=2)
    accuracy = (model.eval()(x).argmax(1) == y).double().mean().item()
    return 100 * accuracy


def main() -> None:
    """Print the accuracies of the three runs."""
    for name, accuracy in {
        "batch 32": train(32, adapt=False),
        "batch 512 as it is": train(512, adapt=False),
        "batch 512 adapted": train(512, adapt=True),
    }.items():
        print(f"{name:<20} {accuracy:.1f} %")


if __name__ == "__main__":
    main()
