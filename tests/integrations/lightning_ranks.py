"""Fits of Lightning with DDP on two processes, which torchrun starts."""

import warnings

import lightning_fit
from launch_ranks import Cases

case = Cases()
DDP = {"strategy": "ddp", "devices": 2, "max_epochs": 3}


@case
def ddp_has_the_weights_of_the_plain_loop():
    module = lightning_fit.Module()
    lightning_fit.fit(module, lightning_fit.large_batch(), size=8, **DDP)
    model, _ = lightning_fit.plain_loop(12, [4, 8], ranks=2)
    lightning_fit.assert_equal(module, model)


@case
def ddp_with_accumulation_has_the_weights_of_the_plain_loop():
    module = lightning_fit.Module()
    options = {"size": 4, "accumulate_grad_batches": 2, **DDP}
    lightning_fit.fit(module, lightning_fit.large_batch(), **options)
    model, _ = lightning_fit.plain_loop(12, [4, 8], ranks=2, parts=2)
    lightning_fit.assert_equal(module, model)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    case.run()
