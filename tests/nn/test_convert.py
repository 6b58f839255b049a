"""Conversion: only the arithmetic of a model changes, and it changes back."""

import copy

import pytest
import torch
from ghost_loop import Loop, looped
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

import ghostbatch as gb
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


def structure(model):
    """Everything that has a name, and which object or value it is."""
    return {
        "tensors": [(n, id(t)) for n, t in (*model.named_parameters(), *model.named_buffers())],
        "keys": list(model.state_dict()),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "values": [(t.device, t.dtype, t.requires_grad) for t in model.state_dict().values()],
        "training": [module.training for module in model.modules()],
        "options": [
            (m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats)
            for m in model.modules()
            if isinstance(m, _BatchNorm)
        ],
    }


def attributes(model):
    """Types and attributes of all layers, down to the objects they hold."""
    return [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]


def norms(model):
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


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
    for convert, kind in ((gb.to_plain, nn.BatchNorm2d), (gb.to_ghost, gb.GhostBatchNorm2d)):
        assert type(convert(layer)[0]) is kind
        assert layer[0].bias is None
        layer(torch.ones(4, 3, 2, 2)).sum().backward()


def test_there_and_back_gives_the_same_numbers():
    model, twin = network(), network()
    gb.to_plain(gb.to_ghost(model, 4))
    for seed in (0, 1):
        results = [m(images(seed=seed)) for m in (model, twin)]
        assert results[0].equal(results[1])
    assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


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


def test_checkpoints_load_into_the_converted_model_and_back():
    model, ghostly = network(), gb.to_ghost(network(), 4)
    for source, target in ((ghostly, model), (model, ghostly)):
        source.train()(images())
        target.load_state_dict(source.state_dict())
        assert target.eval()(images()).equal(source.eval()(images()))


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
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be"):
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


def test_a_lazy_layer_that_goes_there_and_back_is_lazy():
    layer = gb.to_plain(gb.to_ghost(nn.LazyBatchNorm2d(), 4))
    layer(torch.randn(10, 3, 2, 2))
    assert type(layer) is nn.BatchNorm2d
    assert layer.num_batches_tracked == 1


def test_sync_batch_norm_is_refused_by_name_and_nothing_is_converted():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(ValueError, match=r"^1\.0 is a SyncBatchNorm"):
        gb.to_ghost(model, 4)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        gb.to_ghost(nn.SyncBatchNorm(3), 4)


class Doubled(nn.BatchNorm1d):
    """A subclass that adds behaviour."""

    def forward(self, input):  # noqa: A002 (PyTorch's name)
        return 2 * super().forward(input)


def test_subclasses_are_left_alone_with_one_warning_that_lists_them():
    parametrized = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    model = nn.Sequential(nn.BatchNorm1d(3), Doubled(3), nn.ModuleDict({"inner": parametrized}))
    kinds = [type(m) for m in model.modules()]
    with pytest.warns(UserWarning, match="left these subclasses") as warned:
        gb.to_ghost(model, 4)
    assert len(warned) == 1
    assert str(warned[0].message).endswith("1 (Doubled), 2.inner (ParametrizedBatchNorm1d)")
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
    gb.to_ghost(model, 4)
    assert attributes(model) == before


# ---------------------------------------------------------------------------- other people's models


@pytest.mark.slow
def test_every_torchvision_classifier_converts_in_all_its_norms_and_back(torchvision, monkeypatch):
    models = torchvision.models
    params, converted = models.regnet.BlockParams, []
    original = params.from_init_params

    def on_cpu(*args, **kwargs):  # RegNet computes its widths with tensors, which meta cannot
        with torch.device("cpu"):
            return original(*args, **kwargs)

    monkeypatch.setattr(params, "from_init_params", on_cpu)
    for name in models.list_models(module=models):
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        with torch.device("meta"):
            model = models.get_model(name, weights=None, **options)
        before, everything, kinds = structure(model), attributes(model), norms(model)
        gb.to_ghost(model, 32)
        assert structure(model) == before, name
        assert all(type(m) in PLAIN_OF and m.ghost == 32 for m in kinds), name
        gb.to_plain(model)
        assert attributes(model) == everything, name
        converted += [name] if kinds else []
    assert len(converted) >= 55


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ in ("StochasticDepth",):
            module.eval()
    return model


def check_against_the_loop(model, x, ghost=4):
    """Three ghosts forward and backward in fp64, then evaluation."""
    model = without_dropout(model.double())
    plain, oracle = copy.deepcopy(model), looped(copy.deepcopy(model), ghost)
    results = []
    for each in (gb.to_ghost(model, ghost), oracle):
        y = each(x)
        y.square().sum().backward()
        grads = [p.grad for p in each.parameters()]
        results.append([y.detach(), *grads, *each.buffers()])
    for ours, theirs in zip(*results, strict=True):
        # Deep nets on tiny images divide by small deviations again and again: rounding grows.
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max() + 1e-9
    plain.load_state_dict(model.state_dict())
    assert model.eval()(x).equal(plain.eval()(x))


SMALL = {
    "resnet18": 32,
    "mobilenet_v2": 32,
    "shufflenet_v2_x0_5": 32,
    "vgg11_bn": 32,
    "densenet121": 64,
    "efficientnet_b0": 64,
}


@pytest.mark.parametrize("name", SMALL)
def test_a_torchvision_model_trains_as_with_a_loop_over_ghosts(torchvision, name):
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "vgg11_bn" else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=7, **options)
    if name == "vgg11_bn":  # 4096 hidden units are no subject of ours, and slow
        model.classifier = nn.Linear(512 * 49, 7)
    x = torch.randn(10, 3, SMALL[name], SMALL[name], dtype=torch.float64)
    check_against_the_loop(model, x)


@pytest.mark.parametrize("name", ["test_resnet", "resnet10t"])
def test_a_timm_model_with_batch_norms_trains_as_with_a_loop_over_ghosts(timm, name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7)
    check_against_the_loop(model, torch.randn(10, 3, 32, 32, dtype=torch.float64))


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "regnetx_002"])
def test_timms_norms_with_activations_are_left_alone_and_named(timm, name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7)
    before = attributes(model)
    with pytest.warns(UserWarning, match="left these subclasses") as warned:
        gb.to_ghost(model, 4)
    assert len(warned) == 1
    named = [n for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
    message = str(warned[0].message)
    assert all(f"{n} (BatchNormAct2d)" in message for n in named)
    assert message.count("BatchNormAct2d") == len(named) > 30
    assert attributes(model) == before
