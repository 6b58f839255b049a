"""Distance and noise scale measured on several ranks are those of the whole model on one."""

from pathlib import Path

import pytest
from launch_ranks import case_names, ranks_fixture

SCRIPT = Path(__file__).with_name("ranks.py")
on_ranks = ranks_fixture(SCRIPT, 2)


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_two_ranks_measure_what_one_measures(on_ranks, name):
    on_ranks(name)
