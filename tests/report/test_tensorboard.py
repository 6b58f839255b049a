"""TensorBoard's files hold the numbers of metrics.jsonl, also after interruptions."""

import sys
from collections import defaultdict

import pytest

from ghostbatch import train
from ghostbatch.errors import InputError
from ghostbatch.report.tensorboard import SCALARS, TensorBoard
from ghostbatch.train import read_records

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in TensorBoard itself


def shown(folder):
    """Return what TensorBoard reads: for each curve, pairs of update and value."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def written(folder):
    """Return the same from metrics.jsonl; TensorBoard keeps fp32."""
    curves = defaultdict(list)
    for record in read_records(folder / "metrics.jsonl"):
        for name in SCALARS:
            if (value := getattr(record, name)) is not None:
                curves[f"{record.split}/{name}"].append((record.update, value))
    return {tag: [(u, pytest.approx(v, rel=1e-6)) for u, v in c] for tag, c in curves.items()}


def interrupted(recipe, folder, update, split="validation", board=True):
    """Interrupt a run right after it has written a record."""
    boards = TensorBoard(folder) if board else None

    def stop(record):
        if boards is not None:
            boards(record)
        if record.update >= update and record.split == split:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=folder, on_record=stop, checkpoint_updates=4)


def test_a_run_shows_the_numbers_of_its_metrics(tiny, tmp_path):
    train(tiny, out=tmp_path, on_record=TensorBoard(tmp_path))
    found = shown(tmp_path)
    assert found == written(tmp_path)
    assert len(found) == 6 + 4
    assert [update for update, _ in found["train/clipped"]][-1] == 16


@pytest.mark.parametrize(
    ("update", "split"), [(7, "validation"), (8, "train"), (16, "train"), (16, "validation")]
)
def test_a_resumed_run_shows_the_numbers_of_its_metrics_once(tiny, tmp_path, update, split):
    """The last case is interrupted when only its summary is missing."""
    interrupted(tiny, tmp_path, update, split)
    train(tiny, out=tmp_path, on_record=TensorBoard(tmp_path))
    assert shown(tmp_path) == written(tmp_path)


def test_a_run_that_began_without_it_is_shown_from_its_beginning(tiny, tmp_path):
    interrupted(tiny, tmp_path, 7, board=False)
    train(tiny, out=tmp_path, on_record=TensorBoard(tmp_path))
    assert shown(tmp_path) == written(tmp_path)


def test_a_resumed_run_with_a_damaged_record_is_shown_without_it(tiny, tmp_path):
    interrupted(tiny, tmp_path, 7)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"update": 2', b'"update": 3'))
    with pytest.warns(UserWarning, match="lines 4, 5 of .*metrics.jsonl are damaged"):
        train(tiny, out=tmp_path, on_record=TensorBoard(tmp_path))
    assert [update for update, _ in shown(tmp_path)["train/loss"]][:3] == [1, 3, 4]


def test_a_run_that_keeps_no_folder_is_shown_too(tiny, tmp_path):
    seen = []
    board = TensorBoard(tmp_path)

    def both(record):
        board(record)
        seen.append(record)

    train(tiny, on_record=both)
    losses = [(r.update, pytest.approx(r.loss)) for r in seen if r.split == "validation"]
    assert shown(tmp_path)["validation/loss"] == losses


def test_without_the_package_it_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError) as caught:
        TensorBoard(tmp_path)
    assert str(caught.value) == (
        "tensorboard: is not installed; run pip install 'ghostbatch[tensorboard]'"
    )
