"""The executor of this machine: worker processes."""

import os
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study import Where, WorkerDied
from ghostbatch.study.executor import Job
from ghostbatch.study.local import LocalExecutor
from ghostbatch.train import Summary, read_header

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


def test_a_job_on_a_gpu_has_a_worker_to_itself_which_ends_with_it(executor, tiny, tmp_path):
    list(executor.submit(Job("one", tiny, tmp_path / "one", CPU)))
    with pytest.raises(InputError, match=r"^device: cuda:99 is not available"):
        list(executor.submit(Job("two", tiny, tmp_path / "two", Where(device="cuda:99"))))
    assert [worker.poll() for worker in executor._workers] == [None, 0]


@pytest.mark.parametrize(("threads", "used"), [(None, 2), (1, 1)], ids=["pytorchs-choice", "one"])
def test_a_worker_has_the_threads_of_its_job(executor, tiny, tmp_path, monkeypatch, threads, used):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what PyTorch would choose
    list(executor.submit(Job("one", tiny, tmp_path, replace(CPU, threads=threads))))
    assert read_header(tmp_path)["threads"] == used


def test_a_worker_that_is_killed_is_reported_by_the_name_of_its_job(executor, tiny, tmp_path):
    events = executor.submit(Job("row column seed 0", tiny, tmp_path / "run", CPU))
    next(events)
    os.kill(executor._workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        list(events)
    assert str(caught.value) == "the worker for row column seed 0 died (SIGKILL)"


def test_a_worker_that_died_while_idle_is_not_given_a_job(executor, tiny, tmp_path):
    list(executor.submit(Job("one", tiny, tmp_path / "one", CPU)))
    executor._workers[0].kill()
    executor._workers[0].wait()
    *_, summary = executor.submit(Job("two", tiny, tmp_path / "two", CPU))
    assert isinstance(summary, Summary)
    assert len(executor._workers) == 2


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
