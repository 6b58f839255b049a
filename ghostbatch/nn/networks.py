"""The paper's networks, with plain BatchNorm; `to_ghost` converts them.

Weights are initialised as PyTorch's layers do, except the convolutions of the residual networks,
which are initialised as He et al. do (normal, fan-out).
"""

from itertools import pairwise

from torch import nn

from ghostbatch.errors import InputError, check_choice
from ghostbatch.nn.dropconnect import LAYERS
from ghostbatch.nn.external import FAMILIES, Builder
from ghostbatch.nn.parts import BasicBlock, ConvNormReLU, LinearNormReLU, chain, conv, shrunk
from ghostbatch.nn.pool import MaxPool2d, MeanPool2d


def f1(num_classes: int = 10, *, in_channels: int = 1, image_size: int = 28) -> nn.Module:
    """F1: five hidden layers of 512, each Linear, BatchNorm, ReLU (1,462,794 parameters)."""
    width, depth = 512, 5
    sizes = [in_channels * image_size**2] + [width] * depth
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), 1):
        layers[f"hidden{number}"] = LinearNormReLU(fan_in, fan_out, bias=True)
    layers["classifier"] = nn.Linear(width, num_classes)
    return chain(**layers)


def c1(num_classes: int = 10, *, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """C1: two 5x5 convolutions of 64, two hidden layers of 384 and 192 (1,388,490 parameters)."""
    _refuse_below(7, "c1", image_size)
    left = shrunk(shrunk(image_size))
    return chain(
        conv1=ConvNormReLU(in_channels, 64, 5, pool=True),
        conv2=ConvNormReLU(64, 64, 5, pool=True),
        flatten=nn.Flatten(),
        hidden1=LinearNormReLU(64 * left**2, 384),
        dropout1=nn.Dropout(0.5),
        hidden2=LinearNormReLU(384, 192),
        dropout2=nn.Dropout(0.5),
        classifier=nn.Linear(192, num_classes),
    )


def c3(num_classes: int = 100, *, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """C3: the network C1 for 100 classes (1,405,860 parameters)."""
    return c1(num_classes, in_channels=in_channels, image_size=image_size)


def vgg(num_classes: int = 10, *, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """VGG: VGG-16's convolutions and one hidden layer of 512, with norms (14,987,210 parameters).

    The paper does not say which layers have a bias; as in C1 and AlexNet, only the last one has.
    """
    _refuse_below(32, "vgg", image_size)
    layers: dict[str, nn.Module] = {}
    channels = in_channels
    for stage, (depth, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1):
        for number in range(1, depth + 1):
            layers[f"conv{stage}_{number}"] = ConvNormReLU(channels, width)
            channels = width
        layers[f"pool{stage}"] = MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["hidden"] = LinearNormReLU(512 * (image_size // 32) ** 2, 512)
    layers["dropout"] = nn.Dropout(0.5)
    layers["classifier"] = nn.Linear(512, num_classes)
    return chain(**layers)


def resnet44(num_classes: int = 10, *, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """ResNet44: three stages of seven basic blocks, 16, 32 and 64 wide (661,338 parameters)."""
    del image_size  # works for any
    return _residual(num_classes, in_channels, depth=7, widths=(16, 32, 64))


def wresnet16_4(num_classes: int = 100, *, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """WResNet16-4: three stages of two basic blocks, 64, 128 and 256 wide (2,800,804 parameters).

    This is the authors' network, with a stem of 64 and ReLU after each norm, not Zagoruyko's.
    """
    del image_size  # works for any
    return _residual(num_classes, in_channels, depth=2, widths=(64, 128, 256))


def alexnet(num_classes: int = 1000, *, in_channels: int = 3, image_size: int = 224) -> nn.Module:
    """AlexNet: five convolutions, two hidden layers of 4096, with norms (61,110,184 parameters).

    From the second convolution on, the norm comes after the ReLU.
    """
    _refuse_below(63, "alexnet", image_size)
    left = shrunk(shrunk(shrunk(shrunk(image_size, 11, 4, 2))))
    return chain(
        conv1=ConvNormReLU(in_channels, 64, 11, stride=4, padding=2, pool=True),
        conv2=_conv_relu_norm(64, 192, 5, pool=True),
        conv3=_conv_relu_norm(192, 384, 3),
        conv4=_conv_relu_norm(384, 256, 3),
        conv5=_conv_relu_norm(256, 256, 3, pool=True),
        flatten=nn.Flatten(),
        hidden1=LinearNormReLU(256 * left**2, 4096),
        dropout1=nn.Dropout(0.5),
        hidden2=LinearNormReLU(4096, 4096),
        dropout2=nn.Dropout(0.5),
        classifier=nn.Linear(4096, num_classes),
    )


MODELS: dict[str, Builder] = {
    build.__name__.replace("_", "-"): build
    for build in (f1, c1, c3, vgg, resnet44, wresnet16_4, alexnet)
}
"""The paper's networks: name to builder, ``MODELS["resnet44"](num_classes=10)``."""


def find_model(name: str) -> Builder:
    """Return the builder of a network by name.

    Networks from elsewhere are ``torchvision:NAME``, ``timm:NAME`` and ``python:MODULE:FUNCTION``.

    >>> find_model("f1") is f1
    True
    """
    family, colon, rest = name.partition(":")
    if colon and family in FAMILIES:
        return FAMILIES[family](rest)
    check_choice("model", name, MODELS, "torchvision:NAME, timm:NAME or python:MODULE:FUNCTION")
    return MODELS[name]


def initialise_glorot(model: nn.Module) -> None:
    """Draw the weights of linear and convolutional layers as Glorot and Bengio do; zero biases.

    A weight is uniform in plus or minus sqrt(6 / (fan-in + fan-out)).
    """
    for layer in model.modules():
        if isinstance(layer, LAYERS):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _residual(
    num_classes: int, in_channels: int, *, depth: int, widths: tuple[int, ...]
) -> nn.Module:
    """Stages of ``depth`` basic blocks; each stage but the first begins by halving the image."""
    layers: dict[str, nn.Module] = {"stem": ConvNormReLU(in_channels, widths[0])}
    channels = widths[0]
    for stage, width in enumerate(widths, 1):
        blocks = [BasicBlock(channels, width, stride=1 if stage == 1 else 2)]
        blocks += [BasicBlock(width, width) for _ in range(depth - 1)]
        layers[f"stage{stage}"] = nn.Sequential(*blocks)
        channels = width
    layers["pool"] = MeanPool2d()
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(channels, num_classes)
    network = chain(**layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


def _conv_relu_norm(fan_in: int, fan_out: int, kernel: int, *, pool: bool = False) -> nn.Module:
    layers: dict[str, nn.Module] = {"conv": conv(fan_in, fan_out, kernel)}
    if pool:
        layers["pool"] = MaxPool2d(3)
    return chain(**layers, relu=nn.ReLU(), norm=nn.BatchNorm2d(fan_out))


def _refuse_below(smallest: int, network: str, image_size: int) -> None:
    if image_size < smallest:
        raise InputError(
            "image_size",
            f"{image_size} is too small for {network}, which would shrink it to nothing",
            f"use images of {smallest} pixels or more, or another model",
        )
