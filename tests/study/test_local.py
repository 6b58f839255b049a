"""The executor of this machine: worker processes."""

import os
import pickle
import signal
import sys
import weakref
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study import Where, WorkerDied
from ghostbatch.study.executor import Job
from ghostbatch.study.local import LocalExecutor, _environment, _launch
from ghostbatch.study.worker import _listen, _release
from ghostbatch.train import Summary, read_header, read_records, train

CPU = Where(device="cpu")


@pytest.fixture
def executor(tmp_path):
    with locked(tmp_path / "study") as lock, closing(LocalExecutor(lock)) as executor:
        yield executor


def test_an_idle_worker_is_reused_for_the_next_job(executor, tiny, tmp_path):
    for seed in (0, 1):
        job = Job(f"seed {seed}", replace(tiny, seed=seed), tmp_path / str(seed), CPU)
        *records, summary = executor.submit(job)
        assert records[-1].update == 16
        assert isinstance(summary, Summary)
    assert len(executor._workers) == 1


def test_a_worker_that_refused_a_job_is_reused(executor, tiny, tmp_path):
    with pytest.raises(InputError, match=r"^micro: "):
        list(executor.submit(Job("one", tiny, tmp_path / "one", replace(CPU, micro=48))))
    list(executor.submit(Job("two", tiny, tmp_path / "two", CPU)))
    assert len(executor._workers) == 1


def test_an_error_that_cannot_be_pickled_reaches_the_study_and_its_worker_is_reused(
    executor, tiny, tmp_path
):
    job = Job("one", replace(tiny, model="python:small_networks:unreachable"), tmp_path / "1", CPU)
    with pytest.raises(OSError, match="HTTP Error 404: Not Found") as caught:
        list(executor.submit(job))
    assert caught.value.filename == "http://weights"
    list(executor.submit(Job("two", tiny, tmp_path / "two", CPU)))
    assert len(executor._workers) == 1


def test_a_worker_whose_study_is_gone_in_the_middle_of_a_job_ends(monkeypatch):
    stdin = SimpleNamespace(buffer=BytesIO(pickle.dumps((0, "job" * 9), 4)[:-5]))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="0"):
        _listen(SimpleQueue())


def test_a_device_has_a_worker_of_its_own_which_stays_for_the_next_job(executor, tiny, tmp_path):
    list(executor.submit(Job("one", tiny, tmp_path / "one", CPU)))
    for _ in range(2):
        with pytest.raises(InputError, match=r"^device: cuda:99 is not available"):
            list(executor.submit(Job("two", tiny, tmp_path / "two", Where(device="cuda:99"))))
    assert [worker.process.poll() for worker in executor._workers] == [None, None]


@pytest.mark.parametrize(("threads", "used"), [(None, 2), (1, 1)], ids=["pytorchs-choice", "one"])
def test_a_worker_has_the_threads_of_its_job(executor, tiny, tmp_path, monkeypatch, threads, used):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what PyTorch would choose
    list(executor.submit(Job("one", tiny, tmp_path, replace(CPU, threads=threads))))
    assert read_header(tmp_path)["threads"] == used


