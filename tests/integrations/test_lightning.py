"""A Lightning fit with the callback has the weights of a plain loop that was adapted by hand."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch_ranks import case_names, ranks_fixture

from ghostbatch import GhostBatchNorm1d, InputError, Regime, RegimeScheduler, optional
from ghostbatch.data import ExactBatchSampler

try:
    optional.import_lightning()
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)

from lightning_fit import (
    BATCH,
    LR,
    SAMPLES,
    L,
    Module,
    assert_equal,
    assert_equal_noise,
    fit,
    large_batch,
    loader,
    noise_scale,
    plain_loop,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of workers and of pytrees
SCRIPT = Path(__file__).with_name("lightning_ranks.py")
on_ranks = ranks_fixture(SCRIPT, 2)


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_on_ranks(on_ranks, name):
    on_ranks(name)


# 12 updates of 16 samples are three epochs. The module's own lengths are for batches of 4.
FITS = {
    "epochs": ({}, {}, {"max_epochs": 3}, 12, [4, 8]),
    "accumulated": ({}, {}, {"max_epochs": 3, "size": 4, "accumulate_grad_batches": 4}, 12, [4, 8]),
    "held updates": ({}, {"hold": "updates"}, {"max_epochs": 3}, 48, [16, 32]),
    "limited steps": (
        {"interval": "step", "milestones": (16, 32)},
        {"unit": "updates"},
        {"max_steps": 48, "max_epochs": None},
        12,
        [4, 8],
    ),
    "steps of the loader": (
        {"interval": "step", "milestones": (4, 8)},
        {"hold": "updates"},
        {"max_epochs": 3},
        48,
        [16, 32],
    ),
    "held steps": (
        {"interval": "step", "milestones": (4, 8)},
        {"hold": "updates", "unit": "updates"},
        {"max_steps": 10, "min_steps": 10, "max_epochs": None},
        10,
        [4, 8],
    ),
    "no scheduler": ({"schedule": False}, {}, {"max_epochs": 3}, 12, []),
    "plain batch norm": ({}, {"ghost": None}, {"max_epochs": 3}, 12, [4, 8]),
}


@pytest.mark.parametrize(("made", "given", "options", "updates", "drops"), FITS.values(), ids=FITS)
def test_a_fit_has_the_weights_of_the_plain_loop(made, given, options, updates, drops):
    module = Module(**made)
    trainer = fit(module, large_batch(**given), **options)
    ghost = given.get("ghost", 4)
    assert isinstance(module.network[1], GhostBatchNorm1d) == (ghost is not None)
    assert trainer.global_step == updates
    assert_equal(module, plain_loop(updates, drops, ghost=ghost or 16)[0])


class Kept(L.loggers.Logger):
    """Keeps the distances and noise scales that it is given."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.distances, self.noise_scales = {}, {}

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        if "weight_distance" in metrics:
            self.distances[step] = metrics["weight_distance"]
        if "gradient_noise_scale" in metrics:
            self.noise_scales[step] = metrics["gradient_noise_scale"]


def test_a_resumed_fit_ends_with_the_same_bits_and_measures_from_the_first_weights(tmp_path):
    logged, kept = Kept(), Kept()
    quiet = {"log_every_n_steps": 2, "size": 8, "accumulate_grad_batches": 2}
    whole = Module()
    fit(whole, large_batch(), max_epochs=3, logger=logged, **quiet)

    first = fit(Module(), large_batch(), max_epochs=2, **quiet)
    first.save_checkpoint(tmp_path / "fit.ckpt")
    second = Module()
    fit(second, large_batch(), max_epochs=3, resume=tmp_path / "fit.ckpt", logger=kept, **quiet)
    for name, tensor in whole.state_dict().items():
        assert second.state_dict()[name].equal(tensor), name

    _, distances = plain_loop(12, [4, 8])
    expected = {update: distances[update - 1] for update in (2, 4, 6, 8, 10, 12)}
    assert logged.distances == pytest.approx(expected, rel=1e-4)
    assert kept.distances == {update: logged.distances[update] for update in (10, 12)}


def test_the_noise_scale_of_accumulated_batches_is_logged_if_asked_for():
    callback, scale, kept = large_batch(noise_scale=True), noise_scale(), Kept()
    parts = {"size": 4, "accumulate_grad_batches": 4}
    fit(Module(), callback, max_epochs=3, logger=kept, log_every_n_steps=5, **parts)
    plain_loop(12, [4, 8], parts=4, scale=scale)
    assert_equal_noise(callback, scale)
    first = noise_scale()
    plain_loop(5, [4], parts=4, scale=first)
    assert kept.noise_scales[5] == pytest.approx(first.estimate().value, rel=1e-3)
    assert kept.noise_scales.keys() == kept.distances.keys() == {5, 10}


