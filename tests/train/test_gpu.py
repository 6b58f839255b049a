"""On a GPU: the host does not wait for it, and runs continue there from a CPU's checkpoint."""

from dataclasses import replace

import pytest
import torch
from before_update import before_update
from half_done import half_done

from ghostbatch import train
from ghostbatch.train.load import evaluate_run, read_run

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
    update = before_update(replace(tiny, **changes), "cuda")
    update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert update.state.monitor.read().problem is None
    assert update.state.update == 2


def test_a_run_that_was_interrupted_on_a_cpu_continues_on_a_gpu_and_back(tiny, tmp_path):
    half_done(tiny, tmp_path, 4, device="cpu")
    with pytest.warns(UserWarning, match="continues with backend triton, which rounds differently"):
        half_done(tiny, tmp_path, 9, device="cuda")
    assert train(tiny, out=tmp_path, device="cpu").status == "finished"


@pytest.mark.parametrize("ghost", [None, 16])
def test_recalibrated_statistics_are_those_of_a_cpu(tiny, tmp_path, ghost):
    summary = train(replace(tiny, ghost=ghost), out=tmp_path, device="cuda")
    found = evaluate_run(read_run(tmp_path), torch.device("cpu"), recalibrated=True)
    assert summary.recalibrated_accuracy == pytest.approx(found.accuracy, abs=0.3)
