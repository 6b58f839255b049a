"""Memory that does not suffice: the refusal names a micro-batch, and that micro-batch runs."""

import re
from dataclasses import replace

import pytest
import torch
from hungry import NO_MEMORY, hungry

from ghostbatch import train
from ghostbatch.errors import InputError, RankLocalError
from ghostbatch.nn import MODELS


@pytest.fixture
def short_of(monkeypatch):
    """Let the network "hungry" train on so many samples at a time."""
    return lambda *limit, **how: monkeypatch.setitem(MODELS, "hungry", hungry(*limit, **how))


def refusal(recipe, **options):
    with pytest.raises(RankLocalError) as caught:
        train(recipe, device="cpu", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        NO_MEMORY,
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=["GPU", "CPU"],
)
def test_what_the_refusals_name_fits_in_the_end_and_changes_no_number(
    tiny, tmp_path, short_of, error
):
    short_of(64)
    recipe = replace(tiny, model="hungry", precision="fp64")
    whole = train(recipe, device="cpu")

    short_of(16, error)
    micros = []
    while not micros or micros[-1] > 16:
        line = refusal(recipe, out=tmp_path, micro=micros[-1] if micros else None)
        pattern = (
            r"micro: (\d+) samples .* memory; use micro (\d+): the same numbers in less memory"
        )
        tried, following = map(int, re.fullmatch(pattern, line).groups())
        assert tried == (micros[-1] if micros else 64)
        micros.append(following)
    assert micros == [32, 16]
    summary = train(recipe, out=tmp_path, device="cpu", micro=16)
    assert summary.loss == pytest.approx(whole.loss, rel=1e-9)
    assert summary.distance == pytest.approx(whole.distance, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "micro", "remedy"),
    [
        ({}, 16, "use a smaller ghost or network: the micro-batch is one ghost already"),
        (
            {"ghost": None},
            None,
            "use more ranks, or ghost batch norm, which can be split into micro-batches",
        ),
        ({"ghost": 48}, None, "use a batch that 48 divides: it can be split into micro-batches"),
        (
            {"batch": 48, "ghost": 48},
            None,
            "use a smaller ghost or network: the micro-batch is one ghost alrea",
        ),
    ],
    ids=str,
)
def test_where_no_micro_batch_helps_the_refusal_says_what_does(
    tiny, short_of, change, micro, remedy
):
    short_of(0)
    assert remedy in refusal(replace(tiny, model="hungry", **change), micro=micro)


def test_a_network_without_norm_is_cut_to_single_samples(tiny, short_of):
    short_of(1, norm=False)
    bare = replace(tiny, model="hungry", ghost=None)
    assert refusal(bare).endswith("use micro 32: the same numbers in less memory")
    assert refusal(bare, micro=2).endswith("use micro 1: the same numbers in less memory")
    assert train(bare, device="cpu", micro=1).status == "finished"


def test_other_errors_of_the_network_are_its_own(tiny, short_of):
    short_of(0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(replace(tiny, model="hungry"), device="cpu")


@pytest.mark.parametrize("field", ["threads", "evaluations", "checkpoint_updates"])
def test_numbers_below_one_are_refused_by_name(tiny, field):
    with pytest.raises(InputError, match=f"^{field}: 0 is below 1; use 1 or more"):
        train(tiny, **{field: 0})


@pytest.mark.parametrize(
    "option",
    [{"micro": 16.0}, {"micro": "16"}, {"timeout": "60"}, {"on_bad_image": "ignore"}],
    ids=str,
)
def test_options_of_another_kind_are_refused_by_name(tiny, tmp_path, option):
    with pytest.raises(InputError, match=f"^{next(iter(option))}: "):
        train(tiny, out=tmp_path / "run", **option)
    assert not (tmp_path / "run").exists()


def test_an_empty_path_is_not_the_current_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^out: the path is empty; name a folder"):
        train(tiny, out="")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_without_a_gpu_of_its_own_says_so_itself(tiny, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(
        RankLocalError, match=r"^device: cuda:1 is not available here; use as many ranks"
    ):
        train(tiny, device="cuda")
