"""The paper's networks: their sizes, their layers, and their fused form against the plain one."""

import copy
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from ghost_loop import looped
from torch import nn
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.errors import InputError
from ghostbatch.nn import MODELS, find_model
from ghostbatch.nn.pool import MaxPool2d, MeanPool2d

WIDTHS = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
VGG = sum(9 * a * b for a, b in pairwise(WIDTHS)) + 2 * sum(WIDTHS[1:])  # the paper does not say
VGG += 512 * 512 + 2 * 512 + 512 * 10 + 10
PARAMETERS = {
    "f1": 1_462_794,
    "c1": 1_388_490,
    "c3": 1_405_860,
    "vgg": VGG,
    "resnet44": 661_338,
    "wresnet16-4": 2_800_804,
    "alexnet": 61_110_184,
}
PAPER = list(PARAMETERS)
SMALLEST = {"f1": 1, "c1": 7, "c3": 7, "vgg": 32, "resnet44": 1, "wresnet16-4": 1, "alexnet": 63}
RESIDUAL = ("resnet44", "wresnet16-4")
NORMS = nn.BatchNorm1d | nn.BatchNorm2d


def on_meta(name, **options):
    with torch.device("meta"):
        return MODELS[name](**options)


def norms(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, NORMS)}


# ------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", PAPER)
def test_a_network_has_the_stated_number_of_parameters(name):
    assert sum(p.numel() for p in on_meta(name).parameters()) == PARAMETERS[name]
    assert f"({PARAMETERS[name]:,} parameters)" in MODELS[name].__doc__


@pytest.mark.parametrize("name", PAPER)
def test_a_network_takes_other_images_and_numbers_of_classes(name):
    for size in (SMALLEST[name], 2 * SMALLEST[name] + 1):
        model = on_meta(name, num_classes=7, in_channels=2, image_size=size)
        assert model(torch.zeros(4, 2, size, size, device="meta")).shape == (4, 7)


@pytest.mark.parametrize("name", [name for name, size in SMALLEST.items() if size > 1])
def test_images_that_a_network_would_shrink_to_nothing_are_refused(name):
    with pytest.raises(InputError, match=rf"^image_size: .* use images of {SMALLEST[name]} pix"):
        MODELS[name](image_size=SMALLEST[name] - 1)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("c1", [15, 7]), ("alexnet", [27, 13, 13, 13, 6])],
)
def test_images_shrink_as_the_paper_says(name, sizes):
    model, seen = on_meta(name), []
    for layer in norms(model).values():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(lambda _, __, y: seen.append(y.shape[-1]))
    size = 224 if name == "alexnet" else 32
    model(torch.zeros(2, 3, size, size, device="meta"))
    assert seen == sizes


# ------------------------------------------------------------------------------------------ layers


def order(model):
    """Kinds of layers in the order in which plain norms and what is around them run."""
    kinds = {
        nn.Conv2d: "conv",
        nn.Linear: "linear",
        MaxPool2d: "pool",
        nn.BatchNorm2d: "norm",
        nn.BatchNorm1d: "norm",
        nn.Dropout: "drop",
        MeanPool2d: "mean",
    }
    ran = []
    handles = [
        layer.register_forward_hook(lambda layer, _, __: ran.append(kinds[type(layer)]))
        for layer in model.modules()
        if type(layer) in kinds
    ]
    relu, ran_relu = F.relu, lambda x, inplace=False: (ran.append("relu"), relu(x, inplace))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", ran_relu)
        first = next(p for p in model.parameters() if p.dim() > 1)
        shape = (1, 28, 28) if first.dim() == 2 else (3, 224, 224)
        if first.shape[-1] in (3, 5):
            shape = (3, 32, 32)
        model(torch.zeros(2, *shape, device="meta"))
    for handle in handles:
        handle.remove()
    return " ".join(ran)


def test_the_layers_run_in_the_papers_order():
    dense, head = "linear norm relu drop ", "linear"
    assert order(on_meta("f1")) == "linear norm relu " * 5 + head
    assert order(on_meta("c1")) == "conv pool norm relu " * 2 + 2 * dense + head
    assert order(on_meta("c3")) == order(on_meta("c1"))
    convs = ["conv norm relu " * depth + "pool " for depth in (2, 2, 3, 3, 3)]
    assert order(on_meta("vgg")) == "".join(convs) + dense + head
    late = "conv pool relu norm conv relu norm conv relu norm conv pool relu norm "
    assert order(on_meta("alexnet")) == "conv pool norm relu " + late + 2 * dense + head
    for name, depth in (("resnet44", 7), ("wresnet16-4", 2)):
        plain = "conv norm relu conv norm relu "
        # The shortcut's convolution runs between the two, and joins before the last ReLU.
        halving = "conv norm relu conv norm conv norm relu "
        stages = plain * depth + 2 * (halving + plain * (depth - 1))
        assert order(on_meta(name)) == "conv norm relu " + stages + "mean " + head


@pytest.mark.parametrize("name", PAPER)
def test_only_the_last_layer_has_a_bias_except_in_f1(name):
    model = on_meta(name)
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert all((layer.bias is not None) == (name == "f1") for layer in weighted[:-1])
    assert weighted[-1] is model.classifier
    assert weighted[-1].bias is not None


