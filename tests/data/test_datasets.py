"""The embedded digits, and the batches that a feed makes of them."""

import pytest
import torch

from ghostbatch.data import TensorFeed, load
from ghostbatch.draws import generator
from ghostbatch.errors import InputError


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def feed(data, **options):
    defaults = {"batch": 4000, "seed": 0, "augment": False}
    return TensorFeed(
        data, **{**defaults, **options}, device=torch.device("cpu"), dtype=torch.float64
    )


def test_digits_are_5000_uint8_images_of_28_by_28_in_ten_classes(digits):
    assert digits.classes == 10
    for split, size in ((digits.train, 4000), (digits.test, 1000)):
        assert split.images.shape == (size, 1, 28, 28)
        assert split.images.dtype == torch.uint8
        assert (len(split), split.labels.shape, split.labels.dtype) == (size, (size,), torch.int64)


def test_each_class_has_400_training_and_100_test_digits(digits):
    assert torch.bincount(digits.train.labels).tolist() == [400] * 10
    assert torch.bincount(digits.test.labels).tolist() == [100] * 10


def test_no_image_appears_twice_in_train_or_test(digits):
    images = torch.cat([digits.train.images, digits.test.images])
    assert len({image.numpy().tobytes() for image in images}) == 5000


def test_the_labels_belong_to_the_images(digits):
    train, test = (split.images.flatten(1).double() for split in (digits.train, digits.test))
    means = torch.stack([train[digits.train.labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test, means).argmin(1)
    assert (nearest == digits.test.labels).double().mean() > 0.75  # chance is a tenth


def test_the_mean_is_that_of_all_of_mnist_to_3_percent(digits):
    assert digits.mean.item() == pytest.approx(255 * 0.1307, rel=0.03)


def test_a_feed_yields_the_samples_of_the_stream_with_mean_zero_and_deviation_one(digits):
    ours = feed(digits)
    _, images, labels = next(ours.micro_batches(3, [slice(None)]))
    order = ours.stream.indices(3)
    assert labels.equal(digits.train.labels[order])
    assert (
        (images * digits.deviation + digits.mean).round().byte().equal(digits.train.images[order])
    )
    assert images.mean().item() == pytest.approx(0, abs=1e-12)
    assert images.std(correction=0).item() == pytest.approx(1, rel=1e-9)


def test_augmentation_is_keyed_by_seed_and_update_and_leaves_test_images_alone(digits):
    augmented = feed(digits, batch=50, augment=True)
    plain = digits.train.images[augmented.stream.indices(7)]
    draws = digits.augmentation.draw(50, generator(0, "augment", 7))
    expected = digits.augmentation(plain, torch.arange(50), draws)
    next(augmented.micro_batches(2, [slice(None)]))
    _, images, _ = next(augmented.micro_batches(7, [slice(None)]))
    assert (images * digits.deviation + digits.mean).round().byte().equal(expected)
    assert not expected.equal(plain)
    batches = zip(augmented.test_batches(300), feed(digits).test_batches(300), strict=True)
    assert all(ours[0].equal(theirs[0]) for ours, theirs in batches)


def test_the_authors_pixels_are_imagenets_for_colour_and_half_the_range_for_grey():
    grey = load("digits", normalisation="authors", holdout=7)
    assert (grey.mean.tolist(), grey.deviation.tolist()) == ([127.5], [127.5])
    colour = load("synthetic:3x8x8:16", normalisation="authors")
    assert (colour.mean / 255).tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert (colour.deviation / 255).tolist() == pytest.approx([0.229, 0.224, 0.225])
    with pytest.raises(InputError, match=r"^normalisation: .* 2 channels; use data$"):
        load("synthetic:2x8x8:16", normalisation="authors")
    with pytest.raises(InputError, match=r"^normalisation: 'author' is unknown; did you mean auth"):
        load("digits", normalisation="author")
