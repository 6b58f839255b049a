"""What a run measures at its evaluations, by hand; and that measuring changes nothing else."""

import json
from dataclasses import replace
from math import inf, isnan, nan

import pytest
import torch
import torch.nn.functional as F
from half_done import half_done
from image_folder import write_images

from ghostbatch import GradientNoiseScale, InputError, Regime, load_run, train
from ghostbatch.data import BatchSplit, PermutationStream, load
from ghostbatch.diagnostics import largest_eigenvalue
from ghostbatch.train import Record, read_records
from ghostbatch.train.measure import Sharpness, check_measures, part_groups, training_loss
from ghostbatch.train.record import MEASURED, parse_records, to_json
from ghostbatch.train.state import State, plain_model

CPU = torch.device("cpu")


def gradients(recipe, size, parts):
    """Return the gradient of each part of the first batches, one network of its own for each."""
    data = load("digits")
    stream = PermutationStream(len(data.train), recipe.batch, recipe.seed)
    found = []
    for part in range(parts):
        batch, place = divmod(part, recipe.batch // size)
        chosen = stream.indices(batch)[place * size : (place + 1) * size]
        model = plain_model(recipe, data.info).double()
        images = (data.train.images[chosen] - data.mean) / data.deviation
        F.cross_entropy(model(images.double()), data.train.labels[chosen]).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(found)


@pytest.mark.parametrize(("ghost", "size"), [(16, 16), (None, 64)])
def test_the_noise_scale_is_that_of_the_coming_ghosts_or_batches(tiny, ghost, size):
    recipe, records = replace(tiny, ghost=ghost, precision="fp64"), []
    train(recipe, device="cpu", noise_scale=True, on_record=records.append)
    first = records[0]
    assert (first.split, first.update) == ("validation", 0)
    pairs = gradients(recipe, size, parts=8).view(4, 2, -1)
    means = pairs.mean(1)
    noise = size * (pairs - means[:, None]).square().sum((1, 2))
    signal = means.square().sum(1) - noise / (2 * size)
    expected = noise.mean() / signal.mean()
    assert first.noise_scale == pytest.approx(float(expected) if expected > 0 else inf, rel=1e-6)
    scale = GradientNoiseScale(torch.nn.Linear(1, 1))
    for pair in pairs:
        scale.update(list(pair), size)
    interval = scale.estimate().interval
    assert (first.noise_scale_low, first.noise_scale_high) == pytest.approx(interval, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "size", "groups", "together"),
    [
        ({"ghost": 16}, 16, 4, 2),  # a short run: 8 ghosts
        ({"ghost": 16, "regime": Regime(lr=0.1, epochs=50)}, 16, 6, 2),  # 200 images
        ({"ghost": 16, "regime": Regime(lr=0.1, epochs=1000)}, 16, 8, 8),  # 64 ghosts, not 250
        ({"ghost": 24}, 24, 4, 2),  # the 16 samples after two ghosts are left out
        ({"ghost": None}, 64, 4, 2),  # plain batch norm: whole batches
        ({"ghost": None, "model": "python:small_networks:without_norms"}, 64, 4, 2),
    ],
    ids=str,
)
def test_the_parts_are_equal_and_lie_in_the_batches_that_follow(
    tiny, changes, size, groups, together
):
    recipe = replace(tiny, **changes)
    state = State(recipe.plan(4000), load("digits").info, CPU)
    state.update = 3
    found = part_groups(state)
    assert [len(group) for group in found] == [together] * groups
    places = [(p.batch, p.start) for group in found for p in group]
    of_batch = recipe.batch // size
    expected = [(3 + n // of_batch, n % of_batch * size) for n in range(groups * together)]
    assert places == expected
    assert {p.size for group in found for p in group} == {size}


def test_measuring_changes_no_other_number(tiny, tmp_path, outcome):
    recipe = replace(tiny, model="python:small_networks:dropping", augment=True, ema=0.9)
    both = {"noise_scale": True, "sharpness": True}
    for name, options in {"plain": {}, "measured": both}.items():
        train(recipe, out=tmp_path / name, device="cpu", threads=1, evaluations=3, **options)
    plain, measured = (outcome(tmp_path / name) for name in ("plain", "measured"))
    for result in (plain, measured):
        lines = [json.loads(line) for line in result["metrics"].splitlines()]
        kept = ({k: v for k, v in line.items() if k not in (*MEASURED, "crc")} for line in lines)
        result["metrics"] = list(kept)
    assert measured == plain


def test_an_interrupted_run_measures_what_it_would_have(tiny, tmp_path, outcome):
    recipe = replace(tiny, model="python:small_networks:dropping", augment=True)
    options = {"device": "cpu", "threads": 1, "noise_scale": True, "sharpness": True}
    half_done(recipe, tmp_path / "cut", **options)
    for name in ("cut", "whole"):
        train(recipe, out=tmp_path / name, **options)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    records = read_records(tmp_path / "cut" / "metrics.jsonl")
    assert all((r.split == "validation") == (r.sharpness is not None) for r in records)


def test_the_sharpness_is_that_of_the_trained_model(tiny, tmp_path):
    train(tiny, out=tmp_path, device="cpu", sharpness=True)
    data, last = load("digits"), read_records(tmp_path / "metrics.jsonl")[-1]
    loss = training_loss(data, CPU, torch.float32)
    assert last.sharpness == pytest.approx(
        float(largest_eigenvalue(load_run(tmp_path), loss)), rel=0.02
    )


def test_a_network_that_has_diverged_has_no_sharpness(tiny):
    data = load("digits")
    state = State(tiny.plan(4000), data.info, CPU)
    with torch.no_grad():
        next(state.model.parameters()).fill_(nan)
    assert isnan(Sharpness(state, data)()["sharpness"])


def test_records_have_the_fields_only_if_they_are_measured_and_an_open_interval_has_no_end():
    base = Record(
        update=1, epoch=1.0, split="validation", loss=1.0, accuracy=1.0, lr=1.0, distance=1.0
    )
    assert not set(json.loads(to_json(base))) & set(MEASURED)
    open_end = replace(base, noise_scale=9.0, noise_scale_low=4.0, noise_scale_high=inf)
    (read,), damaged = parse_records(to_json(open_end).encode() + b"\n")
    assert read == replace(open_end, noise_scale_high=None)
    assert not damaged


def test_what_cannot_be_measured_is_refused_before_anything_is_written(tiny, tmp_path):
    images, out = tmp_path / "images", tmp_path / "run"
    write_images(images)
    folder = replace(tiny, model="resnet44", data=f"folder:{images}", image_size=8, batch=16)
    folder = replace(folder, regime=Regime(lr=0.1, epochs=2))
    with pytest.raises(InputError, match=r"^sharpness: the images .* are not kept in memory"):
        train(folder, out=out, sharpness=True)
    assert not out.exists()
    split = BatchSplit(batch=64, micro=64, world=2, multiple_of=64, needs_full_batch=True)
    with pytest.raises(InputError, match=r"^noise_scale: plain batch norm over several ranks"):
        check_measures(True, False, tiny, load("digits"), split)


def test_a_run_on_an_image_folder_measures_its_noise_scale_and_ends_as_without(tiny, tmp_path):
    images = write_images(tmp_path / "images")
    folder = replace(tiny, model="python:small_networks:dropping", data=f"folder:{images}")
    folder = replace(folder, image_size=12, batch=8, base_batch=8, ghost=4, augment=True)
    records, ends = [], []
    for noise_scale in (False, True):
        options = {"evaluations": 1, "workers": 1, "noise_scale": noise_scale}
        ends.append(train(folder, device="cpu", on_record=records.append, **options).loss)
    assert ends[0] == ends[1]
    assert any(record.noise_scale for record in records)
