"""Builds the C kernels for fp64, or loads those that are kept."""

import torch

from ghostbatch.ops.backends.c import build

assert build.library(torch.float64).forward