@pytest.mark.parametrize("name", PAPER)
def test_dropout_is_the_plain_layer_at_a_half(name):
    drops = [m for m in on_meta(name).modules() if "drop" in type(m).__name__.lower()]
    assert [(type(m), m.p) for m in drops] == [(nn.Dropout, 0.5)] * len(drops)
    assert len(drops) == {"c1": 2, "c3": 2, "alexnet": 2, "vgg": 1}.get(name, 0)


def test_names_in_a_checkpoint_say_what_they_are():
    names = {re.sub(r"\d+", "N", key) for key in on_meta("resnet44").state_dict()}
    layers = {key.rpartition(".")[0] for key in names}
    block = {f"stageN.N.{part}" for part in ("first.conv", "first.norm", "second.conv")}
    block |= {f"stageN.N.{part}" for part in ("second.norm", "shortcut.conv", "shortcut.norm")}
    assert layers == {"stem.conv", "stem.norm", "classifier"} | block
    assert "hidden1.linear.weight" in on_meta("f1").state_dict()


@pytest.mark.parametrize("name", ["c1", *RESIDUAL])
def test_convolutions_start_as_he_for_residual_networks_and_as_pytorch_elsewhere(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 4000:
            w, area = layer.weight.detach(), layer.kernel_size[0] ** 2
            he, pytorch = (
                (2 / (layer.out_channels * area)) ** 0.5,
                (layer.in_channels * area) ** -0.5,
            )
            if name in RESIDUAL:
                assert w.std().item() == pytest.approx(he, rel=0.05)
                assert w.abs().max() > 3 * he  # normal, not uniform
            else:
                assert w.abs().max().item() == pytest.approx(pytorch, rel=0.01)


# ------------------------------------------------------------------------------------ fused norms


FORMS = [("f1", 6), ("c1", 9), ("wresnet16-4", 8)]


def small(name, size):
    torch.manual_seed(0)
    channels = 1 if name == "f1" else 3
    model = MODELS[name](5, in_channels=channels, image_size=size).double()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model, torch.randn(10, channels, size, size, dtype=torch.float64)


@pytest.mark.parametrize(("name", "size"), FORMS)
def test_the_fused_form_trains_and_evaluates_as_its_unfused_twin(name, size):
    model, x = small(name, size)
    twin, found = looped(copy.deepcopy(model), 4), []
    for each in (gb.to_ghost(model, 4), twin):
        y = each(x)
        y.square().sum().backward()
        tensors = [y.detach(), *(p.grad for p in each.parameters()), *each.buffers()]
        found.append([*tensors, each.eval()(x).detach()])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("ghost", [None, 4])
@pytest.mark.parametrize(("name", "size"), [*FORMS, ("vgg", 32)])
def test_hooks_of_every_norm_fire_once_a_forward(name, size, ghost):
    model, x = small(name, size)
    if ghost is not None:
        gb.to_ghost(model, ghost)
    fired = []
    for label, layer in norms(model).items():
        layer.register_forward_pre_hook(
            lambda _, args, label=label: fired.append((label, len(args)))
        )
        layer.register_forward_hook(lambda *_, label=label: fired.append((label, 1)))
    for training in (True, False):
        fired.clear()
        model.train(training)(x)
        assert sorted(fired) == sorted([(label, 1) for label in norms(model)] * 2)


def test_a_ghost_layer_adds_and_activates_as_the_function_behind_it():
    layer = gb.GhostBatchNorm2d(3, 4)
    x, shortcut = torch.randn(2, 10, 3, 2, 2)
    y = layer(x, residual=shortcut, activation="relu")
    assert_close(y, F.relu(gb.ghost_batch_norm(x, ghost=4) + shortcut))
    assert_close(layer.eval()(x, shortcut, "relu"), F.relu(layer(x) + shortcut))
    with pytest.raises(ValueError, match="residual should be of size"):
        layer(x, residual=shortcut[:5])


@pytest.mark.parametrize("ghost", [None, 4])
def test_a_compiled_residual_network_trains_as_an_eager_one_in_one_graph(ghost):
    torch._dynamo.reset()
    model = nn.Sequential(*small("wresnet16-4", 8)[0].children())[:4]
    if ghost is not None:
        gb.to_ghost(model, ghost)
    twin, x = copy.deepcopy(model), torch.randn(10, 3, 8, 8, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for call in (compiled, twin):
        call(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_torch_fx_traces_a_network_with_ghosts():
    model, x = small("wresnet16-4", 8)
    gb.to_ghost(model, 4)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert traced(x).equal(model(x))


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "hint"), [("f2", "choose one of f1"), ("resnet4", "did you mean resnet44")]
)
def test_an_unknown_network_is_refused_with_a_suggestion(name, hint):
    with pytest.raises(InputError, match=rf"^model: '{name}' is unknown; .*{hint}") as raised:
        find_model(name)
    assert raised.value.field == "model"
    assert all(known in str(raised.value) for known in (*PAPER, "torchvision:NAME", "timm:NAME"))
