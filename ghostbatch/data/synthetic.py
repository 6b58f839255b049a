"""Random images of any shape, for speed tests: noise plus one pattern per class."""

import re
from math import prod

import torch

from ghostbatch.data.augment import PadCropFlip
from ghostbatch.data.datasets import ImageData, Info, Split
from ghostbatch.draws import generator
from ghostbatch.errors import InputError

CLASSES = 10
SAMPLES = 4096
BLOCKS = 4
"""A pattern is this many blocks high and wide: coarse, so that it survives crops."""
CHUNK_BYTES = 2**24
"""Patterns are added to this many bytes at a time, so that the images are never held twice."""


def parse(shape: str) -> Info:
    """Return the sizes written as ``CHANNELSxHEIGHTxWIDTH[xCLASSES][:SAMPLES]``.

    >>> parse("3x32x32x100:5000")
    Info(samples=5000, test_samples=1250, classes=100, shape=(3, 32, 32), held_out=False)
    >>> parse("1x28x28").samples
    4096
    """
    read = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?(?::(\d+))?", shape, re.ASCII)
    numbers = [int(number) for number in read.groups() if number is not None] if read else [0]
    if read is None or not all(numbers):
        remedy = "write synthetic:3x32x32 or, with classes and samples, synthetic:3x32x32x100:5000"
        raise InputError("data", f"'synthetic:{shape}' is not a shape", remedy)
    channels, height, width, *_ = numbers
    if height != width:
        remedy = "give height and width the same number"
        raise InputError("data", f"'synthetic:{shape}' is not square", remedy)
    classes, samples = int(read[4] or CLASSES), int(read[5] or SAMPLES)
    return Info(samples, max(1, samples // 4), classes, (channels, height, width))


def synthetic(shape: str) -> ImageData:
    """Return random images, half noise and half class pattern, the same at every call."""
    info = parse(shape)
    pattern_shape = (info.classes, info.shape[0], BLOCKS, BLOCKS)
    draw = generator(0, "synthetic patterns")
    patterns = torch.randint(128, pattern_shape, dtype=torch.uint8, generator=draw)

    def split(part: str, count: int) -> Split:
        draw = generator(0, f"synthetic {part}")
        labels = torch.randint(info.classes, (count,), generator=draw)
        images = torch.randint(128, (count, *info.shape), dtype=torch.uint8, generator=draw)
        rows, columns = (torch.arange(size) * BLOCKS // size for size in info.shape[1:])
        step = max(1, CHUNK_BYTES // prod(info.shape))
        for chunk, classes in zip(images.split(step), labels.split(step), strict=True):
            chunk.add_(patterns[classes][:, :, rows[:, None], columns])
        return Split(images, labels)

    return ImageData(
        f"synthetic:{shape}",
        info.classes,
        split("train", info.samples),
        split("test", info.test_samples),
        PadCropFlip(pad=4, fill=127),
    )
