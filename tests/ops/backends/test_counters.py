"""Counters for kernels that are captured in a CUDA graph, simulated on a CPU."""

import pytest
import torch

from ghostbatch.ops.backends.triton import counters

CPU = torch.device("cpu")


@pytest.fixture(name="capturing")
def _capturing(monkeypatch):
    """Make a store of 100 counters, and pretend that a graph is captured until the test says no."""
    state = {"capturing": True}
    store = counters.Store(torch.zeros(100, dtype=torch.int64))
    monkeypatch.setattr(counters, "_stores", {CPU: store})
    monkeypatch.setattr(counters, "_capturing", lambda _: state["capturing"])
    return state


@pytest.mark.usefixtures("capturing")
def test_each_captured_kernel_gets_zeroed_counters_that_no_other_uses():
    parts = [counters.counters(CPU, 30) for _ in range(3)]
    for number, part in enumerate(parts, 1):
        assert part.tolist() == [0] * 30
        part.add_(number)
    assert [part.unique().tolist() for part in parts] == [[1], [2], [3]]
    assert counters._stores[CPU].cleared.sum() == 30 * 6


def test_without_room_in_the_store_or_a_capture_counters_are_new(capturing):
    counters.counters(CPU, 90).fill_(7)
    assert counters.counters(CPU, 11).tolist() == [0] * 11  # no room for them
    assert counters.counters(CPU, 10).data_ptr() > counters._stores[CPU].cleared.data_ptr()
    capturing["capturing"] = False
    counters._stores[CPU].taken = 0
    assert counters.counters(CPU, 5).tolist() == [0] * 5
    assert counters._stores[CPU].taken == 0


def test_a_store_is_made_once_from_eager_code_and_never_in_a_capture(monkeypatch):
    monkeypatch.setattr(counters, "_stores", {})
    monkeypatch.setattr(counters, "_capturing", lambda _: True)
    counters.make_store(torch.device("cuda", 0))
    counters.make_store(CPU)
    assert counters._stores == {}
    assert counters.counters(CPU, 3).tolist() == [0, 0, 0]
