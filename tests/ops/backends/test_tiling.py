"""How a batch is cut into tiles for the Triton kernels."""

import pytest
import torch

from ghostbatch.ops import ghost_sizes
from ghostbatch.ops.backends.triton.tiling import Tuning, make_plan


@pytest.mark.parametrize("samples", [5, 16, 100, 112, 4096])
@pytest.mark.parametrize("shape", [(16, 32, 32), (64, 7, 7), (512,), (3, 5), (96, 8, 8)], ids=str)
@pytest.mark.parametrize("planes", [True, False], ids=["planes", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_covers_the_batch_and_its_delay_is_at_least_a_group(samples, shape, planes, dtype):
    plan = make_plan((samples, *shape), dtype, planes, 32, Tuning(), 132)
    given, sizes = plan.arguments, ghost_sizes(samples, 32)
    tile_rows = given["SUB"] * given["U"] * given["R"]
    assert given["blocks"] * given["BC"] >= shape[0] > (given["blocks"] - 1) * given["BC"]
    for rows, tiles in (("ghost_rows", "tiles"), ("last_rows", "last_tiles")):
        assert given[tiles] * tile_rows >= given[rows] > (given[tiles] - 1) * tile_rows
    pixels = given["ghost_rows"] // sizes[0]
    assert given["last_rows"] == sizes[-1] * pixels
    assert given["delay"] >= max(given["tiles"], given["last_tiles"])
    assert given["ghosts"] == len(sizes)
    assert plan.grid >= 1