def test_a_last_batch_in_one_part_does_not_count_for_the_noise_scale():
    callback = large_batch(noise_scale=True)
    parts = {"size": 8, "accumulate_grad_batches": 2, "limit_train_batches": 5}
    assert fit(Module(), callback, max_epochs=2, **parts).global_step == 6
    assert callback.gradient_noise_scale.estimate().updates == 4


def test_the_noise_scale_of_a_batch_in_one_part_is_refused():
    with pytest.raises(InputError, match=r"^noise_scale: a batch in one part .*; accumulate two"):
        fit(Module(), large_batch(noise_scale=True), max_epochs=1)


@pytest.mark.parametrize(("precision", "automatic"), [("16-mixed", True), ("32-true", False)])
def test_the_noise_scale_of_gradients_that_change_in_between_is_refused(precision, automatic):
    """The trainer is a stand-in: on a CPU Lightning has no 16-mixed."""
    module = Module()
    module.automatic_optimization = automatic
    trainer = SimpleNamespace(world_size=2, accumulate_grad_batches=1, precision=precision)
    with pytest.raises(InputError, match=r"^noise_scale: precision 16-mixed and manual"):
        large_batch(noise_scale=True)._start_noise_scale(trainer, module)


def test_a_fit_with_the_exact_sampler_resumes_in_the_middle_of_an_epoch(tmp_path):
    class Exact(Module):
        def train_dataloader(self):
            sampler = ExactBatchSampler(SAMPLES, BATCH, micro=8)
            sampler.set_update(self.trainer.global_step)
            return loader(sampler)

        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 6 and not middle.exists():
                self.trainer.save_checkpoint(middle)  # an epoch has 4 updates

    middle = tmp_path / "fit.ckpt"
    parts = {"size": None, "accumulate_grad_batches": 2}
    whole, second = Exact(), Exact()
    fit(whole, large_batch(), max_epochs=3, **parts)
    trainer = fit(second, large_batch(), max_epochs=3, resume=middle, **parts)
    assert trainer.global_step == 12
    for module in (whole, second):
        assert_equal(module, plain_loop(12, [4, 8], exact=True)[0])


def test_a_second_fit_of_the_same_trainer_stretches_its_limits_once():
    trainer = fit(Module(), large_batch(hold="updates"), max_epochs=1)
    assert (trainer.max_epochs, trainer.global_step) == (4, 16)
    trainer.fit(Module(), loader(16))
    assert (trainer.max_epochs, trainer.global_step) == (4, 16)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Module(), loader(16))
    assert trainer.max_epochs == 8


def test_a_callback_that_continued_a_fit_measures_the_next_from_its_own_first_weights(tmp_path):
    fit(Module(), large_batch(), max_epochs=1).save_checkpoint(tmp_path / "fit.ckpt")
    used, found = large_batch(), []
    fit(Module(), used, max_epochs=2, resume=tmp_path / "fit.ckpt")
    for callback in (used, large_batch()):
        module, kept = Module(), Kept()
        module.network[0].weight.data += 1
        fit(module, callback, max_epochs=1, logger=kept, log_every_n_steps=4)
        found.append(kept.distances)
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_a_trainer_with_a_clipping_of_its_own_keeps_it():
    trainer = fit(Module(), large_batch(), max_epochs=1, gradient_clip_val=0.7)
    assert trainer.gradient_clip_val == 0.7
    assert fit(Module(), large_batch(clip=None), max_epochs=1).gradient_clip_val is None


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loader_that_does_not_make_up_the_batch_is_refused(parts):
    line = (
        rf"batch: 16 is not .* 4 samples x 1 processes x {parts} .*; give the loader {16 // parts}"
    )
    with pytest.raises(InputError, match=line):
        fit(Module(), large_batch(), size=4, max_epochs=1, accumulate_grad_batches=parts)


