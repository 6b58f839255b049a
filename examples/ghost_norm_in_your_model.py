"""Ghost batch norm in an existing model, in one line; the rest of the code stays as it is.

    python examples/ghost_norm_in_your_model.py

A small convolutional network is trained on random images at batch 512: as written, then with ghosts
of 64, then with plain batch norm again. The parameters and the optimizer stay the same objects, and
checkpoints load in both directions.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ghostbatch as gb


def your_model() -> nn.Module:
    """Return a network with plain batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def your_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Your training step, unchanged."""
    images, labels = torch.randn(512, 3, 16, 16), torch.randint(10, (512,))
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    """Train, convert, continue to train, convert back."""
    torch.manual_seed(0)
    model = your_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    print(f"plain   loss {your_step(model, optimizer):.4f}  {model[1]}")

    gb.to_ghost(model, ghost=64)
    print(f"ghosts  loss {your_step(model, optimizer):.4f}  {model[1]}")

    gb.to_plain(model)
    your_model().load_state_dict(model.state_dict())  # the keys are the same
    print(f"plain   loss {your_step(model, optimizer):.4f}  {model[1]}")


if __name__ == "__main__":
    main()
