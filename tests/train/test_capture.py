"""Updates as a CUDA graph, against the same updates run eagerly."""

import sys
from dataclasses import replace

import pytest
import torch
from before_update import before_update
from half_done import half_done

import ghostbatch as gb
from ghostbatch import InputError, Regime, train
from ghostbatch.optim import AdamW, LAMBSpec, LARSSpec
from ghostbatch.train.capture import CapturedUpdate
from ghostbatch.train.update import Update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
UPDATES = 8


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def run(kind, recipe, micro=None, updates=UPDATES, is_eager=False):
    """Return the weights, buffers, momentum and metrics after some updates."""
    with torch.random.fork_rng(devices=["cuda"]):
        update = before_update(recipe, "cuda", kind, micro)
        for _ in range(updates):
            update()
    if kind is CapturedUpdate:
        assert (update._graph is None) == is_eager
    saved = update.state.state_dict()
    found = {name: tensor.cpu() for name, tensor in saved["model"].items()}
    for number, buffers in saved["optimizer"]["state"].items():
        found |= {f"{name} {number}": kept.cpu() for name, kept in buffers.items()}
    for name, average in saved.get("average", {"sums": {}})["sums"].items():
        found[f"average of {name}"] = average.cpu()
    found["sums"] = torch.tensor(saved["monitor"]["sums"])
    found["rate"] = torch.tensor(saved["optimizer"]["param_groups"][0]["lr"])
    return found


