"""Ghost layers with the rest of PyTorch: compilers, exporters, autocast, copies, averaging."""

import copy
import pickle
import shutil
from types import MappingProxyType

import pytest
import torch
from norm_inputs import EACH_LAYER
from torch import nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

import ghostbatch as gb
from ghostbatch.errors import InputError
from ghostbatch.ops import ghost_sizes


def batch(samples, *shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(samples, *shape, generator=generator) + 1).to(dtype)


def network(
    norm2d=gb.GhostBatchNorm2d, norm1d=gb.GhostBatchNorm1d, options=MappingProxyType({"ghost": 4})
):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        norm2d(3, **options),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(12, 4),
        norm1d(4, **options, momentum=None),
    )


def trained(model, called=None, sizes=(10, 10, 10)):
    """Return the losses of a few updates, and the state that they leave."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    target = batch(max(sizes), 4, seed=99)
    for step, samples in enumerate(sizes):
        optimizer.zero_grad()
        y = (called or model)(batch(samples, 1, 4, 4, seed=step))
        loss = (y - target[:samples]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


def learned(layer):
    """Give a layer parameters and statistics that are not the initial ones."""
    for seed, tensor in enumerate((*layer.parameters(), *layer.buffers())):
        if tensor.is_floating_point():
            tensor.data.copy_(batch(*tensor.shape, seed=seed).abs() + 0.5)
    return layer


# --------------------------------------------------------------------------------------- compilers


@pytest.fixture
def dynamo():
    """Reset the compiler, and make it an error to compile twice."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield counters
    torch._dynamo.reset()


def check_compiled(backend, counted, memory_format=torch.contiguous_format):
    model, eager = (network().to(memory_format=memory_format) for _ in range(2))
    found = trained(model, torch.compile(model, fullgraph=True, backend=backend))
    assert_close(found, trained(eager))
    assert model[1].num_batches_tracked == 3 * len(ghost_sizes(10, 4))
    assert counted["stats"]["unique_graphs"] == 1
    assert not counted["graph_break"]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_compiled_model_trains_to_the_numbers_of_an_eager_one_in_one_graph(dynamo, memory_format):
    check_compiled("aot_eager", dynamo, memory_format)


# As it is imported, inductor uses the TorchScript that torch.jit deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_trains_to_the_numbers_of_an_eager_model_in_one_graph(dynamo):
    check_compiled("inductor", dynamo)


