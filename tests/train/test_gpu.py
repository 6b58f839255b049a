"""On a GPU: the host does not wait for it, and runs continue there from a CPU's checkpoint."""

from dataclasses import replace

import pytest
import torch

from ghostbatch import train
from ghostbatch.data import load, open_feed
from ghostbatch.train.load import evaluate_run, read_run
from ghostbatch.train.ranks import Ranks
from ghostbatch.train.split import split_batch
from ghostbatch.train.state import State, image_format
from ghostbatch.train.update import Update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"augment": True},
        {"noise": True},
        {"clip": None},
        {"label_noise": 0.3, "dropconnect": 0.2},
    ],
    ids=str,
)
def test_an_update_does_not_wait_for_the_gpu(tiny, changes):
    recipe, device, data = replace(tiny, **changes), torch.device("cuda"), load("digits")
    state = State(recipe.plan(data.info.samples), data.info, device)
    settings = {"batch": recipe.batch, "seed": recipe.seed, "augment": recipe.augment}
    feed = open_feed(data, device=device, **image_format(state.model, recipe, device), **settings)
    update = Update(state, feed, split_batch(recipe, state.model, None, 1), Ranks())
    update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.monitor.read().problem is None
    assert state.update == 2


def test_a_run_that_was_interrupted_on_a_cpu_continues_on_a_gpu_and_back(tiny, tmp_path):
    def run_until(update, device):
        def interrupt(record):
            if record.update >= update:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(tiny, out=tmp_path, device=device, on_record=interrupt, checkpoint_updates=1)

    run_until(5, "cpu")
    with pytest.warns(UserWarning, match="continues with backend triton, which rounds differently"):
        run_until(10, "cuda")
    assert train(tiny, out=tmp_path, device="cpu").status == "finished"


@pytest.mark.parametrize("ghost", [None, 16])
def test_recalibrated_statistics_are_those_of_a_cpu(tiny, tmp_path, ghost):
    summary = train(replace(tiny, ghost=ghost), out=tmp_path, device="cuda")
    found = evaluate_run(read_run(tmp_path), torch.device("cpu"), recalibrated=True)
    assert summary.recalibrated_accuracy == pytest.approx(found.accuracy, abs=0.3)
