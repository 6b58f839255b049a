"""Run by test_select: where Triton cannot be imported there is one warning, and tensor code."""

import sys
import warnings

import torch

sys.modules["triton"] = None  # importing it now fails

from ghostbatch.ops import ghost_batch_norm  # noqa: E402

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        ghost_batch_norm(torch.randn(8, 3), ghost=4)
assert len(seen) == 1, seen
assert "tensor code" in str(seen[0].message), seen
