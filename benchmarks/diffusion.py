"""The cost of measuring distance and random potential, against their limits.

    python benchmarks/diffusion.py --device cuda         # ResNet44 at CIFAR-10's size

Distance: its share of the time of a run, measured at log-spaced updates; the limit is 1 %. Random
potential: minutes for 1,000 directions over 50,000 images; the limit is 5. On a GPU the potential
is measured twice: with convolutions in TF32, PyTorch's default, and in fp32, which shows how much
of the changes of the loss is rounding.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ghostbatch import WeightDistance, random_potential
from ghostbatch.diagnostics import BatchedLoss, log_spaced
from ghostbatch.nn import MODELS

DIRECTIONS, UPDATES, BATCH = 1000, 78_125, 128


def main() -> None:
    """Measure and print both costs."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--model", default="resnet44")
    options.add_argument("--samples", type=int, default=50_000, help="images per direction")
    options.add_argument("--batch", type=int, default=5000, help="images per batch")
    options.add_argument("--directions", type=int, default=10, help="directions to time")
    chosen = options.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = MODELS[chosen.model](10).to(chosen.device)
    if chosen.device != "cpu":
        model = model.to(memory_format=torch.channels_last)
    _distance(model, chosen.device)
    _potential(model, chosen)


def _distance(model: nn.Module, device: str) -> None:
    walked = WeightDistance(model)
    images = torch.randn(BATCH, 3, 32, 32, device=device)
    labels = torch.randint(10, (BATCH,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    seconds, measured = _time(step, device), _time(walked.distance, device)
    measurements = len(log_spaced(UPDATES))
    print(
        f"distance: {1e3 * measured:.2f} ms, {measured / seconds:.2f} of a step of {BATCH}; "
        f"{measurements} times in {UPDATES:,} updates that is "
        f"{100 * measurements * measured / (UPDATES * seconds):.4f} % (limit 1 %)"
    )


def _potential(model: nn.Module, chosen: argparse.Namespace) -> None:
    images = torch.randint(256, (chosen.samples, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (chosen.samples,), device=chosen.device)
    loss = BatchedLoss(
        images.to(chosen.device, memory_format=torch.channels_last),
        labels,
        batch=chosen.batch,
        prepare=lambda batch: batch.float().sub_(127).mul_(1 / 64),
    )
    changes = []
    for tf32 in (True, False) if chosen.device.startswith("cuda") else (False,):
        torch.backends.cudnn.allow_tf32 = tf32
        random_potential(model, loss, radius=10, samples=2)  # warm-up
        began = time.perf_counter()
        found = random_potential(model, loss, radius=10, samples=chosen.directions)
        each = (time.perf_counter() - began) / (chosen.directions + 1)  # one more for the origin
        changes.append(torch.tensor(found.changes))
        print(
            f"random potential, {'TF32' if tf32 else 'fp32'}: {each:.3f} s a direction of "
            f"{chosen.samples:,} images, {each * DIRECTIONS / 60:.1f} minutes for {DIRECTIONS:,} "
            f"(limit 5); losses near {found.origin:.3f}, changes of "
            f"{changes[-1].square().mean().sqrt():.3g}"
        )
    if len(changes) > 1:
        print(f"TF32 alters a change by at most {(changes[0] - changes[1]).abs().max():.2g}")


def _time(call: Callable[[], object], device: str, times: int = 20) -> float:
    for _ in range(3):
        call()
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    return (time.perf_counter() - began) / times


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
