"""The updates and the time to a target accuracy are those of the first evaluation that has it."""

from types import SimpleNamespace

import pytest

from ghostbatch import Recipe, Regime
from ghostbatch.report.runs import Group, Results
from ghostbatch.report.targets import reached, target_figures, time_to_accuracy
from ghostbatch.study import Study

REGIME = Regime(lr=0.1, epochs=10)


def a_run(batch, accuracies, ghost=None, seconds=100.0, status="finished", seed=0):
    """Return a run with evaluations every 10 updates; the first one is before any update."""
    recipe = Recipe(
        model="f1", data="digits", batch=batch, base_batch=32, regime=REGIME, ghost=ghost
    )
    records = [
        SimpleNamespace(update=10 * place, split=split, accuracy=value)
        for place, value in enumerate(accuracies)
        for split in ("validation", "train")
    ]
    for record in records:
        record.accuracy = 100.0 if record.split == "train" else record.accuracy
    updates = 10 * (len(accuracies) - 1)
    summary = SimpleNamespace(updates=updates, seconds=seconds, accuracy=accuracies[-1])
    return SimpleNamespace(
        **{"plan": recipe.plan(4000), "seed": seed, "status": status},
        **{"summary": summary if status != "not finished" else None},
        records=SimpleNamespace(shown=records),
    )


def test_a_target_is_reached_at_the_first_evaluation_at_or_above_it():
    group = Group("SB", [a_run(32, [99, 20, 50, 40, 60]), a_run(64, [1, 50, 2, 3, 4])])
    assert reached(group, 50.0) == [(20, 640, 50.0), (10, 640, 25.0)]
    assert reached(group, 50.5) == [(40, 1280, 100.0), None]


def test_a_diverged_run_reaches_nothing_and_a_run_that_has_not_ended_does_not_count():
    runs = [a_run(32, [0, 90], status=status) for status in ("diverged", "not finished")]
    assert reached(Group("SB", runs), 50.0) == [None]


def test_the_table_of_time_counts_the_seeds_that_reach_the_mean_of_the_first_column():
    small = [a_run(32, [0, 80, 88, 90], seed=0), a_run(32, [0, 70, 80, 94], seed=1)]
    large = [a_run(64, [0, 92, 85], seconds=s, seed=i) for i, s in enumerate((10.0, 30.0))]
    worse = [a_run(64, [0, 10, 20])]
    groups = [Group("SB", small), Group("LB", large), Group("worse", worse), Group("none", [])]
    plot = time_to_accuracy(groups, {})
    assert plot.title == "Time to the accuracy of SB"
    assert plot.fits.headers[1] == "seeds that reach 92.00 %"
    assert plot.fits.lines == [
        ("SB", "1 of 2", "30", "960", "100.0"),
        ("LB", "2 of 2", "10 ± 0", "640 ± 0", "10.0 ± 7.1"),
        ("worse", "0 of 1", "–", "–", "–"),
    ]
    drawn = zip(plot.data["column"], plot.data["accuracy"], plot.data["seconds"], strict=True)
    assert [each for each in drawn if each[0] == "LB"] == [("LB", 92, 10), ("LB", 85, 20)]
    assert time_to_accuracy([Group("SB", [])], {}) is None


def results(rows, targets=(50.0,)):
    return Results(Study("mine", targets=targets), rows, {})


def test_the_fewest_updates_count_of_the_rows_in_which_every_seed_reaches_the_target():
    short = [a_run(32, [0, 60, 60]), a_run(32, [0, 0, 0])]  # one seed does not
    middle = [a_run(32, [0, 0, 60]), a_run(32, [0, 0, 0, 0, 60])]
    long = [a_run(32, [0, 0, 0, 0, 60])] * 2
    rows = {
        name: [Group("plain 32", runs)]
        for name, runs in {"short": short, "middle": middle, "long": long}.items()
    }
    (plot,) = target_figures(results(rows))
    assert plot.fits.lines == [("plain norm", "32", "30 ± 14 (1.00 x; middle)")]
    assert (plot.data["updates"], plot.data["row"]) == ([30], ["middle"])


def test_perfect_scaling_halves_the_updates_at_twice_the_batch():
    runs = {
        "plain 32": a_run(32, [0] * 8 + [60]),
        "plain 128": a_run(128, [0, 0, 0, 60]),
        "ghosts 32": a_run(32, [0] * 8 + [60], 32),
        "ghosts 128": a_run(128, [0, 0, 60], 32),
        "ghosts 512": a_run(512, [0, 0, 40], 32),
    }
    groups = [Group(name, [each]) for name, each in runs.items()]
    (plot,) = target_figures(results({"a row": groups}))
    assert plot.fits.lines == [
        ("plain norm", "32", "80 (1.00 x; a row)"),
        ("plain norm", "128", "30 (1.50 x; a row)"),
        ("ghosts", "32", "80 (1.00 x; a row)"),
        ("ghosts", "128", "20 (1.00 x; a row)"),
        ("ghosts", "512", "not reached"),
    ]
    assert plot.data["perfect"] == pytest.approx([80, 20, 80, 20])


def test_a_study_without_targets_or_without_a_run_that_reaches_one_has_no_figure():
    rows = {"a row": [Group("SB", [a_run(32, [0, 40])])]}
    assert target_figures(results(rows)) == []
    assert target_figures(results(rows, targets=())) == []
