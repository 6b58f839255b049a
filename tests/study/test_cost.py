"""The time of a study, given the pace of a few of its cells."""

from dataclasses import replace

import pytest

from ghostbatch.study import Cost, Row, Study, Where, find_recipe, find_study, measure_cost
from ghostbatch.train import Pace
from ghostbatch.train.loop import schedule

CPU = Where(device="cpu")


@pytest.fixture
def timed(monkeypatch):
    """Time by formula, 1 ms for each image and 32 more; return the plans that were timed."""
    plans = []

    def pace(plan, *_):
        plans.append(plan)
        if plan.recipe.model == "vgg":
            raise RuntimeError("a fault of the network")
        return Pace(update=(plan.recipe.batch + 32) / 1000, evaluation=2.0)

    monkeypatch.setattr("ghostbatch.study.cost.measure_pace", pace)
    return plans


def evaluations(plan, evenly=20):
    """One at the start, and those of a run's schedule."""
    return 1 + len(schedule(plan, evenly)[1])


def test_the_costliest_cell_is_timed_and_the_others_are_in_proportion(timed):
    cells = find_study("quick").cells(seeds=[0, 1])
    cost = measure_cost(cells, CPU, jobs=2)
    assert [plan.recipe.hold for plan in timed] == ["updates"]
    for cell in cells:
        updates = cell.plan.updates
        expected = updates * (cell.recipe.batch + 32) / 1000 + 2 * evaluations(cell.plan)
        assert cost.seconds[cell] == pytest.approx(expected)
    assert cost.places == 2
    assert cost.seconds_in_all == pytest.approx(sum(cost.seconds.values()) / 2)


@pytest.mark.usefixtures("timed")
def test_the_evaluations_that_a_study_asks_for_are_counted():
    quick = find_study("quick")
    seconds = [
        measure_cost(replace(quick, evaluations=number).cells(["LB"], [0]), CPU, 1).seconds_in_all
        for number in (20, 40)
    ]
    (cell,) = quick.cells(["LB"], [0])
    more = evaluations(cell.plan, 40) - evaluations(cell.plan)
    assert more > 10
    assert seconds[1] - seconds[0] == pytest.approx(2 * more)


def test_each_network_is_timed_and_one_that_cannot_be_timed_is_left_out(timed):
    row = Row({"SB": find_recipe("resnet44-cifar10"), "other": find_recipe("vgg-cifar10")})
    cells = Study("two", {"row": row}).cells()
    cost = measure_cost(cells, CPU, jobs=9)
    assert {plan.recipe.model for plan in timed} == {"resnet44", "vgg"}
    assert {cell.recipe.model for cell in cost.seconds} == {"resnet44"}


def test_one_long_cell_takes_as_long_as_it_takes_however_many_jobs_there_are():
    long, *others = cells = find_study("quick").cells()
    seconds = {long: 100.0, **dict.fromkeys(others, 1.0)}
    assert Cost(cells, seconds, places=8).seconds_in_all == 100


@pytest.mark.usefixtures("timed")
def test_cells_on_gpus_count_one_after_the_other_on_each(monkeypatch):
    monkeypatch.setattr("ghostbatch.study.cost.torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("ghostbatch.study.cost.find_device", lambda name: name)
    cells = find_study("quick").cells()
    assert measure_cost(cells, Where(), jobs=8).places == 2
    assert measure_cost(cells, replace(Where(), device="cuda:1"), jobs=8).places == 1


def test_nothing_is_timed_when_nothing_is_left(timed):
    cost = measure_cost([], CPU, jobs=2)
    assert (timed, cost.seconds_in_all, cost.images) == ([], 0, 0)
