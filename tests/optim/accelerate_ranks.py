"""The example for Accelerate in docs/large-batch.md on two processes, which torchrun starts."""

import os
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from launch_ranks import Cases
from torch import nn

import ghostbatch as gb

PAGE = (Path(__file__).parents[2] / "docs" / "large-batch.md").read_text()
case = Cases()


def plain_loop():
    """Return the network of the example, trained on one process and whole batches."""
    torch.manual_seed(0)
    x, labels = torch.randn(64, 8), torch.randint(2, (64,))
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    model = gb.to_ghost(nn.Sequential(*layers), ghost=4, process_group=gb.LOCAL)
    stream = gb.data.PermutationStream(64, 16, seed=0)
    for update in range(8):
        chosen = stream.indices(update)
        model.zero_grad()
        F.cross_entropy(model(x[chosen]), labels[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        torch.optim.SGD(model.parameters(), lr=0.2 if update < 4 else 0.02).step()
    return model


@case
def the_example_has_the_weights_of_a_plain_loop_on_one_process():
    os.environ["ACCELERATE_USE_CPU"] = "true"
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (code,) = (block for block in blocks if "Accelerator(" in block)
    names = {}
    exec(compile(code, "large-batch.md", "exec"), names)  # noqa: S102 (our own docs)
    assert names["accelerator"].num_processes == 2
    found = names["accelerator"].unwrap_model(names["model"]).state_dict()
    for name, tensor in plain_loop().state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


if __name__ == "__main__":
    case.run()
