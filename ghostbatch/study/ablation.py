"""What each remedy does by itself, and what does not help."""

from dataclasses import replace

from ghostbatch.recipe import Recipe
from ghostbatch.recipes import find_recipe
from ghostbatch.study.declare import Row, Study
from ghostbatch.study.rows import drop_by_distance, paper_row, warmed_up

WARM_UP = 5
"""Epochs, as in docs/results.md."""


def ablation() -> Study:
    """One remedy at a time, for ResNet44 on CIFAR-10 at batch 4096.

    Command: ``ghostbatch study ablation``.
    Compares: ghost norm without +LR; how ghosts update the running statistics; the square-root
    against the linear rule, each with and without a warm-up of 5 epochs; ghosts of 16 to 4096;
    clipping, warm-up or neither; noise of the right kind against label noise and dropconnect, both
    of 0.1; drops of the rate by distance against +RA.
    The paper: ghost norm helps by itself; the mean over ghosts is worse than sequential updates;
    clipping acts mostly in the first updates, like a warm-up; label noise and dropconnect did not
    help.
    Expected: not run yet, but for single runs in bf16: sqrt 88.57 %, and 90.38 % with a warm-up (2
    seeds).
    Cost: 1,172 million images per seed at most; the row drop by distance takes 912 million of them.
    """
    recipe = find_recipe("resnet44-cifar10")
    columns = paper_row(recipe, large=4096, ghost=128).columns
    return Study(
        "ablation",
        {
            "ghost norm": _ghost_norm(columns),
            "running statistics": _running(columns["+GBN"]),
            "rule": _rules(columns["+GBN"]),
            "ghost size": _ghost_sizes(columns["+GBN"]),
            "first updates": _first_updates(columns["+GBN"]),
            "kind of noise": _noises(columns["LB"]),
            "drop by distance": drop_by_distance(recipe, large=4096, ghost=128),
        },
    )


def _ghost_norm(columns: dict[str, Recipe]) -> Row:
    """Return ghost norm without and with the scaled rate."""
    alone = replace(columns["+GBN"], lr_rule="none")
    return Row(
        {
            "LB": columns["LB"],
            "GBN without +LR": alone,
            "+LR": columns["+LR"],
            "+GBN": columns["+GBN"],
        }
    )


def _running(recipe: Recipe) -> Row:
    """Return both policies of the running statistics."""
    return Row({"sequential": recipe, "mean": replace(recipe, running="mean")})


def _rules(recipe: Recipe) -> Row:
    """Return both rules of the learning rate, without and with a warm-up."""
    linear = replace(recipe, lr_rule="linear")
    return Row(
        {
            "sqrt": recipe,
            "sqrt warm-up": warmed_up(recipe, WARM_UP),
            "linear": linear,
            "linear warm-up": warmed_up(linear, WARM_UP),
        }
    )


def _ghost_sizes(recipe: Recipe) -> Row:
    """Return ghosts of 16 samples up to one ghost."""
    sizes = [16 * 2**power for power in range(9)]
    return Row({f"ghost {size}": replace(recipe, ghost=size) for size in sizes})


def _first_updates(recipe: Recipe) -> Row:
    """Return what may keep the first updates small."""
    unclipped = replace(recipe, clip=None)
    return Row(
        {
            "clipping": recipe,
            "warm-up": warmed_up(unclipped, WARM_UP),
            "neither": unclipped,
        }
    )


def _noises(recipe: Recipe) -> Row:
    """Return noise with the small batch's covariance, and two kinds that change its structure."""
    note = (
        "Noise scales the covariance of the gradients by batch / base_batch. Label noise and "
        "dropconnect change its structure, and not only its scale."
    )
    return Row(
        {
            "LB": recipe,
            "noise": replace(recipe, noise=True),
            "label noise": replace(recipe, label_noise=0.1),
            "dropconnect": replace(recipe, dropconnect=0.1),
        },
        note=note,
    )
