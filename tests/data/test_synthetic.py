"""Synthetic data: the shape in its name, the same at every call, labels that can be learned."""

import pytest
import torch

from ghostbatch.data import find_info, load
from ghostbatch.errors import InputError


@pytest.mark.parametrize(
    ("name", "shape", "classes", "samples"),
    [
        ("synthetic:3x32x32", (3, 32, 32), 10, 4096),
        ("synthetic:1x5x5x7", (1, 5, 5), 7, 4096),
        ("synthetic:2x8x8:50", (2, 8, 8), 10, 50),
        ("synthetic:3x9x9x100:1200", (3, 9, 9), 100, 1200),
        ("synthetic:1x1x1x2:2", (1, 1, 1), 2, 2),
    ],
)
def test_the_name_gives_the_shape_the_classes_and_the_samples(name, shape, classes, samples):
    info, data = find_info(name), load(name)
    assert (info.shape, info.classes, info.samples) == (shape, classes, samples)
    assert data.info == info
    assert data.name == name
    for split in (data.train, data.test):
        assert split.images.dtype == torch.uint8
        assert split.labels.dtype == torch.int64
        assert split.labels.min() >= 0
        assert split.labels.max() < classes


@pytest.mark.parametrize(
    "shape",
    ["", "3", "3x32", "0x32x32", "3x32x32x0", "3x32x32:0", "3x32x32x10x5", "3×32×32", "axbxc"],
)
def test_a_malformed_shape_is_refused_with_an_example(shape):
    with pytest.raises(InputError, match=r"^data: 'synthetic:.*; write synthetic:3x32x32"):
        load(f"synthetic:{shape}")


def test_images_that_are_not_square_are_refused():
    with pytest.raises(InputError, match=r"^data: 'synthetic:3x32x16' is not square; "):
        load("synthetic:3x32x16")


def test_the_data_are_the_same_at_every_call_and_leave_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, b = (load("synthetic:3x8x8:100") for _ in range(2))
    assert torch.get_rng_state().equal(before)
    for ours, theirs in ((a.train, b.train), (a.test, b.test)):
        assert ours.images.equal(theirs.images)
        assert ours.labels.equal(theirs.labels)
    assert not a.train.images[:25].equal(a.test.images)


def test_labels_can_be_predicted_from_the_images():
    data = load("synthetic:3x16x16:2000")
    train, test = (split.images.flatten(1).float() for split in (data.train, data.test))
    means = torch.stack([train[data.train.labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test, means).argmin(1)
    assert (nearest == data.test.labels).double().mean() > 0.95  # chance is a tenth


def test_the_chunk_size_does_not_change_the_images(monkeypatch):
    expected = load("synthetic:1x6x6:90").train.images
    monkeypatch.setattr("ghostbatch.data.synthetic.CHUNK_BYTES", 36 * 7)
    assert load("synthetic:1x6x6:90").train.images.equal(expected)
