"""The network of a run: it has the ghosts that its recipe says, or the run is refused."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ghostbatch import InputError, Recipe, Regime, train
from ghostbatch.data import find_info
from ghostbatch.nn.norm import GhostBatchNorm
from ghostbatch.train.device import PROCESS
from ghostbatch.train.state import can_share_process, initial_model


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            "other_norms",
            "ghost: 8 (OtherNorm), 9 (OtherNorm), 10 (OtherNorm) and 2 more in "
            "python:small_networks:other_norms cannot be converted to ghost layers; "
            "set ghost to None, or let gb.register_conversion know the class",
        ),
        (
            "without_norms",
            "ghost: python:small_networks:without_norms has no batch norm layers; "
            "set ghost to None",
        ),
    ],
)
def test_a_ghost_size_that_layers_would_not_have_is_refused_before_anything_is_written(
    tiny, tmp_path, network, message
):
    recipe = replace(tiny, model=f"python:small_networks:{network}")
    with pytest.raises(InputError) as refused:
        train(recipe, out=tmp_path / "run")
    assert str(refused.value) == message
    assert not list(tmp_path.iterdir())
    initial_model(replace(recipe, ghost=None), find_info("digits"))


def test_a_timm_network_has_ghosts_in_every_norm():
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    recipe = Recipe(
        model="timm:regnetx_002",
        data="synthetic:3x32x32",
        batch=64,
        base_batch=64,
        regime=Regime(lr=0.1, epochs=1),
        ghost=16,
    )
    model = initial_model(recipe, find_info(recipe.data))
    norms = [m for m in model.modules() if hasattr(m, "running_mean")]
    assert len(norms) > 30
    assert all(isinstance(norm, GhostBatchNorm) and norm.ghost == 16 for norm in norms)


@pytest.mark.parametrize("model", ["f1", "c1"], ids=["plain", "with-dropout"])
def test_runs_that_may_share_a_process_use_its_generator_only_to_build(tiny, monkeypatch, model):
    """Other threads may be building their networks at any other moment."""
    recipe = replace(tiny, model=model, regime=replace(tiny.regime, epochs=0.032, drops=()))
    assert can_share_process(recipe)
    held = []
    for name in ("manual_seed", "set_rng_state"):
        original = getattr(torch.random, name)

        def note(*arguments, original=original):
            held.append(PROCESS.locked())
            return original(*arguments)

        for module in (torch, torch.random):
            monkeypatch.setattr(module, name, note)

    def draw(_record):
        states.append(torch.get_rng_state())

    states = [torch.get_rng_state()]
    train(recipe, device="cpu", on_record=draw, evaluations=1)
    assert held
    assert all(held)
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize(
    "change",
    [{"model": "python:small_networks:narrow"}, {"data": "folder:PATH"}],
    ids=["another-network", "image-folder"],
)
def test_what_may_draw_from_the_generator_of_the_process_has_it_to_itself(tiny, change):
    assert not can_share_process(replace(tiny, **{"model": "f1", **change}))
