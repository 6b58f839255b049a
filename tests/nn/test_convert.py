"""Conversion: only the arithmetic of a model changes, and it changes back."""

import copy
import warnings

import pytest
import torch
from ghost_loop import Loop, looped
from model_parts import attributes, norms, structure
from torch import nn
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.nn import convert
from ghostbatch.nn.convert import GHOST_OF, PLAIN_OF


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4, momentum=None)),
        nn.Unflatten(1, (4, 1, 1, 1)),
        nn.Conv3d(4, 2, 1),
    )


def images(samples=10, seed=0):
    return torch.randn(samples, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------- nothing else changes


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_there_and_back_is_the_identity_on_every_name_object_and_attribute(device, dtype):
    model = network().to(device=device, dtype=dtype)
    model[1].eval()
    model[1].weight.requires_grad_(False)
    model[3][2].register_parameter("bias", None)
    before, everything = structure(model), attributes(model)
    assert gb.to_ghost(model, 4) is model
    assert structure(model) == before
    assert [type(m) for m in norms(model)] == [gb.GhostBatchNorm2d, gb.GhostBatchNorm1d]
    assert gb.to_plain(model) is model
    assert structure(model) == before
    assert attributes(model) == everything


def test_a_ghost_layer_without_bias_goes_to_plain_and_back_without_one():
    layer = nn.Sequential(gb.GhostBatchNorm2d(3, 4, bias=False))
    for change, kind in ((gb.to_plain, nn.BatchNorm2d), (gb.to_ghost, gb.GhostBatchNorm2d)):
        assert type(change(layer)[0]) is kind
        assert layer[0].bias is None
        layer(torch.ones(4, 3, 2, 2)).sum().backward()


def test_an_optimizer_built_before_a_conversion_keeps_training_the_model():
    results = []
    for make in (gb.to_ghost, looped):
        model = network().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            if step == 2:
                make(model, 4)
            optimizer.zero_grad()
            model(images(seed=step).double()).square().mean().backward()
            optimizer.step()
        assert len(optimizer.state) == len(list(model.parameters()))
        results.append([*model.parameters(), *model.buffers()])
    assert_close(results[0], results[1])
    assert results[0][2].min() < 0.999  # a weight of a norm, which began as ones


def test_hooks_stay_and_run():
    layer, calls = nn.BatchNorm1d(3), []
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: calls.append("state"))
    gb.to_ghost(layer, 4)
    layer(torch.randn(8, 3, requires_grad=True)).sum().backward()
    layer.state_dict()
    assert calls == ["pre", "forward", "backward", "state"]


# ------------------------------------------------------------------------------ what is converted


@pytest.mark.parametrize(("plain", "ghost"), GHOST_OF.items(), ids=lambda kind: kind.__name__)
def test_a_bare_batch_norm_is_converted(plain, ghost):
    layer = plain() if "Lazy" in plain.__name__ else plain(3)
    assert gb.to_ghost(layer, 4) is layer
    assert type(layer) is ghost
    assert gb.to_plain(layer) is layer
    assert type(layer) is plain


def test_converting_again_changes_the_ghost_size_and_nothing_else():
    model = gb.to_ghost(network(), 4, running="mean")
    before = attributes(model)
    gb.to_ghost(model, 5)
    assert [(m.ghost, m.running) for m in norms(model)] == [(5, "mean")] * 2
    gb.to_ghost(model, 4)
    assert attributes(model) == before
    gb.to_ghost(model, 4, running="sequential")
    assert [m.running for m in norms(model)] == ["sequential"] * 2


@pytest.mark.parametrize("options", [{"ghost": 0}, {"ghost": True}, {"running": "both"}], ids=str)
def test_bad_options_are_refused_by_name_and_nothing_is_converted(options):
    model = network()
    before = attributes(model)
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: "):
        gb.to_ghost(model, **options)
    assert attributes(model) == before


def test_a_shared_layer_is_converted_once_and_stays_shared():
    layer = nn.BatchNorm1d(3)
    model = gb.to_ghost(nn.Sequential(layer, nn.ReLU(), layer), 4)
    assert model[0] is model[2] is layer
    model(torch.randn(8, 3))
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_lazy_layer_becomes_a_ghost_layer_that_counts_its_first_ghosts(dim):
    lazy, ghostly = getattr(nn, f"LazyBatchNorm{dim}d"), getattr(gb, f"GhostBatchNorm{dim}d")
    x = torch.randn(10, 3, *(2,) * dim, generator=torch.Generator().manual_seed(0))
    layer, twin = gb.to_ghost(lazy(), 4), Loop(getattr(nn, f"BatchNorm{dim}d")(3), 4)
    assert_close(layer(x), twin(x))
    assert type(layer) is ghostly
    assert layer.num_batches_tracked == 3
    assert_close(layer.state_dict(), twin.norm.state_dict())
    assert type(gb.to_plain(layer)) is getattr(nn, f"BatchNorm{dim}d")


def test_sync_batch_norm_is_refused_by_name_and_nothing_is_converted():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(ValueError, match=r"^model: 1\.0 is a SyncBatchNorm"):
        gb.to_ghost(model, 4)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        gb.to_ghost(nn.SyncBatchNorm(3), 4)


class Doubled(nn.BatchNorm1d):
    """A subclass that adds behaviour."""

    def forward(self, input):  # noqa: A002 (PyTorch's name)
        return 2 * super().forward(input)


def test_layers_whose_class_pytorch_has_made_are_left_alone_with_the_reason():
    model = nn.Sequential(nn.BatchNorm1d(3))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    line = r"^to_ghost left .* made by fully_shard or parametrize; convert .*: 0 \(Parametrized"
    with pytest.warns(UserWarning, match=line):
        gb.to_ghost(model, 4)


