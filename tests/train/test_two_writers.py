"""A folder that is removed under a run: the run stops, and what another one writes there stays."""

import shutil

import pytest

from ghostbatch import train
from ghostbatch.errors import InputError
from ghostbatch.files import holds, locked


def remove_the_lock(folder):
    (folder / ".lock").unlink()


@pytest.mark.parametrize("remove", [remove_the_lock, shutil.rmtree])
def test_a_run_stops_before_it_writes_beside_another(tiny, tmp_path, outcome, remove):
    """The second run begins inside the first one's record of update 5, and ends there."""
    train(tiny, out=tmp_path / "whole")
    out = tmp_path / "run"
    second = {}

    def start_another(record):
        if record.update == 5 and not second:
            remove(out)
            second["status"] = train(tiny, out=out).status
            second["files"] = {path.name: path.read_bytes() for path in out.iterdir()}

    with pytest.raises(InputError, match=r"^out: .*run or its lock file was removed while this"):
        train(tiny, out=out, on_record=start_another, checkpoint_updates=1)
    assert second["status"] == "finished"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == second["files"]
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("split", "update"),
    [("validation", 0), ("train", 16), ("validation", 16)],
    ids=["record", "checkpoint", "summary"],  # which would be written next
)
def test_nothing_is_written_without_the_lock(tiny, tmp_path, split, update):
    def read_files():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    before = {}

    def lose_the_lock(record):
        if (record.split, record.update) == (split, update):
            remove_the_lock(tmp_path)
            before.update(read_files())

    with pytest.raises(InputError, match="its lock file was removed"):
        train(tiny, out=tmp_path, on_record=lose_the_lock)
    assert read_files() == before


def test_a_lock_that_was_removed_before_it_was_taken_is_taken_again(tmp_path, monkeypatch):
    """Else two processes would hold two locks of the same folder."""
    answers = [False, True]
    monkeypatch.setattr("ghostbatch.files.holds", lambda *_: answers.pop(0))
    with locked(tmp_path) as descriptor:
        assert answers == []
        assert holds(tmp_path, descriptor)
