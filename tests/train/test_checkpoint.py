"""Checkpoints: whole, of this run and of this format, or refused; the one before is kept."""

import json
import random
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from half_done import flip_bit, half_done, rewrite_checkpoint

from ghostbatch import train
from ghostbatch.data import find_info
from ghostbatch.errors import InputError
from ghostbatch.train import loop, read_header
from ghostbatch.train.checkpoint import Checkpoints, checksum, read_checkpoint
from ghostbatch.train.state import State


def cut_short(path):
    path.write_bytes(path.read_bytes()[:100_000])


def flip_a_bit(path):
    """In the middle of the weights."""
    flip_bit(path, 4 * path.stat().st_size)


def change_the_format(path):
    """As a flipped bit would, which the checksum shows."""
    content = torch.load(path, weights_only=True)
    torch.save({**content, "format": "2"}, path)


def change_the_recipe(path):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "recipe": {"batch": 64}}, path)


def replace_by_foreign(path):
    torch.save({"weights": torch.zeros(3)}, path)


DAMAGES = [cut_short, flip_a_bit, replace_by_foreign, change_the_format, change_the_recipe]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(
    tiny, tmp_path, outcome, damage
):
    train(tiny, out=tmp_path / "whole")
    half_done(tiny, tmp_path / "cut")
    damage(tmp_path / "cut" / "checkpoint.pt")
    with pytest.warns(
        UserWarning, match=r"checkpoint.pt .*; continuing from checkpoint.previous.pt"
    ):
        train(tiny, out=tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_no_checkpoint_is_whole_the_run_is_refused(tiny, tmp_path, damage):
    half_done(tiny, tmp_path)
    damage(tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.previous.pt").unlink()
    with pytest.raises(InputError, match=r"^checkpoint: .*checkpoint.pt .*; delete it"):
        train(tiny, out=tmp_path)


def test_a_flipped_bit_anywhere_leaves_the_checkpoint_as_it_was_or_the_one_before(tiny, tmp_path):
    checkpoints = Checkpoints(tmp_path, tiny)
    checkpoints.header = {"threads": 1}
    for update in (1, 2):
        weights = {"a": torch.full((3,), 1.0 * update), "b": torch.zeros(4), "c": torch.zeros(4)}
        checkpoints.save({"model": weights, "update": update, "rates": [0.1, None]}, 10 * update)
    intact = checkpoints.load()
    newest = tmp_path / "checkpoint.pt"
    before, written = read_checkpoint(checkpoints.previous), newest.read_bytes()
    dice = random.Random(0)  # noqa: S311 (no secret)
    for bit in dice.sample(range(8 * len(written)), 100):
        flip_bit(newest, bit)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = Checkpoints(tmp_path, tiny).load()
        assert checksum(found) == checksum(before if warned else intact), bit
        b, c = found["state"]["model"]["b"], found["state"]["model"]["c"]
        assert b.data_ptr() != c.data_ptr(), "they would be updated together"
        newest.write_bytes(written)


@pytest.mark.parametrize(("number", "word"), [(99, "newer"), (1, "older")])
def test_a_checkpoint_of_another_format_is_refused_by_name(tiny, tmp_path, number, word):
    half_done(tiny, tmp_path)
    rewrite_checkpoint(tmp_path / "checkpoint.pt", format=number)
    with pytest.raises(InputError, match=f"^checkpoint: .* has format {number}, {word} than"):
        train(tiny, out=tmp_path)


@pytest.mark.parametrize("name", ["run.json", "checkpoint.pt"])
def test_a_run_of_a_version_with_other_fields_is_refused_in_one_line(tiny, tmp_path, name):
    half_done(tiny, tmp_path)
    written = {**tiny.as_dict(), "invented": 1}
    rewrite_checkpoint(tmp_path / "checkpoint.pt", recipe=written)
    if name == "run.json":
        (tmp_path / name).write_text(json.dumps({**read_header(tmp_path), "recipe": written}))
    with pytest.raises(InputError, match="not written by this version of ghostbatch"):
        train(tiny, out=tmp_path)


def test_a_checkpoint_of_another_recipe_is_refused(tiny, tmp_path):
    half_done(tiny, tmp_path / "a")
    half_done(replace(tiny, seed=1), tmp_path / "b")
    (tmp_path / "b" / "checkpoint.pt").replace(tmp_path / "a" / "checkpoint.pt")
    with pytest.raises(InputError, match=r"^checkpoint: .* belongs to another recipe; delete it"):
        train(tiny, out=tmp_path / "a")


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "checkpoint.pt"])
def test_files_of_another_program_are_refused_and_kept(tiny, tmp_path, name):
    (tmp_path / name).write_text('{"my": "own"}\n')
    with pytest.raises(InputError, match=r"^out: .*choose another folder"):
        train(tiny, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"my": "own"}\n'


