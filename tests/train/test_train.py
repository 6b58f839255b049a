"""One run: the right numbers, the same ones every time, and nothing else touched."""

import json
from dataclasses import replace
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from half_done import half_done

from ghostbatch import Regime, nn, noise_weights, to_ghost, train
from ghostbatch.data import PermutationStream, load
from ghostbatch.draws import generator, key
from ghostbatch.errors import InputError
from ghostbatch.files import locked

FOUR_EPOCHS = Regime(lr=0.05, epochs=4, drops=((2, 0.005),))


def plain_loop(recipe, updates):
    """A run as anyone would write it: PyTorch's own pieces and nothing of ghostbatch.train."""
    data = load(recipe.data)
    torch.manual_seed(key(recipe.seed, "weights"))
    model = nn.find_model(recipe.model)(10, in_channels=1, image_size=28).double()
    if recipe.ghost:
        to_ghost(model, recipe.ghost)
    scale = sqrt(recipe.batch / recipe.base_batch) if recipe.lr_rule == "sqrt" else 1.0
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.regime.lr * scale, momentum=0.9, weight_decay=1e-4
    )
    drop_at, drop_lr = round(updates / 2), recipe.regime.drops[0][1] * scale
    stream = PermutationStream(4000, recipe.batch, recipe.seed)
    losses = []
    mean, deviation = data.mean, data.deviation
    if recipe.normalisation == "authors":
        mean = deviation = 127.5
    for update in range(updates):
        if update == drop_at:
            optimizer.param_groups[0]["lr"] = drop_lr
        if recipe.reset_momentum and update * recipe.batch % len(data.train) == 0:
            (group,) = optimizer.param_groups
            kept = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
            optimizer = torch.optim.SGD(model.parameters(), **kept)
        index = stream.indices(update)
        x = (data.train.images[index].double() - mean) / deviation
        loss = F.cross_entropy(model(x), data.train.labels[index], reduction="none")
        weights = torch.ones(recipe.batch)
        if recipe.noise:
            draw = generator(recipe.seed, "noise", update)
            weights = noise_weights(recipe.batch, recipe.batch, recipe.base_batch, draw)
        optimizer.zero_grad()
        (loss * weights).mean().backward()
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(float(loss.detach().mean()))
    return model, losses


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"ghost": None},
        {"lr_rule": "none", "noise": True},
        {"clip": 0.5},
        {"clip": None},
        {"normalisation": "authors"},
        {"reset_momentum": True, "batch": 1000, "ghost": 100, "regime": FOUR_EPOCHS},
    ],
    ids=str,
)
def test_a_run_is_the_loop_that_anyone_would_write(tiny, tmp_path, change):
    recipe = replace(tiny, precision="fp64", **change)
    records = []
    train(recipe, out=tmp_path, device="cpu", on_record=records.append)
    model, losses = plain_loop(recipe, updates=16)

    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"]["model"]
    torch.testing.assert_close(saved, model.state_dict(), rtol=1e-9, atol=1e-9)
    logged = [r.loss for r in records if r.split == "train"][:10]  # updates 1 to 10, one by one
    assert logged == pytest.approx(losses[:10], rel=1e-9)


def test_accuracy_is_that_of_the_test_set_at_the_last_update(tiny, tmp_path):
    summary = train(replace(tiny, precision="fp64"), out=tmp_path)
    model, _ = plain_loop(tiny, updates=16)
    data = load("digits")
    outputs = model.eval()((data.test.images.double() - data.mean) / data.deviation)
    assert summary.accuracy == pytest.approx(
        100 * (outputs.argmax(1) == data.test.labels).double().mean().item()
    )
    assert summary.loss == pytest.approx(F.cross_entropy(outputs, data.test.labels).item())


def test_repeating_a_run_is_bit_identical(tiny, tmp_path, outcome):
    for name in "ab":
        train(tiny, out=tmp_path / name)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_another_seed_is_another_run(tiny):
    assert train(tiny).loss != train(replace(tiny, seed=1)).loss


