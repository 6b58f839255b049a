"""The held-out split: the same training images for every run, and never the test set."""

from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from image_folder import write_images

from ghostbatch.data import find_info, fingerprint_of, load
from ghostbatch.data.datasets import choose_held_out
from ghostbatch.errors import InputError


@pytest.fixture
def folder(tmp_path):
    return f"folder:{write_images(tmp_path / 'images')}"


def items(part):
    """Return the images of one part of a data set with their labels: bytes, or paths."""
    images = part.paths if hasattr(part, "paths") else [i.numpy().tobytes() for i in part.images]
    return set(zip(images, list(map(int, part.labels)), strict=True))


def test_the_choice_is_the_same_everywhere_and_contains_that_of_a_smaller_part():
    _, kept = choose_held_out(4000, 1000)
    assert kept[:10] == [4, 6, 8, 9, 14, 21, 23, 29, 30, 31]
    assert sha256(str(kept).encode()).hexdigest()[:16] == "854ea439309967e8"
    assert set(choose_held_out(4000, 100)[1]) < set(kept)
    _, kept = choose_held_out(50_000, 5000)
    assert kept[:10] == [14, 21, 29, 30, 38, 45, 67, 74, 76, 88]
    assert sha256(str(kept).encode()).hexdigest()[:16] == "871470006ae6a7f5"


@pytest.mark.parametrize(
    ("name", "count"), [("digits", 1000), ("synthetic:1x8x8:300", 75), ("folder", 7)]
)
def test_training_and_held_out_images_are_disjoint_and_together_the_training_set(
    name, count, folder
):
    whole = load(folder if name == "folder" else name)
    data = whole.hold_out(count)
    rest, kept = items(data.train), items(data.test)
    assert (len(data.train), len(data.test)) == (len(whole.train) - count, count)
    assert not rest & kept
    assert rest | kept == items(whole.train)
    assert not (rest | kept) & items(whole.test)
    assert whole.info.held_out is False  # it is left as it was


def test_all_classes_of_the_sorted_digits_are_held_out_about_equally_often():
    counts = torch.bincount(load("digits", holdout=1000).test.labels, minlength=10)
    deviation = (1000 * 0.1 * 0.9 * 3000 / 3999) ** 0.5
    assert (counts - 100).abs().max() < 3.5 * deviation


def test_mean_and_deviation_are_those_of_the_remaining_images():
    data = load("digits", holdout=1000)
    pixels = data.train.images.double()
    assert len(pixels) == 3000
    assert data.mean.item() == pytest.approx(pixels.mean().item(), rel=1e-12)
    assert data.deviation.item() == pytest.approx(pixels.std(correction=0).item(), rel=1e-9)
    assert data.mean.item() != load("digits").mean.item()


@pytest.mark.parametrize("name", ["digits", "synthetic:3x8x8x5:300", "folder"])
def test_the_sizes_are_known_without_the_files(name, folder):
    name = folder if name == "folder" else name
    size = 9 if name == folder else None
    assert find_info(name, size, 7) == load(name, image_size=size, holdout=7).info
    assert find_info(name, size, 7).held_out
    assert find_info("cifar10", holdout=5000).samples == 45_000
    assert find_info("cifar10", holdout=5000).test_samples == 5000


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (4000, "holdout: 4,000 of 4,000 training images cannot be held out; use 1 to 3,999"),
        (5000, "holdout: 5,000 of 4,000 training images cannot be held out; use 1 to 3,999"),
        (-1, "holdout: -1 is no number of images; use 5000, or 0 for none"),
        (0.5, "holdout: 0.5 is no number of images; use 5000, or 0 for none"),
    ],
)
def test_a_wrong_number_is_one_line(count, line):
    for refuse in (load, find_info):
        with pytest.raises(InputError) as raised:
            refuse("digits", holdout=count)
        assert str(raised.value) == line


def test_nothing_is_held_out_twice():
    with pytest.raises(InputError, match=r"^holdout: images are held out already; hold out all"):
        load("digits", holdout=10).hold_out(10)
    with pytest.raises(InputError, match=r"^holdout: 0 of 4,000 training images cannot be"):
        load("digits").hold_out(0)


def test_the_fingerprint_tells_held_out_images_from_the_test_set(folder):
    for name in ("digits", folder):
        whole, held = (fingerprint_of(load(name, holdout=count)) for count in (0, 6))
        assert (whole.as_dict()["held_out"], held.as_dict()["held_out"]) == (False, True)
        assert whole.test != held.test
        assert whole.train != held.train


def test_changed_held_out_images_are_called_so():
    data = load("digits", holdout=1000)
    written = fingerprint_of(data).as_dict()
    other = replace(data, test=replace(data.test, labels=data.test.labels.flip(0)))
    line = "digits has other held-out images than when this run began"
    assert fingerprint_of(other).changes_since(written) == line
    line = "digits has 1 training image more and 1 held-out image fewer than when this run began"
    assert fingerprint_of(load("digits", holdout=999)).changes_since(written) == line
