"""The kernel that makes batches, in Triton's interpreter, against indexing and padding."""

import pytest
import torch
from torch.testing import assert_close

from ghostbatch.data import TensorFeed
from ghostbatch.data.augment import PadCropFlip
from ghostbatch.data.datasets import ImageData, Split

pytestmark = pytest.mark.usefixtures("interpreted")


def data(channels: int, height: int, width: int) -> ImageData:
    draw = torch.Generator().manual_seed(2)
    images = torch.randint(256, (12, channels, height, width), generator=draw, dtype=torch.uint8)
    split = Split(images, torch.arange(12) % 3)
    return ImageData("drawn", 3, split, split, PadCropFlip(pad=2, fill=127))


def micro_batches(shape, *, dtype=torch.float32, augment=True, patch=1):
    """Two micro-batches of 4 of the second batch."""
    options = {"dtype": dtype, "augment": augment, "patch": patch, "device": torch.device("cpu")}
    feed = TensorFeed(data(*shape), batch=8, seed=0, **options)
    return list(feed.micro_batches(1, [slice(0, 4), slice(4, 8)]))


@pytest.mark.parametrize("augment", [False, True], ids=["as they are", "augmented"])
@pytest.mark.parametrize("patch", [1, 3, 5])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7), (3, 20, 16)], ids=str)
def test_batches_are_those_of_tensor_code(shape, patch, augment, monkeypatch):
    batches = []
    for kernels in ("interpret", "0"):
        monkeypatch.setenv("GHOSTBATCH_KERNELS", kernels)
        batches.append(micro_batches(shape, augment=augment, patch=patch))
    for fast, slow in zip(*batches, strict=True):
        assert fast.positions == slow.positions
        assert_close(fast.images, slow.images, rtol=0, atol=0, check_stride=False)
        assert torch.equal(fast.labels, slow.labels)
        assert fast.images.is_contiguous(memory_format=torch.channels_last)


def test_images_in_bf16_are_rounded_once(monkeypatch):
    monkeypatch.setenv("GHOSTBATCH_KERNELS", "0")
    kinds = torch.bfloat16, torch.float32
    narrow, wide = (micro_batches((3, 8, 8), dtype=dtype)[0].images for dtype in kinds)
    assert torch.equal(narrow, wide.bfloat16())
