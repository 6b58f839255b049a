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


@pytest.mark.parametrize("augment", [False, True], ids=["as they are", "augmented"])
@pytest.mark.parametrize("patch", [1, 3, 5])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7), (3, 20, 16)], ids=str)
def test_batches_are_those_of_tensor_code(shape, patch, augment, monkeypatch):
    batches = []
    for kernels in ("interpret", "0"):
        monkeypatch.setenv("GHOSTBATCH_KERNELS", kernels)
        feed = TensorFeed(
            data(*shape),
            batch=8,
            seed=0,
            augment=augment,
            device=torch.device("cpu"),
            dtype=torch.float32,
            patch=patch,
        )
        batches.append(list(feed.micro_batches(1, [slice(0, 4), slice(4, 8)])))
    for fast, slow in zip(*batches, strict=True):
        assert fast.positions == slow.positions
        assert_close(fast.images, slow.images, rtol=0, atol=0, check_stride=False)
        assert torch.equal(fast.labels, slow.labels)
        assert fast.images.is_contiguous(memory_format=torch.channels_last)


def test_images_in_bf16_are_rounded_once(monkeypatch):
    made = {}
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setenv("GHOSTBATCH_KERNELS", "0")
        where = {"device": torch.device("cpu"), "dtype": dtype}
        feed = TensorFeed(data(3, 8, 8), batch=8, seed=0, augment=True, **where)
        (made[dtype],) = feed.micro_batches(0, [slice(0, 8)])
    assert torch.equal(made[torch.bfloat16].images, made[torch.float32].images.bfloat16())
