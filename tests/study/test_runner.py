"""Cells side by side: what one of them meets, and what that means for the others."""

import errno
from dataclasses import replace

import pytest

from ghostbatch.study.runner import run_cells
from ghostbatch.study.studies import Cell
from ghostbatch.train import Summary, read_records


def cell(name, recipe):
    return Cell("tiny", name, recipe.plan(4000))


def test_a_study_goes_on_with_its_other_cells_when_one_diverges(tiny, tmp_path):
    hot = replace(tiny, clip=None, regime=replace(tiny.regime, lr=1e25, drops=()))
    ended = {}

    def news(cell, what):
        if isinstance(what, Summary):
            ended[cell.column] = (what.status, what.reason)

    cells = [cell("hot", hot), cell("mild", tiny)]
    run_cells(cells, tmp_path, jobs=1, on_news=news, device="cpu")
    assert ended["hot"][0] == "diverged"
    assert ended["hot"][1].startswith("update 2: the loss is nan, first in the output of layer ")
    assert ended["mild"] == ("finished", None)
    assert read_records(cells[1].folder(tmp_path) / "metrics.jsonl")[-1].update == 16


def test_a_full_disk_is_what_the_study_says_and_not_that_a_worker_died(tiny, tmp_path, capfd):
    one = cell("one", tiny)
    folder = one.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        run_cells([one], tmp_path, jobs=1, on_news=lambda *_: None, device="cpu")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(folder / "checkpoint.pt")
    assert capfd.readouterr() == ("", "")
