"""Running statistics over ranks: the same as on one, by one small collective per backward."""

from pathlib import Path

import pytest
from launch_ranks import case_names, ranks_fixture

SCRIPT = Path(__file__).with_name("shared_statistics.py")
on_ranks = ranks_fixture(SCRIPT, 2, 4)


@pytest.mark.parametrize("name", case_names(SCRIPT))
def test_ranks_that_share_statistics(on_ranks, name):
    on_ranks(name)
