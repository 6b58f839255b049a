"""Image folders: crops against a slow reference, the order of samples, unreadable files."""

import struct
import zlib

import numpy as np
import pytest
import torch
from image_folder import write_images
from PIL import Image

from ghostbatch import Recipe, Regime
from ghostbatch.data import PermutationStream, SkippedImages, find_info, fingerprint_of, load
from ghostbatch.data.decode import decode
from ghostbatch.data.folder import FolderFeed
from ghostbatch.draws import generator
from ghostbatch.errors import InputError, RankLocalError

SIZES = [(300, 280), (256, 400), (500, 260), (100, 120)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Smooth images of several sizes and formats in three classes."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("ant", "bee", "cow")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                coarse = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                image = Image.fromarray(coarse).resize(SIZES[number % 4], Image.Resampling.BICUBIC)
                suffix = "jpg" if number % 2 else "png"
                if number == 3:
                    image = image.convert("L")
                image.save(folder / part / name / f"{label}{number}.{suffix}")
    return folder


@pytest.fixture
def damaged(root, tmp_path):
    """A copy of the folder with one file that is not an image."""
    for path in root.rglob("*.*"):
        target = tmp_path / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (tmp_path / "train" / "bee" / "12.png").write_bytes(b"not an image")
    return tmp_path


def feed(root, batch=12, augment=True, workers=2, image_size=None, **options):
    data = load(f"folder:{root}", image_size=image_size)
    settings = {"device": torch.device("cpu"), "dtype": torch.float64}
    return FolderFeed(
        data, batch=batch, seed=5, augment=augment, workers=workers, **settings, **options
    )


def one_by_one(data, indices, draws, augment, shorter=256, side=224):
    """The slow reference: resize the whole image, then crop, then flip, one image at a time."""
    images = []
    for index, top, left, flip in zip(indices.tolist(), *draws.tolist(), strict=True):
        image = Image.open(data.train.paths[index]).convert("RGB")
        short = min(image.size)
        wide, high = (int(shorter * length / short) for length in image.size)
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
        x, y = int(left * (wide - side + 1)), int(top * (high - side + 1))
        crop = np.asarray(image.crop((x, y, x + side, y + side)))
        images.append(crop[:, ::-1] if augment and flip < 0.5 else crop)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).double()


def unnormalised(feed, images):
    mean, deviation = (m.view(1, -1, 1, 1) for m in feed.data.moments)
    return images * deviation + mean