def test_a_compiled_model_takes_batches_of_other_sizes():
    torch._dynamo.reset()
    model, eager, sizes = network(), network(), (10, 8, 13, 10, 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(trained(model, compiled, sizes), trained(eager, None, sizes))


def test_a_compiled_model_evaluates_as_an_eager_one(dynamo):
    model = learned(network()).eval()
    x = batch(5, 1, 4, 4)
    assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
    assert not dynamo["graph_break"]


# ---------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_dtypes_that_batch_norm_gives(dtype, training):
    found = []
    for layer in (gb.GhostBatchNorm2d(3, 4), nn.BatchNorm2d(3)):
        x = batch(8, 3, 2, 2, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer.train(training)(x)
        y.sum().backward()
        tensors = (y, x.grad, layer.weight, layer.weight.grad, layer.bias.grad, *layer.buffers())
        found.append([t.dtype for t in tensors])
    assert found[0] == found[1]
    assert found[0][0] == dtype


def test_a_model_under_autocast_trains_as_with_batch_norm_when_the_ghost_holds_the_batch():
    found = []
    for model in (
        network(options={"ghost": 16}),
        network(nn.BatchNorm2d, nn.BatchNorm1d, options={}),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(trained(model))
    for name, value in found[0].items():  # bf16 rounds to 2**-8; three updates add a few of these
        assert_close(value, found[1][name], rtol=5e-2, atol=5e-2, msg=lambda m, n=name: n + m)


# --------------------------------------------------------------------------------------- exporters


def test_an_exported_model_evaluates_as_the_model_does():
    model = learned(network()).eval()
    x = batch(6, 1, 4, 4)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert not any("ghostbatch" in target for target in targets)
    assert any("batch_norm" in target for target in targets)
    for n in (6, 9):
        assert exported.module()(batch(n, 1, 4, 4)).equal(model(batch(n, 1, 4, 4)))


# torch.onnx decomposes with a check that torch itself deprecates.
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\):FutureWarning")
@pytest.mark.parametrize("optimize", [True, False], ids=["folded", "as it is"])
def test_onnx_runtime_evaluates_as_the_model_does(optimize, tmp_path):
    pytest.importorskip("onnxscript")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model, x, file = learned(network()).eval(), batch(6, 1, 4, 4), tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=True, optimize=optimize, verbose=False)
    graph = onnx.load(file).graph
    kinds = [node.op_type for node in graph.node]
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    assert kinds.count("BatchNormalization") == 2 or (optimize and "ReduceMean" not in kinds)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(y), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_torch_script_is_refused_with_what_to_do_and_then_evaluates_as_the_model_does():
    model, x = learned(network()).eval(), batch(6, 1, 4, 4)
    expected = model(x)
    with pytest.raises(InputError, match=r"cannot be scripted; call gb.to_plain\(model\)"):
        torch.jit.script(model)
    assert_close(model(x), expected, rtol=0, atol=0)
    assert_close(torch.jit.script(gb.to_plain(model))(x), expected)


# ---------------------------------------------------------- functional calls, copies and averaging


@EACH_LAYER
@pytest.mark.parametrize("training", [True, False])
def test_functional_call_uses_and_updates_the_tensors_it_is_given(
    ghost_layer, plain_layer, shape, training
):
    del plain_layer
    x, layer = batch(10, *shape), ghost_layer(3, 4).train(training)
    untouched = copy.deepcopy(layer.state_dict())
    given = copy.deepcopy(learned(ghost_layer(3, 4)).state_dict())
    other = ghost_layer(3, 4).train(training)
    other.load_state_dict(given)
    expected = other(x)
    assert torch.func.functional_call(layer, given, (x,)).equal(expected)
    assert_close(given, other.state_dict(), rtol=0, atol=0)
    assert_close(layer.state_dict(), untouched, rtol=0, atol=0)


def test_functional_gradients_are_batch_norms_when_the_ghost_holds_the_batch():
    x, found = batch(8, 3, 2, 2, dtype=torch.float64), []
    options = {"track_running_stats": False, "dtype": torch.float64}  # as PyTorch's docs demand
    for layer in (gb.GhostBatchNorm2d(3, 8, **options), nn.BatchNorm2d(3, **options)):
        learned(layer)

        def loss(parameters, inputs, layer=layer):
            return torch.func.functional_call(layer, parameters, (inputs,)).pow(3).sum()

        gradient = torch.func.grad(loss, argnums=(0, 1))
        found.append(gradient(dict(layer.named_parameters()), x))
    assert_close(found[0], found[1])


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])  # noqa: S301
def test_a_copied_or_pickled_model_is_equal_and_independent(twin):
    model = gb.to_ghost(network(nn.BatchNorm2d, nn.BatchNorm1d, {}), 4, running="mean")
    trained(model)
    other = twin(model)
    assert repr(other) == repr(model)
    assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    before = copy.deepcopy(model.state_dict())
    expected = trained(copy.deepcopy(model))
    assert_close(trained(other), expected, rtol=0, atol=0)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_update_bn_leaves_the_average_over_all_ghosts():
    layer = learned(gb.GhostBatchNorm1d(3, 4, dtype=torch.float64)).eval()
    loader = [batch(n, 3, 2, seed=n, dtype=torch.float64) for n in (12, 10, 5)]
    torch.optim.swa_utils.update_bn(loader, layer)
    ghosts = [g.transpose(0, 1).flatten(1) for x in loader for g in x.split(ghost_sizes(len(x), 4))]
    assert_close(layer.running_mean, torch.stack([g.mean(1) for g in ghosts]).mean(0))
    assert_close(layer.running_var, torch.stack([g.var(1) for g in ghosts]).mean(0))
    assert layer.num_batches_tracked == len(ghosts) == 7
    assert (layer.momentum, layer.training) == (0.1, False)


# ------------------------------------------------------------------------ where it is nn.BatchNorm


@EACH_LAYER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ghost", [16, 17])
def test_a_ghost_that_holds_the_batch_trains_as_batch_norm_in_lower_precision_too(
    ghost_layer, plain_layer, shape, dtype, ghost
):
    found = []
    for layer in (ghost_layer(3, ghost), plain_layer(3)):
        learned(layer)
        x = batch(16, *shape, dtype=dtype).requires_grad_()
        y = layer(x)
        y.backward(batch(16, *shape, seed=1, dtype=dtype))
        grads = [x.grad, *(p.grad for p in layer.parameters())]
        found.append([y.detach(), *grads, *layer.buffers()])
    for ours, theirs in zip(*found, strict=True):  # in bf16 either may round the other way
        tolerance = 2**-7 if ours.dtype == torch.bfloat16 else 1e-5
        assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@EACH_LAYER
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_evaluation_is_batch_norm_bit_for_bit(
    ghost_layer, plain_layer, shape, track, affine, dtype
):
    options = {"track_running_stats": track, "affine": affine, "dtype": dtype}
    found = []
    for layer in (ghost_layer(3, 4, **options), plain_layer(3, **options)):
        learned(layer).eval()
        x = batch(11, *shape, dtype=dtype).requires_grad_()
        y = layer(x)
        y.pow(3).sum().backward()
        found.append([y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def test_turning_tracking_off_later_does_what_batch_norm_does():
    found = []
    for layer in (gb.GhostBatchNorm1d(3, 99), nn.BatchNorm1d(3)):
        learned(layer).track_running_stats = False
        found.append([layer(batch(8, 3)), layer.eval()(batch(8, 3)), *layer.buffers()])
    assert_close(found[0], found[1])


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_tracing_sees_one_node_and_gives_the_same_output(training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), gb.GhostBatchNorm2d(4, ghost=4)).train(training)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert [node.op for node in traced.graph.nodes].count("call_function") == 1
    x = torch.randn(9, 2, 5, 5)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)
    if training:
        for name, buffer in model.named_buffers():
            assert torch.equal(traced.get_buffer(name), buffer), name
