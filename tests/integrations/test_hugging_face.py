"""What docs/large-batch.md shows for the Hugging Face Trainer does what it says."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ghostbatch as gb
from ghostbatch.optional import import_torchvision

import_torchvision()  # its own import of it would fail where the operators do not load
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

PAGE = (Path(__file__).parents[2] / "docs" / "large-batch.md").read_text()
DROP = gb.Regime(lr=0.2, epochs=2, drops=((1, 0.02),))


@pytest.fixture(scope="module")
def shown():
    """The names that the example defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (code,) = (block for block in blocks if "LargeBatchTrainer" in block)
    names = {}
    exec(compile(code, "large-batch.md", "exec"), names)  # noqa: S102 (our own docs)
    return names


def built(shown):
    """Return the example's network, an optimizer and a scheduler with a drop after 4 updates."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    model = gb.to_ghost(shown["Network"](*layers), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=DROP.lr, momentum=0.9)
    return model, optimizer, gb.RegimeScheduler(optimizer, DROP, samples_per_epoch=64, batch=16)


def fit(shown, folder, resume=None):
    """Train for 6 updates, in two micro-batches each; save after three."""
    model, optimizer, scheduler = built(shown)
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=6,
        save_steps=3,
        gradient_accumulation_steps=2,
        max_grad_norm=5.0,
        ignore_data_skip=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = shown["LargeBatchTrainer"](
        model,
        arguments,
        train_dataset=shown["data"],
        optimizers=(optimizer, scheduler),
        callbacks=[shown["Continue"]()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def test_a_fit_has_the_weights_of_a_plain_loop_and_resumes_in_the_middle_of_an_epoch(
    shown, tmp_path, monkeypatch
):
    two = SimpleNamespace(num_processes=2)  # a prepared scheduler would step twice per update
    monkeypatch.setattr(accelerate.scheduler, "AcceleratorState", lambda: two)
    whole = fit(shown, tmp_path)
    resumed = fit(shown, tmp_path, resume=tmp_path / "checkpoint-3")

    model, optimizer, scheduler = built(shown)
    stream = gb.data.PermutationStream(64, 16, seed=0)
    for update in range(6):
        chosen = [shown["data"][n] for n in stream.indices(update)]
        x = torch.stack([each["x"] for each in chosen])
        labels = torch.tensor([each["labels"] for each in chosen])
        optimizer.zero_grad()
        model(x, labels)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert resumed.state_dict()[name].equal(tensor), name