DROPS = Regime(lr=0.05, epochs=0.256, drops=((0.064, 0.02, 0.0), (0.112, 0.005, 1e-3)), warmup=0.05)
VARIANTS = {
    "as it is": {},
    "plain norm": {"ghost": None},
    "augmented": {"augment": True},
    "noise": {"noise": True},
    "norms without decay": {"decay_norms": False, "model": "c1", "precision": "bf16"},
    "label noise": {"label_noise": 0.3},
    "label smoothing": {"label_smoothing": 0.1},
    "averaged weights": {"ema": 0.9},
    "averaged flat weights": {"ema": 0.9, "model": "c1", "precision": "bf16"},
    "not clipped": {"clip": None},
    "bf16": {"precision": "bf16"},
    "widths that do not fold": {
        "model": "resnet44",
        "precision": "bf16",
        "data": "synthetic:3x30x30:256",
        "regime": Regime(lr=0.05, epochs=4),
    },
    "rates and weight decay that change": {"regime": DROPS},
    "momentum reset at each epoch": {
        "reset_momentum": True,
        "model": "c1",
        "precision": "bf16",
        "data": "synthetic:3x32x32:256",
        "regime": Regime(lr=0.05, epochs=4),
    },
    "adamw": {"optimizer": AdamW()},
    "adamw, rates and weight decay that change": {"optimizer": AdamW(), "regime": DROPS},
    "lars": {"optimizer": LARSSpec(), "model": "c1", "precision": "bf16"},
    "lars, rates and weight decay that change": {"optimizer": LARSSpec(), "regime": DROPS},
    "lamb": {"optimizer": LAMBSpec(), "model": "c1", "precision": "bf16", "decay_norms": False},
    "convolutions, dropout, pooling": {"model": "c1", "precision": "bf16", "augment": True},
    "folded convolutions": {"model": "resnet44", "precision": "bf16"},
    "a network that draws by itself": {"model": "python:small_networks:drawing"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_has_the_bits_of_eager_updates(tiny, variant):
    recipe = replace(tiny, **VARIANTS[variant])
    eager, captured = run(Update, recipe), run(CapturedUpdate, recipe)
    assert eager.keys() == captured.keys()
    different = [name for name in eager if not torch.equal(eager[name], captured[name])]
    assert different == []


def test_micro_batches_in_a_graph_have_the_bits_of_eager_ones(tiny):
    recipe = replace(tiny, model="c1", precision="bf16", augment=True, noise=True)
    eager, captured = run(Update, recipe, micro=32), run(CapturedUpdate, recipe, micro=32)
    assert all(torch.equal(eager[name], captured[name]) for name in eager)


@pytest.mark.parametrize("network", ["f1", "c1", "python:small_networks:drawing"])
def test_a_batch_that_grows_has_a_graph_of_each_size_with_the_bits_of_eager_updates(tiny, network):
    regime = Regime(lr=0.05, epochs=0.304, drops=((0.08, 0.025, 0.0),))  # 5 updates, then 7 of 128
    more = {"precision": "bf16", "augment": True, "label_noise": 0.3} if network == "c1" else {}
    recipe = replace(tiny, model=network, regime=regime, grow=128, **more)
    eager = run(Update, recipe, updates=12)
    # One graph has one seed, so a network that draws by itself runs its larger updates eagerly.
    ours = run(CapturedUpdate, recipe, updates=12, is_eager=network.startswith("python"))
    assert [name for name in eager if not torch.equal(eager[name], ours[name])] == []


def test_a_network_that_draws_by_itself_in_micro_batches_runs_eagerly(tiny):
    recipe = replace(tiny, model="python:small_networks:drawing")
    eager = run(Update, recipe, micro=32)
    ours = run(CapturedUpdate, recipe, micro=32, is_eager=True)
    assert all(torch.equal(eager[name], ours[name]) for name in eager)


def test_a_network_that_draws_on_the_host_runs_eagerly(tiny):
    recipe = replace(tiny, model="python:small_networks:drawing_on_the_host")
    eager, ours = run(Update, recipe), run(CapturedUpdate, recipe, is_eager=True)
    assert all(torch.equal(eager[name], ours[name]) for name in eager)


def test_a_network_that_cannot_be_captured_is_refused_with_the_remedy(tiny):
    recipe = replace(tiny, model="python:small_networks:waiting")
    with pytest.raises(InputError, match=r"^capture: .*cannot be captured"):
        train(recipe, device="cuda")
    assert train(recipe, device="cuda", capture=False).status == "finished"


def test_a_run_that_was_interrupted_has_the_bits_of_one_that_was_not(tiny, tmp_path, outcome):
    recipe, where = replace(tiny, model="c1", precision="bf16", augment=True), torch.device("cuda")
    train(recipe, out=tmp_path / "one", device=where, deterministic=True)
    half_done(recipe, tmp_path / "two", 8, device=where, deterministic=True)
    train(recipe, out=tmp_path / "two", device=where, deterministic=True)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


def test_a_diverging_run_is_noticed_and_no_bad_weights_are_saved(tiny, tmp_path):
    regime = Regime(lr=1e4, epochs=2)
    summary = train(
        replace(tiny, regime=regime, clip=None, ghost=None), out=tmp_path, device="cuda"
    )
    assert summary.status == "diverged"
    assert "update" in summary.reason
    weights = (
        gb.load_run(tmp_path).state_dict().values() if (tmp_path / "checkpoint.pt").exists() else ()
    )
    assert all(bool(w.isfinite().all()) for w in weights)


@pytest.mark.parametrize("network", ["f1", "c1", "resnet44"])
def test_flat_weights_train_as_the_optimizer_does_to_rounding(tiny, network, monkeypatch):
    recipe = replace(tiny, model=network, precision="bf16", augment=True, noise=True)
    flat = run(CapturedUpdate, recipe)
    monkeypatch.setattr(sys.modules[Update.__module__], "uses_flat_weights", lambda *_: False)
    plain = run(CapturedUpdate, recipe)
    loss, correct, norm, clipped = (flat["sums"] - plain["sums"]).abs() / UPDATES
    assert loss < 0.02 * plain["sums"][0] / UPDATES
    assert norm < 0.02 * plain["sums"][2] / UPDATES
    assert correct < 100 * 2 / recipe.batch  # two samples of each batch, in percent
    assert clipped == 0
    assert torch.equal(flat["rate"], plain["rate"])


def test_bf16_stays_near_fp32(tiny):
    recipe = replace(tiny, model="resnet44", augment=True)
    wide, narrow = (run(CapturedUpdate, replace(recipe, precision=p)) for p in ("fp32", "bf16"))
    loss, _, norm, *_ = wide["sums"].tolist()
    assert narrow["sums"][0] == pytest.approx(loss, rel=0.05)
    assert narrow["sums"][2] == pytest.approx(norm, rel=0.2)
