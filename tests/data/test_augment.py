"""Pad, crop and flip against a loop over the images."""

import numpy as np
import pytest
import torch

from ghostbatch.data.augment import PadCropFlip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def augmented(batch, pad, fill, draw):
    augment = PadCropFlip(pad, fill)
    return augment(batch, torch.arange(len(batch)), augment.draw(len(batch), draw))


def images(*shape):
    return torch.randint(256, shape, generator=seeded(9), dtype=torch.uint8)


def one_by_one(batch, pad, fill, draw):
    """The slow reference: the same draws, applied to one image at a time."""
    count, channels, height, width = batch.shape
    tops, lefts = torch.randint(2 * pad + 1, (2, count), generator=draw).tolist()
    flips = (torch.rand(count, generator=draw) < 0.5).tolist()
    results = []
    for image, top, left, flip in zip(batch.numpy(), tops, lefts, flips, strict=True):
        canvas = np.full((channels, height + 2 * pad, width + 2 * pad), fill, dtype=np.uint8)
        canvas[:, pad : pad + height, pad : pad + width] = image
        crop = canvas[:, top : top + height, left : left + width]
        results.append(crop[:, :, ::-1] if flip else crop)
    return torch.from_numpy(np.stack(results))


@pytest.mark.parametrize("shape", [(40, 3, 8, 8), (40, 1, 5, 9), (1, 2, 6, 4)], ids=str)
@pytest.mark.parametrize(("pad", "fill"), [(4, 127), (2, 0), (0, 5)])
def test_a_batch_is_augmented_as_a_loop_over_its_images_does(shape, pad, fill):
    batch = images(*shape)
    untouched = batch.clone()
    result = augmented(batch, pad, fill, seeded())
    assert result.dtype == torch.uint8
    assert result.equal(one_by_one(batch, pad, fill, seeded()))
    assert batch.equal(untouched)


def test_every_crop_and_flip_is_equally_likely():
    count, image = 20_000, torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    canvas = np.pad(image[0, 0].numpy(), 1, constant_values=200)
    crops = [canvas[y : y + 4, x : x + 4] for y in range(3) for x in range(3)]
    outcomes = {o.tobytes() for crop in crops for o in (crop, crop[:, ::-1])}
    results = augmented(image.expand(count, 1, 4, 4), 1, 200, seeded())
    seen, times = np.unique([r.numpy().tobytes() for r in results], return_counts=True)
    assert len(outcomes) == 18
    assert set(seen) == outcomes
    share = 1 / 18
    assert np.abs(times / count - share).max() < 4 * np.sqrt(share * (1 - share) / count)


def test_choosing_and_cropping_at_once_equals_choosing_first():
    batch, augment = images(30, 3, 8, 8), PadCropFlip(2, 9)
    chosen = torch.tensor([7, 7, 0, 29])
    draws = augment.draw(4, seeded())
    expected = augment(batch[chosen], torch.arange(4), draws)
    assert augment(batch, chosen, draws).equal(expected)
