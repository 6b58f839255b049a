"""The public ghost batch norm function: checks its arguments, then takes the best path."""

from typing import get_args

from torch import Tensor

from ghostbatch.ops.reference import (
    ACTIVATIONS,
    Activation,
    Running,
    ghost_batch_norm_reference,
    ghost_sizes,
    values_per_channel,
)


def ghost_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ghost: int = 128,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    running: Running = "sequential",
    num_batches_tracked: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Batch normalisation over ghosts of ``ghost`` consecutive samples.

    In training each ghost of ``x`` (N, C, ...) is normalised with its own mean and biased
    variance, and the running statistics move in place: one exponential update per ghost, in order
    (``running="sequential"``), or one update with the mean over ghosts (``running="mean"``).
    ``momentum=None`` keeps a cumulative average and needs ``num_batches_tracked``. Otherwise the
    running statistics are used, as ``torch.nn.functional.batch_norm`` does.

    The result is ``activation(norm(x) + residual)``.
    """
    check_ghost(ghost)
    if running not in get_args(Running):
        raise ValueError(f"running must be one of {get_args(Running)}, got {running!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, got {activation!r}")
    if training:
        smallest = x[: min(ghost_sizes(x.shape[0], ghost))]
        if values_per_channel(smallest) == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, "
                f"got a ghost of size {tuple(smallest.shape)}"
            )
    return ghost_batch_norm_reference(
        x,
        running_mean,
        running_var,
        weight,
        bias,
        ghost=ghost,
        training=training,
        momentum=momentum,
        eps=eps,
        running=running,
        num_batches_tracked=num_batches_tracked,
        activation=activation,
        residual=residual,
    )


def check_ghost(ghost: int) -> None:
    """Refuse a ghost size that is not a positive integer."""
    if isinstance(ghost, bool) or not isinstance(ghost, int) or ghost < 1:
        raise ValueError(f"ghost must be a positive integer, got {ghost!r}")
