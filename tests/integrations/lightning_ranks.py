"""Fits of Lightning with DDP on two processes, which torchrun starts."""

import warnings

import lightning_fit
from launch_ranks import Cases

import ghostbatch as gb

case = Cases()
DDP = {"strategy": "ddp", "devices": 2, "max_epochs": 3}


@case
def ddp_has_the_weights_of_the_plain_loop():
    module = lightning_fit.Module()
    lightning_fit.fit(module, lightning_fit.large_batch(), size=8, **DDP)
    model, _ = lightning_fit.plain_loop(12, [4, 8], ranks=2)
    lightning_fit.assert_equal(module, model)


@case
def ddp_with_accumulation_has_the_weights_and_the_noise_scale_of_the_plain_loop():
    module, callback = lightning_fit.Module(), lightning_fit.large_batch(noise_scale=True)
    lightning_fit.fit(module, callback, size=4, accumulate_grad_batches=2, **DDP)
    scale = lightning_fit.noise_scale()
    model, _ = lightning_fit.plain_loop(12, [4, 8], ranks=2, parts=2, scale=scale)
    lightning_fit.assert_equal(module, model)
    lightning_fit.assert_equal_noise(callback, scale)


@case
def ddp_with_the_exact_sampler_has_the_weights_of_one_process():
    module = lightning_fit.Module()
    sampler = gb.data.ExactBatchSampler(lightning_fit.SAMPLES, lightning_fit.BATCH, micro=8)
    options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False, **DDP}
    lightning_fit.fit(module, lightning_fit.large_batch(), size=sampler, **options)
    model, _ = lightning_fit.plain_loop(12, [4, 8], exact=True)
    lightning_fit.assert_equal(module, model)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    case.run()
