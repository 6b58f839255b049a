"""Cross entropy in two kernels, in Triton's interpreter, against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from loss import cross_entropy
from torch.testing import assert_close


@pytest.mark.parametrize(("samples", "classes"), [(64, 10), (37, 100), (5, 16)], ids=str)
def test_loss_accuracy_and_gradient_equal_pytorchs(samples, classes):
    torch.manual_seed(0)
    outputs = (10 * torch.randn(samples, classes)).round().requires_grad_()  # some maxima tie
    labels = torch.randint(classes, (samples,))
    sums = torch.ones(2)
    loss, grad = cross_entropy(outputs, labels, sums)
    exact = F.cross_entropy(outputs, labels)
    assert_close(loss, exact.detach())
    assert_close(grad, *torch.autograd.grad(exact, outputs))
    accuracy = (outputs.argmax(1) == labels).float().mean()
    assert_close(sums, 1 + torch.stack([exact.detach(), accuracy]))


def test_an_output_that_is_not_finite_makes_the_loss_so():
    outputs = torch.zeros(3, 4)
    outputs[1, 2] = torch.nan
    loss, _ = cross_entropy(outputs, torch.zeros(3, dtype=torch.long), torch.zeros(2))
    assert loss.isnan()
