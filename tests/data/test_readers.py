"""MNIST and CIFAR against files that the test writes in their real format."""

import gzip
import hashlib
import pickle
import struct
import tarfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from ghostbatch.data import catalog, load
from ghostbatch.errors import InputError
from ghostbatch.optional import import_torchvision

TRAIN, TEST = 20, 6
IDX = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
CIFAR = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}
ALL = [*IDX, *CIFAR]


def reader_of(name):
    return getattr(import_torchvision().datasets, {**IDX, **CIFAR}[name])


def pixels(count, *shape):
    return np.random.default_rng(count).integers(256, size=(count, *shape), dtype=np.uint8)


def labels(count, classes):
    return [(7 * i) % classes for i in range(count)]


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()  # noqa: S324 (torchvision's choice)


def idx(array):
    """Two zero bytes, the type (8 is a byte), the dimensions, their sizes, the data."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def write_idx(name, root, monkeypatch, packed):
    folder = root / IDX[name] / "raw"
    folder.mkdir(parents=True)
    resources = []
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        arrays = {
            f"{part}-images-idx3-ubyte": pixels(count, 28, 28),
            f"{part}-labels-idx1-ubyte": np.array(labels(count, 10), dtype=np.uint8),
        }
        for file, array in arrays.items():
            archive = folder / f"{file}.gz"
            archive.write_bytes(gzip.compress(idx(array)))
            resources.append((archive.name, md5(archive)))
            if not packed:
                archive.unlink()
                (folder / file).write_bytes(idx(array))
    monkeypatch.setattr(reader_of(name), "resources", resources)
    return folder


def write_cifar(name, root, monkeypatch):
    reader = reader_of(name)
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    classes = catalog.INFO[name].classes
    fine = "fine_labels" if name == "cifar100" else "labels"
    sums = {}

    def dump(file, content):
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        sums[file] = md5(folder / file)

    for part, count in ((reader.train_list, TRAIN), (reader.test_list, TEST)):
        images = pixels(count, 3, 32, 32).reshape(len(part), -1, 3 * 32 * 32)
        answers = np.array(labels(count, classes)).reshape(len(part), -1)
        for (file, _), some, which in zip(part, images, answers, strict=True):
            dump(file, {"data": some, fine: which.tolist(), "batch_label": file})
    names = [f"class {i}" for i in range(classes)]
    dump(reader.meta["filename"], {reader.meta["key"]: names})
    for table in ("train_list", "test_list"):
        files = [[file, sums[file]] for file, _ in getattr(reader, table)]
        monkeypatch.setattr(reader, table, files)
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": sums[reader.meta["filename"]]})
    return folder


@pytest.fixture
def write(monkeypatch):
    """Write a small data set; return its folder."""
    monkeypatch.delenv("GHOSTBATCH_DATA", raising=False)

    def write_one(name, root, packed=False):
        small = replace(catalog.INFO[name], samples=TRAIN, test_samples=TEST)
        monkeypatch.setitem(catalog.INFO, name, small)
        if name in IDX:
            return write_idx(name, root, monkeypatch, packed)
        return write_cifar(name, root, monkeypatch)

    return write_one


def check(name, data):
    info = catalog.INFO[name]
    assert data.name == name
    for split, count in ((data.train, TRAIN), (data.test, TEST)):
        assert (split.images.dtype, split.labels.dtype) == (torch.uint8, torch.int64)
        assert split.images.is_contiguous()
        assert split.images.numpy().tobytes() == pixels(count, *info.shape).tobytes()
        assert split.images.shape == (count, *info.shape)
        assert split.labels.tolist() == labels(count, info.classes)


# ----------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ALL)
def test_images_and_labels_are_those_in_the_files(name, write, tmp_path):
    write(name, tmp_path)
    check(name, load(name, tmp_path))


@pytest.mark.parametrize("name", IDX)
def test_packed_files_are_read_without_writing_to_their_folder(name, write, tmp_path):
    folder = write(name, tmp_path, packed=True)
    before = sorted(folder.iterdir())
    check(name, load(name, tmp_path))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "pad", "fill"),
    [("mnist", 2, 0), ("fashion-mnist", 2, 0), ("cifar10", 4, 127), ("cifar100", 4, 127)],
)
def test_images_are_padded_as_in_the_paper(name, pad, fill, write, tmp_path):
    write(name, tmp_path)
    augmentation = load(name, tmp_path).augmentation
    assert (augmentation.pad, augmentation.fill) == (pad, fill)


def test_mean_and_deviation_of_each_channel_match_numpy(write, tmp_path):
    write("cifar10", tmp_path)
    data, found = load("cifar10", tmp_path), pixels(TRAIN, 3, 32, 32).astype(np.float64)
    assert data.mean.tolist() == pytest.approx(found.mean((0, 2, 3)).tolist(), rel=1e-14)
    assert data.deviation.tolist() == pytest.approx(found.std((0, 2, 3)).tolist(), rel=1e-14)
    assert data.mean.dtype == data.deviation.dtype == torch.float64


# ------------------------------------------------------------------------------------- the folder


def test_data_dir_takes_precedence_over_the_environment_and_that_over_the_folder_data(
    write, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write("mnist", tmp_path / "data")
    check("mnist", load("mnist"))
    monkeypatch.setenv("GHOSTBATCH_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match="elsewhere"):
        load("mnist")
    check("mnist", load("mnist", "data"))
    monkeypatch.setenv("GHOSTBATCH_DATA", str(tmp_path / "data"))
    check("mnist", load("mnist"))


@pytest.mark.parametrize("name", ALL)
def test_the_error_for_a_missing_data_set_says_where_it_was_sought_and_how_to_get_it(
    name, tmp_path
):
    with pytest.raises(InputError) as raised:
        load(name, tmp_path / "nowhere")
    error = raised.value
    assert error.field == "data"
    assert error.problem.startswith(f"{name} is not in {tmp_path / 'nowhere'}/")
    assert all(way in error.remedy for way in ("download", "data_dir", "GHOSTBATCH_DATA"))
    assert "--" not in error.remedy  # the same words hold in Python
    assert "\n" not in str(error)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ALL)
def test_a_data_set_that_lacks_a_file_says_which(name, write, tmp_path):
    folder = write(name, tmp_path)
    missing = sorted(folder.iterdir())[-1]
    missing.unlink()
    with pytest.raises(InputError, match=rf"^data: {name} lacks {missing.name} in .*set download"):
        load(name, tmp_path)


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("name", CIFAR)
def test_a_wrong_checksum_is_reported_with_the_file(name, write, tmp_path):
    folder = write(name, tmp_path)
    file = folder / reader_of(name).train_list[-1][0]
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(
        InputError, match=rf"^data: {name} in .* is damaged: .*{file.name}.*; delete .*set download"
    ):
        load(name, tmp_path)


@pytest.mark.parametrize("size", [0, 3, 10, 500])
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_a_truncated_idx_file_is_reported_in_one_line(packed, size, write, tmp_path):
    folder = write("mnist", tmp_path, packed=packed)
    file = next(folder.glob("train-images*"))
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=r"^data: mnist in .* is damaged: .*; delete ") as raised:
        load("mnist", tmp_path)
    assert "\n" not in str(raised.value)


def test_files_of_another_size_than_declared_are_refused(write, tmp_path, monkeypatch):
    write("cifar10", tmp_path)
    monkeypatch.setitem(
        catalog.INFO, "cifar10", replace(catalog.INFO["cifar10"], samples=TRAIN + 1)
    )
    with pytest.raises(InputError, match=r"^data: cifar10 .* has 20 .* not 21 "):
        load("cifar10", tmp_path)


# --------------------------------------------------------------------------------------- downloads


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder without logging."""

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve the test's folder over HTTP; return the address."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_idx_files_are_downloaded_on_request(write, tmp_path, served, monkeypatch):
    source = write("mnist", tmp_path / "source", packed=True)
    address = f"{served}/{source.relative_to(tmp_path)}/"
    monkeypatch.setattr(reader_of("mnist"), "mirrors", [address])
    with pytest.raises(InputError, match="set download"):
        load("mnist", tmp_path / "target")
    check("mnist", load("mnist", tmp_path / "target", download=True))
    check("mnist", load("mnist", tmp_path / "target"))