@pytest.mark.parametrize("stop", [-1, 0, 6, 8, 15])
def test_an_interrupted_run_ends_bit_identical(tiny, tmp_path, outcome, stop):
    train(tiny, out=tmp_path / "whole")
    half_done(tiny, tmp_path / "cut", stop)
    assert not (tmp_path / "cut" / "summary.json").exists()
    train(tiny, out=tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_resumed_run_keeps_the_threads_it_began_with(tiny, tmp_path, outcome):
    train(tiny, out=tmp_path / "whole", threads=1)
    half_done(tiny, tmp_path / "cut", threads=1)
    train(tiny, out=tmp_path / "cut", threads=2)
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["threads"] == 1
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_run_that_has_ended_is_not_run_again(tiny, tmp_path):
    first = train(tiny, out=tmp_path)
    records = []
    assert train(tiny, out=tmp_path, on_record=records.append) == first
    assert records == []


def test_the_run_folder_holds_what_the_contract_says(tiny, tmp_path):
    summary = train(tiny, out=tmp_path)
    header = json.loads((tmp_path / "run.json").read_text())
    assert {"recipe", "versions", "device", "commit", "threads"} <= header.keys()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert {"update", "epoch", "split", "loss", "accuracy", "lr", "distance"} <= line.keys()
    assert {line["split"] for line in lines} == {"train", "validation"}
    assert lines[-1]["update"] == 16
    assert lines[-1]["lr"] == pytest.approx(0.005 * sqrt(2))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["status"] == "finished"
    assert written["updates"] == summary.updates == 16
    assert written["epochs"] == pytest.approx(0.256)
    assert written["distance"] == lines[-1]["distance"] > 0


def test_distance_is_written_at_updates_evenly_spaced_in_log_time(tiny):
    records = []
    long = replace(tiny, regime=replace(tiny.regime, epochs=1.6))
    train(long, on_record=records.append, evaluations=1)
    updates = [r.update for r in records if r.split == "train"]
    assert updates[:10] == list(range(1, 11))
    assert {11, 13, 14, 16, 18, 20, 22, 25, 28, 32, 35, 40, 45, 50, 56, 63, 71, 79, 89} <= set(
        updates
    )
    assert updates[-1] == 100


def test_divergence_is_said_and_ends_the_run(tiny, tmp_path):
    hot = replace(tiny, regime=replace(tiny.regime, lr=1e25, drops=()), clip=None)
    summary = train(hot, out=tmp_path)
    assert summary.status == "diverged"
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["status"] == "diverged"
    assert written["reason"] == (
        "update 2: the loss is nan, first in the output of layer 4 (Linear); "
        "clip the gradient (clip 5), lower regime.lr or add regime.warmup"
    )
    assert train(hot, out=tmp_path).status == "diverged"


def test_the_callers_random_state_and_threads_are_left_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(tiny, threads=2)
    assert torch.get_num_threads() == 1
    assert torch.rand(3).equal(expected)


def test_without_a_folder_nothing_is_kept(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tiny)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_other_precisions_train_too(tiny, precision):
    assert train(replace(tiny, precision=precision)).accuracy > 50


def test_augmentation_changes_the_images_and_not_the_order(tiny):
    assert train(replace(tiny, augment=True)).loss != train(tiny).loss


def test_a_folder_of_another_recipe_is_refused_and_left_as_it_was(tiny, tmp_path):
    train(tiny, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"out: .*belongs to another recipe \(other seed\)"):
        train(replace(tiny, seed=1), out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_folder_of_a_study_is_refused(tiny, tmp_path):
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match=r"^out: .* holds a study; choose another folder"):
        train(tiny, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]


@pytest.mark.parametrize(
    ("name", "problem"), [("lazy", "has lazy"), ("frozen", "has no trainable")]
)
def test_a_network_that_cannot_be_trained_is_refused(tiny, tmp_path, name, problem):
    recipe = replace(tiny, model=f"python:small_networks:{name}", ghost=None)
    with pytest.raises(InputError, match=f"^model: python:small_networks:{name} {problem}"):
        train(recipe, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_run_trains_wherever_it_is_called(tiny, context):
    with context():
        inside = train(tiny)
    assert replace(inside, seconds=0) == replace(train(tiny), seconds=0)


def test_a_folder_of_an_older_version_continues(tiny, tmp_path, outcome):
    """Its run.json lacks the fields that were added since."""
    train(tiny, out=tmp_path / "whole")
    folder = tmp_path / "old"
    half_done(tiny, folder)
    header = json.loads((folder / "run.json").read_text())
    for added in ("checksum", "data", "backend"):
        del header[added]
    for added in ("reference", "optimizer"):
        del header["recipe"][added]
    (folder / "run.json").write_text(json.dumps(header))
    train(tiny, out=folder)
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_divergence_in_the_last_update_is_divergence(tiny):
    last = replace(tiny, clip=None, regime=replace(tiny.regime, lr=1e38, epochs=0.016, drops=()))
    assert last.plan(4000).updates == 1
    assert train(last).status == "diverged"


def test_a_folder_in_use_is_refused(tiny, tmp_path):
    with locked(tmp_path), pytest.raises(InputError, match=r"^out: .* is in use"):
        train(tiny, out=tmp_path)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_out_that_is_no_time_is_refused(tiny, tmp_path, seconds):
    with pytest.raises(InputError, match=r"^timeout: .* is no time to wait; use 1 to 1e6 seconds$"):
        train(tiny, out=tmp_path / "run", timeout=seconds)
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match=r"^device: quantum is not available here; use cpu"):
        train(tiny, out=tmp_path / "run", device="quantum")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_interrupted_again_before_its_next_record_resumes(tiny, tmp_path, outcome):
    long = replace(tiny, regime=replace(tiny.regime, epochs=1.6, drops=()))
    train(long, out=tmp_path / "whole", evaluations=1)

    # Records are at 40, 45, 50, 56: the checkpoint at 42 comes before the record at 45 is redone.
    for updates in (42, 1):
        half_done(long, tmp_path / "cut", 44, evaluations=1, checkpoint_updates=updates)
    train(long, out=tmp_path / "cut", evaluations=1)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
