"""An ordinary PyTorch training script, adapted to a batch 8 times as large, line by line.

    python examples/large_batch_in_your_loop.py

The script was written for batches of 64. A line that ends in "new" was added. A comment "was:" says
what the line below it was before, and "gone:" is a line that is not needed any more. All other
lines are the old script's. The data are the 5,000 digits that come with the package. It takes less
than a minute on an idle CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostbatch as gb  # new

BASE_BATCH = 64  # new
# was: BATCH = 64
BATCH = 512
EPOCHS = 3


def digits(split: str) -> TensorDataset:
    """Return the images, as rows of 784 pixels, and the labels of a split."""
    data = getattr(gb.data.load("digits"), split)
    return TensorDataset(data.images.flatten(1).float() / 128 - 1, data.labels)


def network() -> nn.Module:
    """Return a network with batch norm."""
    return nn.Sequential(
        *(nn.Linear(784, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy of a model in percent."""
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).double() for images, labels in loader]
    return 100 * torch.cat(right).mean().item()


def main() -> None:
    """Train and evaluate."""
    torch.manual_seed(0)
    train, test = digits("train"), digits("test")
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    model = network()
    gb.to_ghost(model, ghost=BASE_BATCH)  # new

    # The old schedule as a Regime, with every rate times sqrt(512 / 64).
    regime = gb.Regime(lr=0.01, epochs=EPOCHS, drops=((2, 0.001),))  # new
    regime = regime.scaled(gb.lr_scale(BATCH, BASE_BATCH))  # new
    # was: optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=regime.lr, momentum=0.9)
    # It counts epochs of the small batch, so that the rate drops after as many updates as before.
    sizes = {"samples_per_epoch": len(train), "batch": BASE_BATCH}  # new
    # was: scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2])
    scheduler = gb.RegimeScheduler(optimizer, regime, **sizes)
    walked = gb.WeightDistance(model)  # new

    # was: for _ in range(EPOCHS):
    for _ in range(EPOCHS * BATCH // BASE_BATCH):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)  # new
            optimizer.step()
            scheduler.step()  # new
        # gone: scheduler.step()
    print(f"accuracy {evaluate(model, DataLoader(test, batch_size=1000)):.1f} %")
    print(f"distance walked {walked.distance().total:.1f}")  # new


if __name__ == "__main__":
    main()