def test_a_scheduler_that_cannot_be_adapted_is_refused_by_name():
    class Exponential(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    with pytest.raises(InputError, match="scheduler: ExponentialLR cannot be adapted"):
        fit(Exponential(), large_batch(), max_epochs=1)


def test_wrong_options_are_refused_when_the_callback_is_built():
    for field, value in {"batch": 0, "ghost": 0, "hold": "distance", "unit": "step"}.items():
        with pytest.raises(InputError, match=f"^{field}: "):
            large_batch(**{field: value})


@pytest.mark.parametrize("installed", ["lightning.pytorch", "pytorch_lightning", None])
def test_either_package_will_do(monkeypatch, installed):
    def import_module(name):
        if name != installed:
            raise ModuleNotFoundError(name=name.partition(".")[0])
        return name

    monkeypatch.setattr(optional, "import_torchvision", lambda: None)
    monkeypatch.setattr(optional, "import_module", import_module)
    if installed:
        assert optional.import_lightning() == installed
    else:
        with pytest.raises(InputError, match=r"lightning: is not .*'ghostbatch\[lightning\]'"):
            optional.import_lightning()


def one_cycle(total):
    class Cycled(Module):
        """Has a schedule of single updates."""

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=total)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": rates, "interval": "step"},
            }

    return Cycled()


def test_a_schedule_as_long_as_max_steps_needs_its_unit():
    steps = {"max_steps": 48, "max_epochs": None}
    with pytest.raises(
        InputError, match=r"^unit: the scheduler is as long as max_steps, 48, .*upd"
    ):
        fit(one_cycle(48), large_batch(), **steps)
    trainer = fit(one_cycle(48), large_batch(unit="updates"), **steps)
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.total_steps == 12


def test_a_callback_that_is_used_again_begins_anew(tmp_path):
    callback, kept = large_batch(hold="updates"), Kept()
    first = fit(Module(), callback, max_epochs=1)
    first.save_checkpoint(tmp_path / "fit.ckpt")
    callback.setup(first, Module(), "test")
    callback.load_state_dict(torch.load(tmp_path / "fit.ckpt")["callbacks"][callback.state_key])
    second = fit(Module(), callback, max_epochs=4, logger=kept, log_every_n_steps=64)
    assert (first.max_epochs, second.max_epochs) == (4, 16)
    _, distances = plain_loop(64, [16, 32])
    assert kept.distances == {64: pytest.approx(distances[-1], rel=1e-4)}


def test_a_callback_can_be_sent_to_another_process_before_and_after_a_fit():
    callback = large_batch()
    assert pickle.loads(pickle.dumps(callback)).batch == BATCH  # noqa: S301 (our own)
    fit(Module(), callback, max_epochs=1)
    assert pickle.loads(pickle.dumps(callback)).batch == BATCH  # noqa: S301


def test_a_checkpoint_of_another_fit_is_refused(tmp_path):
    first = fit(Module(), large_batch(), max_epochs=1)
    first.save_checkpoint(tmp_path / "fit.ckpt")
    with pytest.raises(InputError, match=r"^base_batch: .* with base_batch 4, not 8; resume with"):
        fit(Module(), large_batch(base_batch=8), max_epochs=2, resume=tmp_path / "fit.ckpt")
    without = fit(Module(), L.Callback(), max_epochs=1)
    without.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(InputError, match=r"^ckpt_path: it is of a fit without LargeBatch"):
        fit(Module(), large_batch(), max_epochs=2, resume=tmp_path / "plain.ckpt")


def test_an_adapted_regime_stays_as_it_is():
    class Scheduled(Module):
        """Has a regime that was scaled already."""

        def configure_optimizers(self):
            regime = Regime(lr=2 * LR, epochs=3)
            optimizer = torch.optim.SGD(self.parameters(), lr=2 * LR, momentum=0.9)
            rates = RegimeScheduler(optimizer, regime, samples_per_epoch=SAMPLES, batch=BATCH)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": rates, "interval": "step"},
            }

    module = Scheduled()
    fit(module, large_batch(), max_epochs=3)
    assert_equal(module, plain_loop(12, [])[0])


def test_clipping_by_value_is_not_taken_for_a_norm():
    with pytest.raises(InputError, match=r"^clip: it is a norm, and gradient_clip_algorithm is"):
        fit(Module(), large_batch(), max_epochs=1, gradient_clip_algorithm="value")


def test_accumulation_that_changes_the_batch_is_refused():
    more = L.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[large_batch(), more],
    )  # fmt: skip
    with pytest.raises(InputError, match=r"^batch: 16 is not the loader's 16 samples x 1 pro"):
        trainer.fit(Module(), loader(BATCH))
    assert trainer.current_epoch == 1
