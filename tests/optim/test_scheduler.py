"""The scheduler drives a real optimizer: every rate before the exact update it is meant for."""

import json
import pickle
from dataclasses import asdict, replace

import pytest
import torch
from saved import saved_and_loaded
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, PolynomialLR, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from ghostbatch.errors import InputError
from ghostbatch.optim import Regime, RegimeScheduler

# 50 samples at 8: epoch 3 is update 18.75, so 19; epoch 5 is 31.25, so 31; epoch 7 is 43.75, so 44.
REGIME = Regime(
    lr=0.2, epochs=8, drops=((3, 0.1), (5, 0.02, 0.0), (7, 0.01, 0.3)), weight_decay=0.1, warmup=0.5
)
SIZES = {"samples_per_epoch": 50, "batch": 8}
UPDATES = 50


def sgd(groups=({},), **defaults):
    weights = [nn.Parameter(torch.tensor(1.0 + i, dtype=torch.float64)) for i in range(len(groups))]
    optimizer = torch.optim.SGD(
        [{"params": w, **options} for w, options in zip(weights, groups, strict=True)],
        **{"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, **defaults},
    )
    return weights, optimizer


def start(groups=({},), *, regime=REGIME, **defaults):
    weights, optimizer = sgd(groups, **defaults)
    return weights, optimizer, RegimeScheduler(optimizer, regime, **SIZES)


def advance(weights, optimizer, scheduler, updates):
    """Descend w^2/2; return rate, decay and weight of every group at each update."""
    history = []
    for _ in range(updates):
        used = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        optimizer.zero_grad()
        sum(w**2 / 2 for w in weights).backward()
        optimizer.step()
        scheduler.step()
        history.append([(*rates, w.item()) for rates, w in zip(used, weights, strict=True)])
    return history


def test_the_rate_rises_and_drops_before_the_exact_update():
    history = [groups[0][:2] for groups in advance(*start(), UPDATES)]
    warmup = [(pytest.approx(lr), 0.1) for lr in (0, 0.064, 0.128)]
    phases = [(0.2, 0.1)] * 16 + [(0.1, 0.1)] * 12 + [(0.02, 0.0)] * 13 + [(0.01, 0.3)] * 6
    assert history == warmup + phases
    assert history == [REGIME.at_update(u, 50, 8) for u in range(UPDATES)]


# ------------------------------------------------------------------------- rates that always fall

COSINE = Regime(lr=0.2, epochs=8, weight_decay=0.1, schedule="cosine")
SQUARE = Regime(lr=0.2, epochs=8, weight_decay=0.1, schedule="polynomial", power=2)
FALLING = {  # and PyTorch's scheduler of the same number of updates
    "cosine": (COSINE, CosineAnnealingLR),
    "line": (replace(SQUARE, power=1), PolynomialLR),
    "square": (SQUARE, lambda optimizer, n: PolynomialLR(optimizer, n, power=2)),
}


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("groups", [[{}], [{"lr": 0.1}, {}]], ids=["one group", "two groups"])
def test_a_rate_that_always_falls_is_that_of_pytorchs_scheduler(name, groups):
    regime, twin = FALLING[name]
    ours = advance(*start(groups, regime=regime), UPDATES)
    weights, optimizer = sgd(groups)
    theirs = advance(weights, optimizer, twin(optimizer, UPDATES), UPDATES)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine == [pytest.approx(group, rel=1e-9) for group in right]


@pytest.mark.parametrize("name", FALLING)
def test_after_a_warm_up_the_rate_falls_over_the_updates_that_are_left(name):
    regime, twin = FALLING[name]
    ours = advance(*start(regime=replace(regime, warmup=0.5)), UPDATES)  # 3 updates
    weights, optimizer = sgd()
    parts = [LambdaLR(optimizer, lambda update: update * 8 / 25), twin(optimizer, UPDATES - 3)]
    theirs = advance(weights, optimizer, SequentialLR(optimizer, parts, [3]), UPDATES)
    assert [groups[0] for groups in ours] == [pytest.approx(g[0], rel=1e-9) for g in theirs]


def test_a_rate_that_has_fallen_to_zero_stays_there():
    weights, optimizer, scheduler = start(regime=replace(COSINE, warmup=8))  # nothing but warm-up
    advance(weights, optimizer, scheduler, UPDATES)
    assert scheduler.get_last_lr() == [0]
    weights, optimizer, scheduler = start(regime=COSINE)
    assert [lr for ((lr, *_),) in advance(weights, optimizer, scheduler, 60)[50:]] == [0] * 10


class NothingIsRead(TorchDispatchMode):
    """Refuses to read a number from a tensor, which waits for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read"
        return func(*args, **(kwargs or {}))


def test_rates_in_tensors_are_filled_in_place_and_nothing_is_read():
    weights = [nn.Parameter(torch.ones(())) for _ in range(2)]
    rates = [torch.tensor(0.2), torch.tensor(0.05)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": rates[1]}]
    optimizer = torch.optim.SGD(groups, lr=rates[0], weight_decay=0.1)
    scheduler = RegimeScheduler(optimizer, COSINE, **SIZES)
    for update in range(1, UPDATES):
        optimizer._opt_called = True  # its own step is not what is tested
        with NothingIsRead():
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == rates
        lr = COSINE.at_update(update, 50, 8).lr
        assert rates == [pytest.approx(lr, rel=1e-6), pytest.approx(lr / 4, rel=1e-6)]
    assert all(group["lr"] is rates[i] for i, group in enumerate(optimizer.param_groups))


def test_momentum_survives_the_drops():
    (w, velocity), expected = (1.0, 0.0), []
    for update in range(UPDATES):  # SGD written out, never restarted
        lr, decay = REGIME.at_update(update, 50, 8)
        velocity = 0.9 * velocity + w + decay * w
        w -= lr * velocity
        expected.append(w)
    actual = [groups[0][2] for groups in advance(*start(), UPDATES)]
    assert actual == pytest.approx(expected, rel=1e-12)


def test_groups_keep_the_ratio_of_their_rates():
    history = advance(*start([{}, {"lr": 0.05}, {"lr": 0.6}]), UPDATES)
    for update, groups in enumerate(history):
        lr = REGIME.at_update(update, 50, 8).lr
        assert [group[0] for group in groups] == pytest.approx([lr, lr / 4, lr * 3])


def test_the_optimizers_own_rate_is_the_reference_wherever_its_group_stands():
    _, optimizer, _ = start([{"lr": 0.05}, {}], regime=Regime(lr=0.8, epochs=8))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.8])


def test_the_first_group_is_the_reference_when_none_has_the_optimizers_rate():
    _, optimizer, _ = start([{"lr": 0.1}, {"lr": 0.05}], regime=Regime(lr=0.8, epochs=8))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.8, 0.4])


def test_groups_without_weight_decay_stay_without():
    history = advance(*start([{}, {"weight_decay": 0}]), UPDATES)
    assert {groups[1][1] for groups in history} == {0}
    assert {groups[0][1] for groups in history} == {0.1, 0.0, 0.3}


@pytest.mark.parametrize("stop", [0, 1, 18, 19, 30, 31, 37, 44, 49])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_run_resumed_in_the_middle_continues_identically(stop, optimizer_first):
    groups = [{}, {"lr": 0.05}, {"weight_decay": 0}]
    whole = advance(*start(groups), UPDATES)
    weights, optimizer, scheduler = start(groups)
    advance(weights, optimizer, scheduler, stop)
    saved = saved_and_loaded([weights, optimizer.state_dict(), scheduler.state_dict()])

    weights, optimizer, scheduler = start(groups)
    with torch.no_grad():
        for w, old in zip(weights, saved[0], strict=True):
            w.copy_(old)
    parts = [(optimizer, saved[1]), (scheduler, saved[2])]
    for part, state in parts if optimizer_first else parts[::-1]:
        part.load_state_dict(state)
    assert scheduler.get_last_lr() == [group[0] for group in whole[stop]]
    assert advance(weights, optimizer, scheduler, UPDATES - stop) == whole[stop:]


def test_a_scheduler_built_on_a_restored_optimizer_still_knows_which_groups_decay():
    weights, optimizer, scheduler = start()
    advance(weights, optimizer, scheduler, 35)  # weight decay is 0 here and comes back at 44
    state = scheduler.state_dict()
    restored = RegimeScheduler(optimizer, REGIME, **SIZES)
    restored.load_state_dict(state)
    history = advance(weights, optimizer, restored, UPDATES - 35)
    assert [groups[0][1] for groups in history] == [0.0] * 9 + [0.3] * 6


def test_weight_decay_comes_back_after_a_phase_without_when_resumed_as_pytorch_does():
    weights, optimizer, scheduler = start()
    advance(weights, optimizer, scheduler, 35)
    weights, second = sgd()
    second.load_state_dict(optimizer.state_dict())
    resumed = RegimeScheduler(second, REGIME, **SIZES, last_epoch=34)  # counted from 0
    history = advance(weights, second, resumed, UPDATES - 35)
    assert [groups[0][1] for groups in history] == [0.0] * 9 + [0.3] * 6


def test_a_group_that_joins_later_keeps_its_ratio():
    weights, optimizer, scheduler = start()
    advance(weights, optimizer, scheduler, 10)
    weights.append(nn.Parameter(torch.tensor(1.0)))
    optimizer.add_param_group({"params": weights[1], "lr": 0.1})
    advance(weights, optimizer, scheduler, 30)
    assert scheduler.get_last_lr() == pytest.approx([0.02, 0.01])


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"samples_per_epoch": 0}], ids=str)
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(InputError, match=f"^{next(iter(sizes))}: "):
        RegimeScheduler(sgd()[1], REGIME, **{**SIZES, **sizes})


def adamw(regime, **options):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(()))], lr=0.2, **options)
    return optimizer, RegimeScheduler(optimizer, regime, **SIZES)


GIVEN_NOTHING = Regime(lr=0.2, epochs=8, drops=((3, 0.1), (5, 0.02, 0.3), (7, 0.01)))


@pytest.mark.parametrize(
    "change",
    [
        lambda regime: regime,
        lambda regime: regime.scaled(2),
        lambda regime: regime.stretched(1),
        lambda regime: replace(regime, warmup=1),
        lambda regime: pickle.loads(pickle.dumps(regime)),  # noqa: S301 (our own)
    ],
    ids=["as built", "scaled", "stretched", "replaced", "pickled"],
)
def test_a_regime_without_weight_decay_leaves_the_optimizers_alone_until_a_drop_gives_one(change):
    optimizer, scheduler = adamw(change(GIVEN_NOTHING), weight_decay=0.05)
    decays = []
    for _ in range(UPDATES):
        decays.append(optimizer.param_groups[0]["weight_decay"])
        optimizer.step()
        scheduler.step()
    assert decays == [0.05] * 31 + [0.3] * 19


def test_a_regime_that_was_given_the_default_weight_decay_sets_it():
    with pytest.warns(UserWarning, match="weight_decay"):
        optimizer, _ = adamw(Regime(lr=0.2, epochs=8, weight_decay=1e-4), weight_decay=0.05)
    assert optimizer.param_groups[0]["weight_decay"] == 1e-4


def test_the_defaults_of_a_regime_are_plain_numbers():
    regime = Regime(lr=0.1, epochs=1)
    assert regime == Regime(lr=0.1, epochs=1, momentum=0.9, weight_decay=1e-4)
    assert regime.at(0).weight_decay == 1e-4
    assert type(regime.weight_decay) is type(regime.momentum) is float
    assert json.dumps(asdict(regime)) == json.dumps(
        {
            **{"lr": 0.1, "epochs": 1, "drops": [], "momentum": 0.9, "weight_decay": 1e-4},
            **{"warmup": 0, "schedule": "drops", "power": 1.0},
        }
    )


@pytest.mark.parametrize(
    ("given", "own", "line"),
    [
        ({"weight_decay": 0.2}, {}, "weight_decay is 0.2, the optimizer has 0.1: the regime's is"),
        ({"weight_decay": 0.2}, {"weight_decay": 0}, "the optimizer has 0: the optimizer's is"),
        ({"momentum": 0.5}, {}, "momentum is 0.5, the optimizer has 0.9: the optimizer's is"),
    ],
    ids=["decay", "no decay", "momentum"],
)
def test_a_regime_that_differs_from_the_optimizer_says_so_once(given, own, line, recwarn):
    advance(*start(regime=Regime(lr=0.2, epochs=8, **given), **own), 3)
    (warning,) = recwarn
    assert line in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("given", "own"),
    [({}, {"momentum": 0.5, "weight_decay": 0.3}), ({"momentum": 0.9, "weight_decay": 0.1}, {})],
    ids=["given nothing", "agrees"],
)
def test_a_regime_that_was_given_nothing_or_agrees_says_nothing(given, own, recwarn):
    start([{}, {"weight_decay": 0}], regime=Regime(lr=0.2, epochs=8, **given), **own)
    assert not list(recwarn)


def test_momentum_is_not_compared_with_an_optimizer_that_has_none(recwarn):
    adamw(Regime(lr=0.2, epochs=8, momentum=0.5))
    assert not list(recwarn)


def test_a_rate_that_lies_in_a_tensor_stays_in_it_when_a_state_is_loaded():
    """A captured CUDA graph reads this very tensor."""
    first, (_, optimizer, resumed) = start(), start(lr=(rate := torch.tensor(0.2)))
    advance(*first, 31)
    resumed.load_state_dict(first[2].state_dict())
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.02)
