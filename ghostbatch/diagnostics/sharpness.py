"""Sharpness: the largest curvature of a loss, by Lanczos's method on Hessian-vector products.

Rescaling a pair of layers, the inputs of a ReLU times c and its outputs / c, multiplies the weights
by factors and leaves the function alone. With these factors on the diagonal of C, the Hessian H of
the loss becomes C^-1 H C^-1, so that both a small and a large c make its largest eigenvalue as
large as one likes: sharp networks may generalise well (Dinh et al., *Sharp minima can generalize
for deep nets*, 2017). With the weights' magnitudes on the diagonal of D, D H D stays the same,
since D becomes C D. Its largest eigenvalue is the curvature relative to the weights (the second
order of Kwon et al., *ASAM*, 2021). The same holds for a factor that a norm layer divides out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from ghostbatch.diagnostics.scan import batch_statistics, trainable, unchanged
from ghostbatch.draws import key
from ghostbatch.errors import InputError, check_positive

Product = Callable[[Tensor], Tensor]
"""A symmetric matrix, as a function that multiplies a vector by it."""


@dataclass(frozen=True)
class Eigenvalue:
    """The largest eigenvalue of a symmetric matrix; ``float(eigenvalue)`` is its value."""

    value: float
    """The largest, not the largest in magnitude: it is below 0 if all eigenvalues are."""
    residual: float
    """|A v - value v| of the unit vector v found; an eigenvalue of A is at most so far away.

    It is above the tolerance if the iterations were too few.
    """
    iterations: int
    """Products with A that it took."""

    def __float__(self) -> float:
        return self.value


@torch.enable_grad()
def largest_eigenvalue(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    relative: bool = False,
    tolerance: float = 1e-3,
    iterations: int = 100,
    seed: int = 0,
) -> Eigenvalue:
    """Return the largest eigenvalue of the Hessian of a loss over the model's trainable weights.

    Meanwhile batch norm layers use batch statistics, and every other layer is in evaluation mode
    (no dropout), as in `random_potential`. Afterwards, also after an error, parameters, buffers,
    gradients and modes are bit for bit what they were.

    The loss is computed once, and its graph and one vector of the weights' size per iteration are
    kept meanwhile. Whichever kernel computes a ghost norm, its reference code differentiates it
    twice. PyTorch cannot differentiate a compiled model twice, so give the model itself.

    Args:
        model: the Hessian is taken at its weights.
        loss: returns the loss of the model as a scalar with a graph; `BatchedLoss` makes such a
            function from data.
        relative: multiply rows and columns of the Hessian by the weights' magnitudes |w_i|. The
            eigenvalue is then the largest curvature along steps d_i = |w_i| v_i with |v| = 1.
            Rescaling a layer pair (inputs x c, outputs / c) leaves it as it was, but makes the
            plain eigenvalue grow without bound, for large and for small c.
        tolerance: stop when the residual is at most this multiple of the value.
        iterations: largest number of products with the Hessian.
        seed: seeds the first vector.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[1.0, 4.0]]))
    >>> def loss(model):  # curvatures 3 and 1, and -8 between them
    ...     x, y = model.weight[0]
    ...     return 1.5 * x**2 + 0.5 * y**2 - 8 * x * y
    >>> round(largest_eigenvalue(model, loss).value, 3)  # of [[3, -8], [-8, 1]]
    10.062
    >>> round(largest_eigenvalue(model, loss, relative=True).value, 3)  # of [[3, -32], [-32, 16]]
    42.153

    """
    check_positive(iterations=iterations)
    if not tolerance > 0:
        raise InputError("tolerance", f"{tolerance} is not above 0", "use 0.001")
    weights = trainable(model)
    draw = torch.Generator(weights[0].device).manual_seed(key(seed, "eigenvector"))
    with unchanged(model), batch_statistics(model):
        multiply = _hessian(loss(model), weights)
        scale = torch.cat([w.detach().abs().flatten() for w in weights])
        if not relative:
            scale.fill_(1)
        start = torch.randn(scale.shape, generator=draw, device=scale.device, dtype=scale.dtype)
        return lanczos(lambda v: scale * multiply(scale * v), start, tolerance, iterations)


def _hessian(loss: Tensor, weights: list[Tensor]) -> Product:
    """Return the product with the Hessian of a loss, as a function of one long vector."""
    if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
        problem = "does not return a scalar that depends on the trainable weights"
        raise InputError(
            "loss", problem, "compute it from model(inputs), without no_grad or item()"
        )
    gradients = torch.autograd.grad(
        loss, weights, create_graph=True, allow_unused=True, materialize_grads=True
    )
    sizes = [w.numel() for w in weights]
    curved = [index for index, gradient in enumerate(gradients) if gradient.requires_grad]

    def multiply(vector: Tensor) -> Tensor:
        parts = vector.split(sizes)
        found = torch.autograd.grad(
            [gradients[index] for index in curved],
            weights,
            [parts[index].view_as(weights[index]) for index in curved],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([part.flatten() for part in found])

    return multiply if curved else torch.zeros_like


def lanczos(multiply: Product, start: Tensor, tolerance: float, iterations: int) -> Eigenvalue:
    """Return the largest eigenvalue of a symmetric matrix, in the Krylov space of ``start``.

    Every new vector is made orthogonal to all earlier ones, twice. So rounding does not repeat
    eigenvalues, and the residual is what the last coefficients say.
    """
    basis = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        vector = multiply(basis[-1])
        diagonal.append(float(vector @ basis[-1]))
        for _ in range(2):
            for earlier in basis:
                vector = vector - (vector @ earlier) * earlier
        beside.append(float(torch.linalg.vector_norm(vector)))
        if not isfinite(diagonal[-1] + beside[-1]):
            problem = "its second derivatives are not finite"
            raise InputError("loss", problem, "measure a network that has not diverged")
        small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        small += torch.diag(torch.tensor(beside[:-1], dtype=torch.float64), -1)
        values, vectors = torch.linalg.eigh(small)  # which reads the lower triangle
        value, residual = float(values[-1]), beside[-1] * abs(float(vectors[-1, -1]))
        largest = float(values.abs().max())
        exhausted = beside[-1] <= 1e-12 * largest  # the Krylov space holds no other vector
        if exhausted or len(basis) == iterations or residual <= tolerance * abs(value):
            return Eigenvalue(value, residual, len(basis))
        basis.append(vector / beside[-1])