def test_a_worker_that_is_killed_is_reported_by_the_name_of_its_job(executor, tiny, tmp_path):
    events = executor.submit(Job("row column seed 0", tiny, tmp_path / "run", CPU))
    next(events)
    os.kill(executor._workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        list(events)
    assert str(caught.value) == "the worker for row column seed 0 died (SIGKILL)"


def test_a_worker_that_died_while_idle_is_not_given_a_job(executor, tiny, tmp_path):
    list(executor.submit(Job("one", tiny, tmp_path / "one", CPU)))
    executor._workers[0].process.kill()
    executor._workers[0].process.wait()
    *_, summary = executor.submit(Job("two", tiny, tmp_path / "two", CPU))
    assert isinstance(summary, Summary)
    assert len(executor._workers) == 2


OWN = "f1"
"""One of our own networks: its runs can share a process."""


def test_jobs_in_threads_of_one_worker_have_the_bits_of_runs_alone(tiny, tmp_path, outcome):
    """They start while another is running; one diverges and one is refused meanwhile."""
    short = replace(tiny, model=OWN)
    long = replace(short, regime=replace(tiny.regime, epochs=0.8))
    hot = replace(short, clip=None, regime=replace(tiny.regime, lr=1e25, drops=()))
    recipes = {"long": long, "short": replace(short, seed=1), "hot": hot}
    jobs = [Job(name, recipe, tmp_path / name, CPU) for name, recipe in recipes.items()]
    refused = Job("refused", short, tmp_path / "refused", replace(CPU, micro=48))
    with closing(LocalExecutor(cpu_jobs=4)) as executor, ThreadPoolExecutor() as pool:
        events = executor.submit(jobs[0])
        while next(events).update < 2:
            pass
        others = [executor.submit(job) for job in (*jobs[1:], refused)]
        *ended, failed = [pool.submit(list, each) for each in (events, *others)]
        assert [each.result()[-1].status for each in ended] == ["finished"] * 2 + ["diverged"]
        with pytest.raises(InputError, match=r"^micro: "):
            failed.result()
        assert len(executor._workers) == 1
    for name, recipe in recipes.items():
        alone = tmp_path / "alone" / name
        train(recipe, out=alone, device="cpu", threads=1)
        assert (tmp_path / name / "metrics.jsonl").read_text() == (
            alone / "metrics.jsonl"
        ).read_text()
        if recipe is not hot:  # which has no checkpoint
            assert outcome(tmp_path / name) == outcome(alone)


def test_jobs_that_might_change_each_others_numbers_have_workers_of_their_own(tiny, tmp_path):
    own = replace(tiny, model=OWN)
    with closing(LocalExecutor(cpu_jobs=4)) as executor:
        jobs = [Job("own", own, tmp_path / "own", CPU)]
        jobs += [Job("other", tiny, tmp_path / "other", CPU)]
        jobs += [Job("crashed before", own, tmp_path / "crashed", CPU, alone=True)]
        jobs += [Job("own too", own, tmp_path / "own too", CPU)]
        for job in jobs:
            executor.submit(job)
        assert [len(worker._replies) for worker in executor._workers] == [2, 1, 1]


@pytest.mark.parametrize(("count", "ranks"), [(2, 1), (1, 2)], ids=["two-threads", "two-ranks"])
def test_at_the_close_every_job_saves_its_current_update(tiny, tmp_path, count, ranks):
    recipe = replace(tiny, model=OWN, regime=replace(tiny.regime, epochs=1000, drops=()))
    where = replace(CPU, checkpoint_seconds=1000, ranks=ranks)
    jobs = [Job("", replace(recipe, seed=n), tmp_path / f"{n}", where) for n in range(count)]
    executor = LocalExecutor(cpu_jobs=2)
    for events in [executor.submit(job) for job in jobs]:
        while next(events).update < 4:
            pass
    executor.close()
    assert len(executor._workers) == 1
    for job in jobs:
        saved = torch.load(job.folder / "checkpoint.pt", weights_only=True)
        assert saved["metrics"] == (job.folder / "metrics.jsonl").stat().st_size


@pytest.fixture
def two_ranks(tiny, tmp_path):
    """A job on two ranks, in fp64: the order of sums shows in the last digits only."""
    recipe = replace(tiny, precision="fp64")
    return Job("two", recipe, tmp_path / "two", replace(CPU, ranks=2, checkpoint_seconds=0))


def test_a_job_on_two_ranks_has_the_numbers_of_one(executor, two_ranks, tmp_path):
    *records, summary = executor.submit(two_ranks)
    alone = train(two_ranks.recipe, out=tmp_path / "one", device="cpu", threads=1)
    assert summary.accuracy == alone.accuracy
    assert summary.distance == pytest.approx(alone.distance, rel=1e-9)
    assert [record.update for record in records] == [
        record.update for record in read_records(tmp_path / "one" / "metrics.jsonl")
    ]


def test_a_job_whose_ghosts_do_not_divide_the_shards_is_refused_as_train_does(executor, two_ranks):
    job = replace(two_ranks, recipe=replace(two_ranks.recipe, ghost=64))
    with pytest.raises(InputError, match=r"^ranks: batch 64 does not split"):
        list(executor.submit(job))


def test_a_killed_rank_is_a_dead_worker_and_its_job_continues(executor, two_ranks):
    long = replace(two_ranks.recipe.regime, epochs=1.6, drops=())  # 100 updates
    job = replace(two_ranks, recipe=replace(two_ranks.recipe, regime=long))
    events = executor.submit(job)
    while next(events).update < 10:
        pass
    launcher = executor._workers[-1].process.pid
    os.kill(children_of(launcher)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"^the worker for two died \(exit code 1\)$"):
        list(events)
    records = list(executor.submit(job))
    assert records[0].update > 0
    assert records[-1].status == "finished"


@pytest.mark.parametrize(
    ("outside", "inside"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a,b,c,d", "c,d")]
)
def test_ranks_see_only_the_gpus_of_their_job(tiny, monkeypatch, outside, inside):
    if outside is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outside)
    job = Job("", tiny, Path(), Where(device="cuda:2,3", ranks=2))
    assert _environment(job.where)["CUDA_VISIBLE_DEVICES"] == inside
    assert pickle.loads(b64decode(_launch(job)[-1])).where.device == "cuda"  # noqa: S301 (ours)


def children_of(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_workers_keep_the_study_locked_until_they_end(tiny, tmp_path):
    folder = tmp_path / "study"
    with locked(folder) as lock:
        (folder / "study.json").touch()  # the lock of a folder without files is removed
        executor = LocalExecutor(lock)
        list(executor.submit(Job("one", tiny, tmp_path / "one", CPU)))
    with pytest.raises(InputError, match="is in use"), locked(folder, patience=0.1):
        pass
    executor.close()
    with locked(folder):
        pass


def test_what_a_worker_logs_is_logged_by_the_study(executor, tiny, tmp_path, caplog):
    recipe = replace(tiny, model="python:small_networks:talking")
    with caplog.at_level("INFO", "ghostbatch"):
        *_, summary = executor.submit(Job("one", recipe, tmp_path / "one", CPU))
    assert summary.status == "finished"
    assert [record.getMessage() for record in caplog.records] == ["building it"]


def test_what_the_frames_of_a_refusal_hold_is_freed_before_the_worker_goes_on():
    """The tensors of a job that did not fit into memory, say."""
    held = []

    def run_out():
        tensor = torch.zeros(4)
        held.append(weakref.ref(tensor))
        raise MemoryError

    try:
        try:
            run_out()
        except MemoryError as lack:
            raise InputError("micro", "it does not fit", "use a smaller one") from lack
    except InputError as error:
        assert held[0]() is not None
        _release(error)
        assert held[0]() is None
