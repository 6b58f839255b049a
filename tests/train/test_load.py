"""From a run folder to its network: the one that was trained, or a clear refusal."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from image_folder import write_images
from small_networks import narrow
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.data import PermutationStream, find_info, load
from ghostbatch.train import export
from ghostbatch.train import load as loading
from ghostbatch.train.export import export_run
from ghostbatch.train.load import evaluate_run, read_run

CPU = torch.device("cpu")


@pytest.fixture
def run(tiny, tmp_path):
    """Return the folder of a finished run."""
    gb.train(tiny, out=tmp_path / "run", device="cpu")
    return tmp_path / "run"


def images(count=5):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 28, 28, generator=draw)


def trained(folder, name="checkpoint.pt"):
    """Return the network of a checkpoint, by PyTorch alone."""
    network = narrow()
    saved = torch.load(folder / name, weights_only=True)
    network.load_state_dict(saved["state"]["model"])
    return network.eval()


# ------------------------------------------------------------------------------------------ loading


def test_the_network_is_the_trained_one_with_plain_norms_in_evaluation_mode(run):
    before = torch.random.get_rng_state()
    network = gb.load_run(run)
    assert torch.random.get_rng_state().equal(before)
    assert not any(module.training for module in network.modules())
    kinds = [type(m) for m in network.modules() if isinstance(m, _BatchNorm)]
    assert kinds == [nn.BatchNorm1d] * 2
    assert network(images()).equal(trained(run)(images()))


def test_the_network_has_the_precision_of_the_run(tiny, tmp_path):
    gb.train(replace(tiny, precision="fp64"), out=tmp_path)
    assert {p.dtype for p in gb.load_run(str(tmp_path)).parameters()} == {torch.float64}


def test_a_damaged_checkpoint_gives_the_one_before_as_when_resuming(tiny, tmp_path):
    gb.train(tiny, out=tmp_path, checkpoint_updates=1)
    (tmp_path / "checkpoint.pt").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"checkpoint.pt .*; continuing from checkpoint.previous"):
        network = gb.load_run(tmp_path)
    assert network(images()).equal(trained(tmp_path, "checkpoint.previous.pt")(images()))


def test_a_run_that_has_not_ended_gives_its_last_network_and_says_so(run):
    (run / "summary.json").unlink()
    with pytest.warns(UserWarning, match=r"run has not ended; .* after update 16 of 16$") as warned:
        gb.load_run(run)
    assert warned[0].filename == __file__


def test_a_folder_without_a_run_is_refused(run, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path, run / "run.json"):
        with pytest.raises(gb.InputError, match=r"^run: .* holds no run; name the folder of one"):
            gb.load_run(folder)


def test_a_run_without_a_checkpoint_is_refused(run):
    for path in run.glob("checkpoint*"):
        path.unlink()
    with pytest.raises(gb.InputError, match=r"^run: .* holds no checkpoint; it ended"):
        gb.load_run(run)
    (run / "summary.json").unlink()
    with pytest.raises(gb.InputError, match=r"^run: .* holds no checkpoint; run its command"):
        gb.load_run(run)


def test_a_network_whose_code_has_changed_is_refused(run, monkeypatch):
    monkeypatch.setattr("small_networks.narrow", lambda: nn.Linear(2, 2))
    with pytest.raises(gb.InputError, match=r"^model: python:small_networks:narrow has other para"):
        gb.load_run(run)


def test_the_data_need_not_be_there_if_the_run_wrote_down_its_sizes(run, monkeypatch):
    sizes = {"samples": 4000, "test_samples": 1000, "classes": 10, "shape": [1, 28, 28]}
    read = loading.read_header
    monkeypatch.setattr(loading, "read_header", lambda path: {**read(path), "data": sizes})
    monkeypatch.setattr(loading, "find_info", None)
    assert read_run(run).info == find_info("digits")


# --------------------------------------------------------------------------------------- evaluation


def test_a_runs_network_has_the_numbers_of_its_summary(run, tiny):
    found = evaluate_run(read_run(run), CPU)
    summary = gb.train(tiny, out=run)
    assert (found.loss, found.accuracy) == (summary.loss, summary.accuracy)
    assert found.agrees_with(summary)
    assert not found._replace(accuracy=found.accuracy + 1).agrees_with(summary)
    assert not found._replace(loss=found.loss + 0.01).agrees_with(summary)


def test_recalibrated_numbers_are_those_of_averages_over_the_runs_ghosts(run, tiny):
    data = load("digits")
    stream = PermutationStream(4000, tiny.batch, tiny.seed)
    mean, deviation = float(data.mean), float(data.deviation)

    def prepared(part):
        return (part.float() - mean) / deviation

    network = gb.to_ghost(gb.load_run(run), tiny.ghost)
    gb.recalibrate(network, (prepared(data.train.images[stream.indices(u)]) for u in range(16)))
    with torch.no_grad():
        outputs = network(prepared(data.test.images))
    saved = read_run(run)
    found = evaluate_run(saved, CPU, recalibrated=True)
    assert found.loss == pytest.approx(float(F.cross_entropy(outputs, data.test.labels)), rel=1e-4)
    assert saved.model(images()).equal(trained(run)(images()))  # this one is left as it was


# ------------------------------------------------------------------------------------------- export


def test_an_exported_state_dict_is_that_of_the_plain_network(run, tmp_path):
    export_run(read_run(run), tmp_path / "network.pt")
    network = narrow()
    network.load_state_dict(torch.load(tmp_path / "network.pt", weights_only=True))
    assert network.eval()(images()).equal(trained(run)(images()))


def test_an_exported_program_computes_the_same_for_any_batch(run, tmp_path):
    export_run(read_run(run), tmp_path / "network.pt2")
    with warnings.catch_warnings(action="ignore"):  # torch 2.11's own, about its buffers
        program = torch.export.load(tmp_path / "network.pt2").module()
    for count in (1, 2, 7):
        assert_close(program(images(count)), trained(run)(images(count)))


def test_an_onnx_file_computes_the_same_for_any_batch(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_run(read_run(run), tmp_path / "network.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx")
    for count in (1, 2, 7):
        (outputs,) = session.run(None, {"images": images(count).numpy()})
        expected = trained(run)(images(count)).detach()
        assert_close(torch.from_numpy(outputs), expected, rtol=0, atol=1e-5)


def test_without_onnxruntime_it_is_said_that_the_file_was_not_compared(
    run, tmp_path, monkeypatch, caplog
):
    pytest.importorskip("onnxscript")
    found = export.find_spec
    hide = ("onnxruntime",)
    monkeypatch.setattr(export, "find_spec", lambda name: None if name in hide else found(name))
    with caplog.at_level("INFO", "ghostbatch"):
        export_run(read_run(run), tmp_path / "network.onnx")
    assert "onnxruntime is not installed, so the file is not compared" in caplog.text
    assert (tmp_path / "network.onnx").exists()


class Branching(nn.Module):
    """Takes another way for each input, which no exporter follows."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("ending", [".pt2", ".onnx"])
def test_a_network_that_cannot_be_exported_is_one_line_and_keeps_the_old_file(
    run, tmp_path, ending
):
    target = tmp_path / f"network{ending}"
    target.write_text("old")
    saved = replace(read_run(run), model=Branching())
    with pytest.raises(gb.InputError, match=r"^to: python:.* cannot be exported as \.") as refused:
        export_run(saved, target)
    assert "\n" not in str(refused.value)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [target.name]


def test_images_of_another_size_are_evaluated_at_that_size(tmp_path):
    write_images(tmp_path / "images")
    recipe = gb.Recipe(
        model="python:small_networks:narrow",
        data=f"folder:{tmp_path / 'images'}",
        image_size=16,
        batch=4,
        base_batch=4,
        regime=gb.Regime(lr=0.01, epochs=1),
    )
    summary = gb.train(recipe, out=tmp_path / "run", device="cpu", workers=1)
    found = evaluate_run(read_run(tmp_path / "run"), torch.device("cpu"))
    assert found.agrees_with(summary)
    next((tmp_path / "images" / "val").rglob("*.png")).unlink()
    with pytest.raises(gb.InputError, match=r"^data: .* fewer than when this run began"):
        evaluate_run(read_run(tmp_path / "run"), torch.device("cpu"))
