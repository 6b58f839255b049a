"""Max pooling on a GPU at the pace of its memory, and the mean over all pixels."""

from ghostbatch.ops.pool.functional import max_pool2d, mean_pool2d

__all__ = ["max_pool2d", "mean_pool2d"]
