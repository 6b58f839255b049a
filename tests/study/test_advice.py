"""What to change when the batch grows."""

import pytest

from ghostbatch.study import find_recipe
from ghostbatch.study.advice import advice_for


@pytest.mark.parametrize(
    ("ghost", "value", "reason"),
    [(128, "128 samples, 32 ghosts a batch", "each ghost"), (None, "plain batch norm", "--ghost")],
)
def test_the_reason_for_a_norm_is_of_that_norm(ghost, value, reason):
    small = find_recipe("resnet44-cifar10")
    plans = (each.plan(50_000) for each in (small, small.large(4096, ghost=ghost)))
    (advice,) = (each for each in advice_for(*plans) if each.setting == "ghost")
    assert advice.value == value
    assert advice.reason.startswith(reason)
