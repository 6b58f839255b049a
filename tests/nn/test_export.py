"""A model trained with ghosts leaves for other programs, and predicts the same there."""

import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import ghostbatch as gb


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(576, 10)),
    )


def images(count):
    return gb.data.load("digits").train.images[:count].float().view(-1, 1, 28, 28) / 255


@pytest.fixture(scope="module")
def trained():
    """Return a network that was trained with ghosts and is plain again, and its predictions."""
    labels = gb.data.load("digits").train.labels
    model = gb.to_ghost(network(), 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, 512, 64):
        optimizer.zero_grad()
        F.cross_entropy(
            model(images(512)[start : start + 64]), labels[start : start + 64]
        ).backward()
        optimizer.step()
    with torch.no_grad():
        predicted = model.eval()(images(7)).softmax(1)
    return gb.to_plain(model), predicted


def assert_predicts(compute, predicted):
    assert_close(compute(images(7)).softmax(1), predicted, rtol=0, atol=1e-6)


def test_a_state_dict_loads_into_the_plain_network(trained):
    model, predicted = trained
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = network()
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert_predicts(plain.eval(), predicted)


def test_torch_export_predicts_the_same(trained):
    model, predicted = trained
    file, any_batch = io.BytesIO(), ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (images(2),), dynamic_shapes=any_batch), file)
    file.seek(0)
    with warnings.catch_warnings(action="ignore"):  # torch 2.11's own, about its buffers
        assert_predicts(torch.export.load(file).module(), predicted)


# torch.onnx decomposes with a check that torch itself deprecates.
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\):FutureWarning")
def test_onnx_runtime_predicts_the_same(trained, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, predicted = trained
    file, any_batch = tmp_path / "model.onnx", ({0: torch.export.Dim("batch")},)
    options = {"dynamo": True, "dynamic_shapes": any_batch, "verbose": False}
    torch.onnx.export(model, (images(2),), file, **options)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    assert_predicts(lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), predicted)
