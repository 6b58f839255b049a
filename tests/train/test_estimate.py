"""How the pace of a run is measured."""

import sys
from dataclasses import replace

import pytest
import torch

from ghostbatch import InputError, Regime
from ghostbatch.data import find_info
from ghostbatch.recipes import find_recipe
from ghostbatch.train import Pace, measure_pace
from ghostbatch.train.capture import WARM_UP, CapturedUpdate
from ghostbatch.train.estimate import PATIENCE, TIMED, TOGETHER, _least_seconds
from ghostbatch.train.loop import schedule
from ghostbatch.train.update import Update

MODULE = sys.modules["ghostbatch.train.estimate"]  # the package has a function of that name
CPU = torch.device("cpu")
SMALL = replace(find_recipe("f1-digits"), model="python:small_networks:narrow")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [0.0]
    monkeypatch.setattr(MODULE, "_now", lambda _device: now[0])
    return now


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_least_of_several_timings_counts_and_the_warm_up_does_not(clock, device):
    warm_up, at_once = (1, 1) if device == "cpu" else (WARM_UP + 1, TOGETHER)
    spent = [0.001] * warm_up + [each for each in (0.2, 0.1, 0.15, 0.3) for _ in range(at_once)]
    durations = iter(spent)

    def act():
        clock[0] += next(durations)

    assert _least_seconds(act, torch.device(device)) == pytest.approx(0.1)
    assert list(durations) == [], "all of them were timed"


def test_what_takes_long_is_timed_twice(clock):
    calls = []

    def act():
        calls.append(clock)
        clock[0] += 3 * PATIENCE

    assert _least_seconds(act, CPU) == pytest.approx(3 * PATIENCE)
    assert len(calls) == 1 + 2


def test_a_cpu_times_the_part_of_a_batch_that_it_can_and_takes_the_rest_in_proportion(monkeypatch):
    batches = []

    def time_run(_plan, batch, *_):
        batches.append(batch)
        return Pace(update=0.005 * batch, evaluation=3.0)

    monkeypatch.setattr(MODULE, "_time_run", time_run)
    info = find_info("digits")
    pace = measure_pace(replace(SMALL, batch=1024).plan(4000), info, CPU)
    assert batches == [8, int(PATIENCE / TIMED / 0.005)]
    assert (pace.update, pace.evaluation) == (pytest.approx(5.12), 3.0)
    measure_pace(SMALL.plan(4000), info, CPU)
    assert batches[3:] == [25]
    measure_pace(replace(SMALL, batch=16).plan(4000), info, CPU)
    assert batches[4:] == [8, 16]


@pytest.mark.parametrize("change", [{}, {"ghost": 512}, {"hold": "updates", "noise": True}])
def test_a_pace_is_measured_without_a_trace(monkeypatch, tmp_path, change):
    """No file, no random number drawn, no other number of threads; a large batch is cut."""
    monkeypatch.chdir(tmp_path)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    recipe = replace(SMALL, **{"batch": 1024, **change})
    pace = measure_pace(recipe.plan(4000), find_info("digits"), CPU, threads=1)
    assert min(pace.update, pace.evaluation) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_any_machine_has_are_refused():
    """OpenMP would end the process."""
    with pytest.raises(InputError, match=r"^threads: 5000 is above 1024; use one per core"):
        measure_pace(SMALL.plan(4000), find_info("digits"), CPU, threads=5000)


@pytest.mark.parametrize("data", ["cifar10", "imagenet"])
def test_the_engine_of_the_run_is_timed(monkeypatch, data):
    """A GPU captures updates unless images are decoded during the run."""
    asked = []

    def choose(_state, _feed, _ranks, capture):
        asked.append(capture)
        return Update

    monkeypatch.setattr(MODULE, "choose_update", choose)
    info = replace(find_info(data), shape=(3, 8, 8))
    monkeypatch.setattr(MODULE, "PATIENCE", 0.01)
    measure_pace(replace(SMALL, data=data).plan(info.samples), info, CPU)
    assert set(asked) == {data == "cifar10"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_captured_graph_is_timed(monkeypatch):
    graphs = []

    class Watched(CapturedUpdate):
        def compute(self):
            super().compute()
            graphs.append(self._graph is not None)

    monkeypatch.setattr(MODULE, "choose_update", lambda *_: Watched)
    measure_pace(SMALL.plan(4000), find_info("digits"), torch.device("cuda"))
    assert graphs[:WARM_UP] == [False] * WARM_UP
    assert all(graphs[WARM_UP:])
    assert len(graphs) > WARM_UP + TOGETHER


def test_a_run_takes_its_updates_and_its_evaluations(tiny):
    plan = tiny.plan(4000)
    evaluations = 1 + len(schedule(plan, 4)[1])
    assert Pace(update=0.5, evaluation=2.0).seconds(plan, 4) == pytest.approx(
        0.5 * plan.updates + 2 * evaluations
    )


def test_a_batch_that_grows_takes_the_time_of_each_of_its_batches(tiny, monkeypatch):
    monkeypatch.setattr(MODULE, "PATIENCE", 0.01)
    plan = replace(tiny, grow=512).plan(4000)
    assert (plan.updates, plan.length) == (9, 16)
    evaluations = 1 + len(schedule(plan, 4)[1])
    assert Pace(update=0.5, evaluation=2.0).seconds(plan, 4) == 0.5 * 16 + 2 * evaluations


def test_a_batch_that_grows_is_timed_before_it_has_grown(tiny, monkeypatch):
    sizes = set()

    class Watched(Update):
        def compute(self):
            sizes.add(self.samples)
            super().compute()

    monkeypatch.setattr(MODULE, "PATIENCE", 0.0)
    monkeypatch.setattr(MODULE, "choose_update", lambda *_: Watched)
    regime = Regime(lr=0.05, epochs=1, drops=((0.001, 0.005),))  # it grows at once
    plan = replace(tiny, ghost=None, grow=512, regime=regime).plan(4000)
    assert measure_pace(plan, find_info("digits"), CPU).update > 0
    assert sizes == {8}