def test_subclasses_are_left_alone_with_one_warning_that_lists_them():
    model = nn.Sequential(nn.BatchNorm1d(3), Doubled(3), nn.ModuleDict({"inner": Doubled(3)}))
    kinds = [type(m) for m in model.modules()]
    with pytest.warns(UserWarning, match="left these subclasses") as warned:
        gb.to_ghost(model, 4)
    assert len(warned) == 1
    assert str(warned[0].message).endswith("1 (Doubled), 2.inner (Doubled)")
    assert warned[0].filename == __file__
    assert [type(m) for m in model.modules()] == [
        gb.GhostBatchNorm1d if kind is nn.BatchNorm1d else kind for kind in kinds
    ]


def test_other_norms_are_not_touched():
    model = nn.Sequential(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        nn.LazyInstanceNorm2d(),
        nn.GroupNorm(1, 3),
        nn.LayerNorm(3),
    )
    before = attributes(model)
    with pytest.warns(UserWarning, match=r"^to_ghost found no batch norm in this model$") as warned:
        gb.to_ghost(model, 4)
    assert (len(warned), warned[0].filename) == (1, __file__)
    assert attributes(model) == before


def test_layers_whose_forward_was_replaced_are_left_alone_and_named():
    """As Accelerate's hooks replace it: the old forward would stay when the class changes."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].forward = model[1].forward
    with pytest.warns(UserWarning, match=r"left these layers alone, .* before that: 1 \(Batch"):
        gb.to_ghost(model, 4)
    assert [type(m) for m in model] == [gb.GhostBatchNorm1d, nn.BatchNorm1d]
    model(torch.randn(8, 3))
    assert [int(m.num_batches_tracked) for m in model] == [2, 1]


def test_ghost_layers_whose_forward_was_replaced_stay_ghost_layers():
    model = gb.to_ghost(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), 4)
    model[1].forward = model[1].forward
    gb.to_ghost(model, 2)  # a ghost size can still be changed
    with pytest.warns(UserWarning, match=r"^to_plain left these layers alone, .*: 1 \(GhostBatch"):
        gb.to_plain(model)
    assert [type(m) for m in model] == [nn.BatchNorm1d, gb.GhostBatchNorm1d]
    model(torch.randn(8, 3))
    assert [int(m.num_batches_tracked) for m in model] == [1, 4]


def test_ghost_layers_of_an_unknown_subclass_stay_ghost_layers_and_are_named():
    class Own(gb.GhostBatchNorm1d):
        pass

    model = nn.Sequential(gb.GhostBatchNorm1d(3), Own(3))
    with pytest.warns(
        UserWarning, match=r"^to_plain left these subclasses .*: 1 \(Own\)$"
    ) as warned:
        gb.to_plain(model)
    assert [type(m) for m in model] == [nn.BatchNorm1d, Own]
    assert warned[0].filename == __file__


@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_layers_are_left_alone_and_named(how):
    inner = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    with warnings.catch_warnings(action="ignore"):  # newer releases of PyTorch deprecate both
        scripted = (
            torch.jit.script(inner)
            if how == "script"
            else torch.jit.trace(inner, torch.randn(4, 3), check_trace=False)
        )
    model = nn.Sequential(nn.BatchNorm1d(3), scripted)
    with pytest.warns(UserWarning, match=r"left these scripted layers alone; .*: 1\.0 \(BatchNorm"):
        gb.to_ghost(model, 4)
    assert type(model[0]) is gb.GhostBatchNorm1d


# ------------------------------------------------------------------------ conversion of subclasses


class GhostDoubled(Doubled, gb.GhostBatchNorm1d):
    """`Doubled` over ghosts: its own forward, around that of the ghost layer."""


@pytest.fixture
def registered(monkeypatch):
    """Register `GhostDoubled` for one test."""
    for table in (GHOST_OF, PLAIN_OF):
        monkeypatch.setattr(convert, "GHOST_OF" if table is GHOST_OF else "PLAIN_OF", dict(table))
    gb.register_conversion(Doubled, GhostDoubled)


@pytest.mark.usefixtures("registered")
def test_a_registered_subclass_is_converted_and_keeps_its_behaviour():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Doubled(3), Doubled(3))
    before, everything = structure(model), attributes(model)
    oracle = looped(copy.deepcopy(model), 4)
    gb.to_ghost(model, 4)
    assert structure(model) == before
    x = torch.randn(10, 3)
    assert_close(model(x), oracle(x))
    assert type(model[1]) is GhostDoubled
    gb.to_plain(model)
    assert attributes(model) == everything


@pytest.mark.usefixtures("registered")
def test_registration_is_of_one_class_and_not_of_its_subclasses():
    class Tripled(Doubled):
        pass

    with pytest.warns(UserWarning, match=r"register_conversion .*: 1 \(Tripled\)$"):
        gb.to_ghost(nn.Sequential(Doubled(3), Tripled(3)), 4)


@pytest.mark.parametrize(
    ("plain", "ghost", "field"),
    [
        (nn.Linear, gb.GhostBatchNorm1d, "plain_class"),
        (gb.GhostBatchNorm1d, gb.GhostBatchNorm1d, "plain_class"),
        (Doubled, Doubled, "ghost_class"),
        (Doubled, gb.GhostBatchNorm1d, "ghost_class"),  # to_plain could not tell which it was
    ],
    ids=str,
)
def test_registrations_that_could_not_work_are_refused(plain, ghost, field):
    with pytest.raises(gb.InputError, match=f"^{field}: "):
        gb.register_conversion(plain, ghost)
    assert Doubled not in GHOST_OF
