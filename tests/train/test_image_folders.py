"""Runs on image folders whose decoders are killed, or whose images cannot be read."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from half_done import half_done
from PIL import Image
from torch.utils.data import DataLoader

from ghostbatch import Regime, train
from ghostbatch.data.folder import FolderData
from ghostbatch.errors import InputError, RankLocalError

# ------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("moment", ["training", "evaluation"])
def test_a_killed_decoder_is_one_line_and_the_run_continues_later(
    folder_recipe, tmp_path, outcome, monkeypatch, moment
):
    train(folder_recipe, out=tmp_path / "whole", workers=1)
    loaders = []
    start = DataLoader.__iter__

    def remember(self):
        loaders.append(start(self))
        if (moment, len(loaders)) == ("evaluation", 3):
            kill(loaders[-1])
        return loaders[-1]

    def kill_in_training(record):
        if moment == "training" and (record.update, record.split) == (2, "train"):
            kill(loaders[1])  # the first one was for the first evaluation

    def kill(loader):
        os.kill(loader._workers[0].pid, signal.SIGKILL)
        loader._workers[0].join(10)

    options = {"out": tmp_path / "cut", "workers": 1}
    with monkeypatch.context() as patch:
        patch.setattr(DataLoader, "__iter__", remember)
        with pytest.raises(
            RankLocalError,
            match=r"^workers: a process that decodes images ended \(DataLoader worker .*\); run "
            r"the same command again to continue; if memory ran out, use fewer workers$",
        ):
            train(folder_recipe, on_record=kill_in_training, checkpoint_seconds=0, **options)
    train(folder_recipe, **options)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_decoder_without_memory_does_not_blame_the_file(folder_recipe, monkeypatch, tmp_path):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(FolderData, "moments", (torch.zeros(3), torch.ones(3)))
    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(
        RankLocalError, match=r"^workers: a process that decodes images ended"
    ) as caught:
        train(folder_recipe, out=tmp_path / "run", on_bad_image="skip")
    # Others may wait for the end of what the decoders have inherited; the traceback holds frames.
    assert caught.tb
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------------------- skipped images


def spoil(recipe, *names):
    for name in names:
        (Path(recipe.data.removeprefix("folder:")) / name).write_bytes(b"not an image")


@pytest.mark.filterwarnings("ignore:.* cannot be read")
def test_skipped_images_are_counted_once_each_also_over_a_resume(folder_recipe, tmp_path, outcome):
    twice = replace(folder_recipe, regime=Regime(lr=0.01, epochs=2))
    spoil(twice, "train/ant/3.png", "train/cow/7.png", "val/bee/1.png")
    options = {"on_bad_image": "skip", "bad_image_limit": 0.2, "workers": 1}
    whole = train(twice, out=tmp_path / "whole", **options)
    assert (whole.skipped_images, whole.skipped_test_images) == (2, 1)
    written = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (written["skipped_images"], written["skipped_test_images"]) == (2, 1)
    half_done(twice, tmp_path / "cut", **options)
    restored = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["state"]
    assert restored["skipped"] == {"train": [3, 23], "test": [4]}
    assert train(twice, out=tmp_path / "cut", **options).skipped_images == 2
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:.* cannot be read")
@pytest.mark.parametrize(
    ("limit", "bad", "line"),
    [
        (0.05, ["train/ant/3.png", "train/cow/7.png"], "2 of 24 train images cannot be read"),
        (0.0, ["train/ant/3.png"], "1 of 24 train images cannot be read"),
        (0.2, ["val/ant/0.png", "val/ant/1.png"], "2 of 9 test images cannot be read"),
    ],
)
def test_more_bad_images_than_the_limit_end_the_run(folder_recipe, limit, bad, line):
    spoil(folder_recipe, *bad)
    with pytest.raises(
        RankLocalError,
        match=f"^bad_image_limit: {line}, which is more than a fraction of {limit:g}; repair",
    ):
        train(folder_recipe, on_bad_image="skip", bad_image_limit=limit)


@pytest.mark.parametrize("limit", [-0.1, 1.1, float("nan")])
def test_a_limit_that_is_no_fraction_is_refused(tiny, limit):
    with pytest.raises(InputError, match=r"^bad_image_limit: .* is no fraction; use 0 to 1"):
        train(tiny, bad_image_limit=limit)