# Python 3.12 warns of a change in 3.14 to the way that torchvision unpacks archives.
@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
def test_the_cifar_archive_is_downloaded_on_request(write, tmp_path, served, monkeypatch):
    source, reader = write("cifar10", tmp_path / "source"), reader_of("cifar10")
    archive = tmp_path / reader.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, source.name)
    monkeypatch.setattr(reader, "url", f"{served}/{archive.name}")
    monkeypatch.setattr(reader, "tgz_md5", md5(archive))
    check("cifar10", load("cifar10", tmp_path / "target", download=True))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_failed_download_is_reported_in_one_line(name, tmp_path, monkeypatch):
    nowhere = (tmp_path / "nothing").as_uri()
    monkeypatch.setattr(reader_of("mnist"), "mirrors", [f"{nowhere}/"])
    monkeypatch.setattr(reader_of("cifar10"), "url", f"{nowhere}/cifar.tar.gz")
    with pytest.raises(InputError, match=rf"^data: {name} could not be downloaded to ") as raised:
        load(name, tmp_path / "target", download=True)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir()), "torchvision has made folders by then"


# --------------------------------------------------------------------------------------- real data


REAL = {  # images per class in train and test; mean and deviation as published
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        [0.1307],
        [0.3081],
    ),
    "fashion-mnist": ([6000] * 10, [1000] * 10, [0.2860], [0.3530]),
    "cifar10": ([5000] * 10, [1000] * 10, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([500] * 100, [100] * 100, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}


@pytest.mark.real_data
@pytest.mark.parametrize("name", REAL)
def test_the_real_data_set_has_the_published_counts_and_moments(name):
    reader = reader_of(name)
    folder = Path(getattr(reader, "base_folder", f"{reader.__name__}/raw"))
    if not (catalog.find_data_dir() / folder).exists():
        pytest.skip(f"GHOSTBATCH_DATA holds no {name}")
    data, (train, test, mean, deviation) = load(name), REAL[name]
    assert data.info == catalog.INFO[name]
    assert torch.bincount(data.train.labels).tolist() == train
    assert torch.bincount(data.test.labels).tolist() == test
    assert (data.mean / 255).tolist() == pytest.approx(mean, abs=6e-5)
    assert (data.deviation / 255).tolist() == pytest.approx(deviation, abs=6e-5)