@pytest.mark.parametrize(
    ("augment", "sizes"), [(True, (256, 224)), (False, (256, 224)), (True, (91, 80))]
)
def test_a_batch_equals_a_loop_over_its_images(root, augment, sizes):
    ours = feed(root, augment=augment, image_size=sizes[1])
    for update in (0, 1, 2):
        (batch,) = ours.micro_batches(update, [slice(0, 12)])
        indices = PermutationStream(24, 12, seed=5).indices(update)
        draws = torch.full((3, 12), 0.5, dtype=torch.float64)
        if augment:
            draw = generator(5, "augment", update)
            draws = torch.rand(3, 12, generator=draw, dtype=torch.float64)
        expected = one_by_one(ours.data, indices, draws, augment, *sizes)
        # Resampling only the crop rounds differently between its two passes.
        difference = (unnormalised(ours, batch.images) - expected).abs().max()
        assert difference < (1.6 if sizes[1] == 224 else 2.6)
        assert batch.labels.tolist() == [ours.data.train.labels[i] for i in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_micro_batches_resuming_and_workers_do_not_change_a_batch(root, workers):
    one_pass = feed(root)
    expected = [next(one_pass.micro_batches(update, [slice(0, 12)])) for update in range(4)]
    two_passes = feed(root, workers=workers)
    evaluated = two_passes.test_batches(size=4)
    next(evaluated)  # and the rest after the training batches
    for update in (2, 3, 0):  # starts at update 2, continues, and goes back
        parts = list(two_passes.micro_batches(update, [slice(0, 4), slice(4, 12)]))
        assert torch.cat([part.images for part in parts]).equal(expected[update].images)
        assert torch.cat([part.labels for part in parts]).equal(expected[update].labels)


def test_test_batches_are_centre_crops_in_order(root):
    ours = feed(root)
    batches = list(ours.test_batches(size=4))
    assert [len(labels) for _, labels in batches] == [4, 4, 1]
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 3 + [1] * 3 + [2] * 3
    first = torch.tensor(decode(ours.data.test.paths[0], 0.5, 0.5)).permute(2, 0, 1)
    assert unnormalised(ours, batches[0][0])[0].round().byte().equal(first)
    others = list(ours.test_batches(size=4, start=1, step=2))
    assert torch.cat([labels for _, labels in others]).tolist() == [1, 1, 2, 2]


def test_a_bad_image_is_fatal_on_its_rank_and_named(damaged):
    ours = feed(damaged, batch=24)
    line = r"^data: .*12.png cannot be read .* on_bad_image to skip"
    with pytest.raises(RankLocalError, match=line):
        list(ours.micro_batches(0, [slice(0, 24)]))


def test_a_skipped_image_is_named_once_and_replaced_by_the_next(damaged):
    ours = feed(damaged, batch=24, augment=False, on_bad_image="skip", skipped=SkippedImages(0.2))
    with pytest.warns(UserWarning, match=r"12.png cannot be read .*; it is skipped"):
        (batch,) = ours.micro_batches(0, [slice(0, 24)])
    paths = ours.data.train.paths
    bad = next(i for i, path in enumerate(paths) if path.endswith("12.png"))
    order = PermutationStream(24, 24, seed=5).indices(0).tolist()
    assert len(batch.labels) == 24
    assert batch.images[order.index(bad)].equal(batch.images[order.index(bad + 1)])
    list(ours.micro_batches(1, [slice(0, 24)]))  # a second warning would be an error


def test_skipped_test_images_are_left_out(damaged):
    (damaged / "val" / "cow" / "20.png").write_bytes(b"")
    ours = feed(damaged, on_bad_image="skip", skipped=SkippedImages(0.2))
    with pytest.warns(UserWarning, match="20.png cannot be read"):
        batches = list(ours.test_batches())
    assert sum(len(labels) for _, labels in batches) == 8


def test_classes_and_sizes_are_known_from_the_listing(root):
    info = find_info(f"folder:{root}")
    assert (info.samples, info.test_samples, info.classes) == (24, 9, 3)
    assert info.shape == (3, 224, 224)
    assert find_info(f"folder:{root}", 80) == load(f"folder:{root}", image_size=80).info
    assert find_info(f"folder:{root}", 80).shape == (3, 80, 80)
    assert find_info("imagenet", 64).shape == (3, 64, 64)


def test_a_folder_without_train_and_val_or_with_unequal_classes_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"^data: .* there is no folder .*train; put images into"):
        load(f"folder:{tmp_path}")
    (tmp_path / "train" / "ant").mkdir(parents=True)
    (tmp_path / "val" / "bee").mkdir(parents=True)
    with pytest.raises(InputError, match=r"^data: .* classes that train lacks \(bee\)"):
        load(f"folder:{tmp_path}")


def test_workers_end_with_their_feed(root):
    ours = feed(root)
    next(ours.micro_batches(0, [slice(0, 12)]))
    workers = list(ours._decoded._workers)
    assert all(worker.is_alive() for worker in workers)
    ours.close()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


def test_a_decompression_bomb_is_a_bad_image(tmp_path):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    path = tmp_path / "bomb.png"
    data = struct.pack(">I4sI", 0, b"IDAT", zlib.crc32(b"IDAT"))
    path.write_bytes(head + struct.pack(">I", zlib.crc32(chunk)) + data)
    assert "exceeds limit" in decode(str(path), 0.5, 0.5)


def test_a_constant_channel_becomes_zero_and_not_infinite(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "red").mkdir(parents=True)
        for shade in (10, 200):
            image = Image.new("RGB", (300, 300), (shade, 0, 7))
            image.save(tmp_path / part / "red" / f"{shade}.png")
    ((images, _),) = feed(tmp_path, batch=2).test_batches()
    assert images.isfinite().all()
    assert images[:, 1:].abs().max() < 1e-9


@pytest.mark.parametrize(
    ("data", "size", "problem"),
    [
        ("digits", 28, "the images of digits have a fixed size; leave it out"),
        ("synthetic:3x32x32", 32, "the images of synthetic:3x32x32 have a fixed size"),
        ("imagenet", 0, "0 is not a number of pixels; use 224, for example"),
        ("imagenet", 1.5, "1.5 is not a (whole number|number of pixels)"),
    ],
)
def test_an_image_size_that_cannot_be_is_refused(data, size, problem):
    regime = Regime(lr=0.01, epochs=1)
    for refuse in (
        lambda: find_info(data, size),
        lambda: load(data, image_size=size),
        lambda: Recipe(
            model="f1", data=data, image_size=size, batch=4, base_batch=4, regime=regime
        ),
    ):
        with pytest.raises(InputError, match=f"^image_size: {problem}"):
            refuse()


def test_a_link_to_nothing_is_an_unreadable_image(tmp_path):
    write_images(tmp_path)
    before = fingerprint_of(load(f"folder:{tmp_path}"))
    (tmp_path / "train" / "ant" / "9.png").symlink_to(tmp_path / "nothing.png")
    after = fingerprint_of(load(f"folder:{tmp_path}"))
    assert "1 training image more" in after.changes_since(before.as_dict())