def test_metrics_that_are_shorter_than_the_checkpoints_know_are_refused(tiny, tmp_path):
    half_done(tiny, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match=r"^checkpoint: .* when metrics.jsonl was longer"):
        train(tiny, out=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    "other",
    [
        {"a": [1, 2], "b": torch.zeros(3)},
        {"a": [1], "b": torch.zeros(3), "c": 2},
        {"a": [1, 2.0], "b": torch.zeros(2)},
        {"a": [1, 2.0], "b": torch.zeros(3, 1)},
        {"a": [1, 2.0], "b": torch.zeros(3, dtype=torch.float64)},
        {"a": [1, 2.0], "b": torch.tensor([0, 0, 1e-45])},
        {"b": torch.zeros(3), "a": [1, 2.0]},
        {"a": [[1], 2.0], "b": torch.zeros(3)},
    ],
    ids=str,
)
def test_a_checksum_sees_every_difference(other):
    content = {"a": [1, 2.0], "b": torch.zeros(3)}
    assert checksum(content) == checksum({"a": [1, 2.0], "b": torch.zeros(3)})
    assert checksum(other) != checksum(content)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 23], [12, 3]),
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}),
        ([[1], 2], [[1, 2]]),
        ({"a": 1}, ["a", 1]),
    ],
    ids=str,
)
def test_a_checksum_sees_where_values_end(one, other):
    assert checksum(one) != checksum(other)


def test_a_checksum_is_of_the_values_and_not_of_their_layout():
    tensor = torch.arange(6.0).view(2, 3)
    assert checksum([tensor.t()]) == checksum([tensor.t().contiguous()])


def test_the_previous_checkpoint_is_one_interval_older(tiny, tmp_path):
    half_done(tiny, tmp_path)
    newest, previous = (
        torch.load(tmp_path / name, weights_only=True)["state"]["update"]
        for name in ("checkpoint.pt", "checkpoint.previous.pt")
    )
    assert (newest, previous) == (5, 4)


def test_a_damaged_checkpoint_never_becomes_the_previous_one(tiny, tmp_path):
    """It would take the place of the last one that is whole."""
    half_done(tiny, tmp_path)
    cut_short(tmp_path / "checkpoint.pt")
    with pytest.warns(UserWarning, match="continuing from checkpoint.previous.pt"):
        half_done(tiny, tmp_path)
    cut_short(tmp_path / "checkpoint.pt")
    with pytest.warns(UserWarning, match="continuing from checkpoint.previous.pt"):
        assert train(tiny, out=tmp_path).status == "finished"


@pytest.mark.parametrize("fused", [None, False])
def test_an_optimizer_keeps_its_devices_kernels_when_it_loads_a_checkpoint(tiny, fused):
    info = find_info(tiny.data)
    state = State(tiny.plan(info.samples), info, torch.device("cpu"))
    saved = state.state_dict()
    saved["optimizer"]["param_groups"][0].update(fused=fused, momentum=0.5)
    state.load_state_dict(saved)
    (group,) = state.optimizer.param_groups
    assert (group["fused"], group["momentum"]) == (True, 0.5)


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path, monkeypatch):
    step, steps = torch.optim.SGD.step, []

    def overflow_at_last(optimizer):
        step(optimizer)
        steps.append(optimizer)
        if len(steps) == 16:
            optimizer.param_groups[0]["params"][0].data.fill_(torch.inf)

    monkeypatch.setattr(torch.optim.SGD, "step", overflow_at_last)
    summary = train(tiny, out=tmp_path, checkpoint_updates=1)
    assert summary.status == "diverged"
    assert summary.reason == "update 16 left weights that are not finite; lower regime.lr"
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["state"]["update"] == 15


def test_a_folder_that_another_run_used_while_this_one_waited_is_refused(
    tiny, tmp_path, monkeypatch
):
    @contextmanager
    def locked_late(path):
        monkeypatch.undo()
        train(replace(tiny, seed=1), out=path)
        yield 0

    monkeypatch.setattr(loop, "locked", locked_late)
    with pytest.raises(InputError, match=r"^out: .* belongs to another recipe \(other seed\)"):
        train(tiny, out=tmp_path)


def test_metrics_that_only_the_previous_checkpoint_fits_continue_from_that(tiny, tmp_path, outcome):
    half_done(tiny, tmp_path / "cut")
    train(tiny, out=tmp_path / "whole")
    lengths = [
        torch.load(tmp_path / "cut" / name, weights_only=True)["metrics"]
        for name in ("checkpoint.previous.pt", "checkpoint.pt")
    ]
    assert lengths[0] < lengths[1]
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as file:
        file.truncate(lengths[1] - 5)
    with pytest.warns(UserWarning, match="continuing from checkpoint.previous.pt"):
        train(tiny, out=tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
