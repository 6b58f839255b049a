"""Models of torchvision and timm: all norms are converted, train as in a loop, and go back."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from ghost_loop import looped
from model_parts import attributes, norms, structure
from torch import nn
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.nn.convert import PLAIN_OF
from ghostbatch.nn.norm import GhostBatchNorm


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


NORM_ACT = [  # models whose norms are timm's BatchNormAct2d
    *("test_efficientnet", "regnetx_002", "mobilenetv3_small_050", "densenet121", "repvgg_a0"),
]


@pytest.mark.parametrize("name", NORM_ACT)
def test_a_timm_model_with_norms_and_activations_trains_as_with_a_loop(timm, name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7)
    kinds = [type(m).__name__ for m in norms(model)]
    assert "BatchNormAct2d" in kinds
    check_against_the_loop(model, torch.randn(10, 3, 32, 32, dtype=torch.float64))
    assert [type(m).__name__ for m in norms(model)] == [f"Ghost{kind}" for kind in kinds]


@pytest.mark.parametrize("name", [*NORM_ACT, "inception_v3", "efficientnet_b0"])
def test_a_timm_model_converts_in_all_its_norms_and_back(timm, name):
    model = timm.create_model(name)
    before, everything = structure(model), attributes(model)
    gb.to_ghost(model, 32)
    assert structure(model) == before
    assert all(isinstance(m, GhostBatchNorm) and m.ghost == 32 for m in norms(model))
    gb.to_plain(model)
    assert attributes(model) == everything


def norm_act(timm, **options):
    """Return a layer with a drop and an activation that both work in place."""
    torch.manual_seed(0)
    drop = lambda: nn.Hardtanh(-1, 1, inplace=True)  # noqa: E731 (what timm calls a drop_layer)
    layer = timm.layers.BatchNormAct2d(
        3, act_layer=nn.SiLU, inplace=True, drop_layer=drop, **options
    )
    return layer.double()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"apply_act": False},
    ],
    ids=str,
)
def test_timms_norm_with_one_ghost_is_what_it_was(timm, options):
    """Outputs, gradients and running statistics, in training and then in evaluation."""
    x, results = torch.randn(6, 3, 4, 4, dtype=torch.float64), []
    for convert_it in (False, True):
        layer = norm_act(timm, **options)
        layer = gb.to_ghost(layer, 6) if convert_it else layer
        mine = x.clone().requires_grad_()
        y = layer(mine)
        y.square().sum().backward()
        grads = [p.grad for p in (mine, *layer.parameters())]
        results.append([y, *grads, *layer.buffers(), layer.eval()(x)])
    assert_close(results[0], results[1])


def test_timms_converted_norm_is_still_timms_and_can_be_copied_and_pickled(timm):
    layer, x = gb.to_ghost(norm_act(timm), 2), torch.randn(6, 3, 4, 4, dtype=torch.float64)
    assert isinstance(layer, timm.layers.BatchNormAct2d)
    with torch.no_grad():
        expected = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
            assert twin(x).equal(expected)


def test_timms_synchronised_norm_is_refused_and_its_frozen_one_left_alone(timm):
    layers = timm.layers
    with pytest.raises(ValueError, match=r"^model: 1 is a SyncBatchNormAct, which"):
        gb.to_ghost(nn.Sequential(nn.BatchNorm1d(3), layers.SyncBatchNormAct(3)), 4)
    frozen = layers.FrozenBatchNormAct2d(3)
    gb.to_ghost(nn.Sequential(nn.BatchNorm1d(3), frozen), 4)
    assert type(frozen) is layers.FrozenBatchNormAct2d


def test_a_subclass_of_timms_norm_is_left_alone_and_named(timm):
    class Mine(timm.layers.BatchNormAct2d):
        pass

    with pytest.warns(UserWarning, match=r"subclasses of BatchNorm alone; .*: model \(Mine\)$"):
        gb.to_ghost(Mine(3), 4)


def test_converting_other_models_does_not_import_timm():
    code = """if True:
        import sys, torch, ghostbatch as gb
        gb.to_plain(gb.to_ghost(torch.nn.BatchNorm2d(3), 4))
        assert "timm" not in sys.modules and "torchvision" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("whose", ["torch", "timm"])
def test_converting_ghost_layers_to_sync_batch_norm_warns_that_their_ghosts_are_lost(timm, whose):
    convert = {
        "torch": nn.SyncBatchNorm.convert_sync_batchnorm,
        "timm": timm.layers.convert_sync_batchnorm,
    }[whose]
    model = nn.Sequential(nn.BatchNorm2d(3), timm.layers.BatchNormAct2d(3))
    convert(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="^convert_sync_batchnorm drops the ghosts"):
        convert(gb.to_ghost(model, 4))


def test_quantisation_may_ask_ghost_layers_for_their_qconfig_and_set_it():
    layer = gb.GhostBatchNorm2d(3)
    assert not hasattr(layer, "qconfig")
    layer.qconfig = "set"
    assert copy.deepcopy(layer).qconfig == "set"
    del layer.qconfig
    assert not hasattr(layer, "qconfig")
