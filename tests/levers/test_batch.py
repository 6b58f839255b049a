"""The kernel that makes batches, against the package's augmentation and normalisation."""

import pytest
import torch
from batch import BatchMaker
from fold import column_width, columns
from torch.testing import assert_close

from ghostbatch.data.augment import PadCropFlip


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("size", [(8, 8), (7, 5)], ids=str)
def test_a_batch_is_cropped_flipped_and_normalised_as_the_package_does(size, width):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (20, 3, *size), dtype=torch.uint8, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (20,), generator=generator)
    mean, deviation = torch.tensor([120.0, 110, 100]), torch.tensor([60.0, 50, 40])
    augmentation = PadCropFlip(pad=2, fill=7)
    maker = BatchMaker(images, labels, mean, deviation, augmentation, 6, width, torch.float32)
    draws = maker.draw(generator)
    maker.draws.copy_(draws)
    maker.make()
    chosen, rest = draws[:, 0].long(), draws[:, 1:].T.long()
    exact = augmentation(images, chosen, rest).float()
    exact = (exact - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1)
    assert_close(maker.x[:, :3], exact, check_stride=False)
    assert not maker.x[:, 3:].any()
    assert torch.equal(maker.y, labels[chosen])


@pytest.mark.parametrize("kernel", [3, 5])
def test_patches_are_those_of_the_batch(kernel):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (9, 3, 8, 8), dtype=torch.uint8, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    labels, mean, deviation = torch.arange(9), torch.full((3,), 120.0), torch.full((3,), 60.0)
    rest = (images, labels, mean, deviation, PadCropFlip(pad=2, fill=7), 5)
    plain = BatchMaker(*rest, 3, torch.float32)
    patches = BatchMaker(*rest, column_width(3, kernel), torch.float32, kernel)
    draws = plain.draw(generator)
    for maker in (plain, patches):
        maker.draws.copy_(draws)
        maker.make()
    assert_close(patches.x, columns(plain.x, kernel))
    assert torch.equal(patches.y, plain.y)
