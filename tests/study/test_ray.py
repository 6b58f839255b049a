"""Studies on a real Ray: two workers on this machine, started once for all tests here."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.study import Row, Study, Where, find_study, run_study
from ghostbatch.study.ray import RayExecutor, _connect, _look
from ghostbatch.train import Record, Summary

ray = pytest.importorskip("ray", reason="Ray is not installed")
CPU = Where(device="cpu", checkpoint_seconds=0.2)


@pytest.fixture(scope="module")
def cluster():
    """Start Ray with two CPUs and little memory; yield its address."""
    handler = signal.getsignal(signal.SIGTERM)
    short = tempfile.TemporaryDirectory(dir="/tmp")  # a socket's path has 107 characters at most
    with pytest.MonkeyPatch.context() as patch, short as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
        context = ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


def run(study, out, on_event=lambda *_: None, where=CPU, jobs=2, address="auto"):
    cells = study.cells(out=out)
    return run_study(
        *(study, cells, out),
        jobs=jobs,
        on_event=on_event,
        where=where,
        make_executor=lambda _lock: RayExecutor(address),
    )


def below(pid):
    """Return the processes that a process has started, and those that they have, and so on."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from below(child)


def ray_workers():
    """Return the processes of Ray that run a job: each has started a worker of ours."""
    found = {}
    for pid in below(os.getpid()):
        if "ghostbatch.study.worker" in Path(f"/proc/{pid}/cmdline").read_text():
            found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return found


@pytest.mark.usefixtures("cluster")
def test_a_study_that_loses_a_ray_worker_ends_bit_identical_to_one_in_this_process(
    tiny, tmp_path, outcome
):
    long = replace(tiny, regime=replace(tiny.regime, epochs=3.2, drops=((1.6, 0.005),)))
    study = Study("small", {"tiny": Row({"one": long})}, seeds=(0, 1))
    killed, ended = [], []

    def kill_one(_, event):
        if isinstance(event, Record) and event.update >= 20 and not killed:
            ours, parent = next(iter(ray_workers().items()))
            assert Path(f"/proc/{parent}/cmdline").read_text().startswith("ray::")
            os.kill(parent, signal.SIGKILL)
            killed.append(ours)
        elif isinstance(event, Summary):
            ended.append(event.status)

    lost = r"^the worker for tiny one seed . died \(WorkerCrashedError: .*attempt 2 of 3\)$"
    with pytest.warns(UserWarning, match=lost):
        assert run(study, tmp_path / "ray", kill_one) == []
    assert ended == ["finished"] * 2
    assert not Path(f"/proc/{killed[0]}").exists()
    run(study, tmp_path / "here", jobs=0)
    for seed in (0, 1):
        cell = Path("tiny") / "one" / f"seed-{seed}"
        assert outcome(tmp_path / "ray" / cell) == outcome(tmp_path / "here" / cell)


def test_at_ctrl_c_a_cell_saves_its_current_update_and_the_next_command_continues(
    cluster, tmp_path
):
    study = find_study("quick")
    (cell,) = study.cells(["SB"], [0], tmp_path)
    folder = cell.folder(tmp_path)
    flags = f"--columns SB --seeds 0 --device cpu --checkpoint-seconds 1000 --ray {cluster}"
    driver = subprocess.Popen(
        [sys.executable, *f"-m ghostbatch study quick --out {tmp_path} {flags}".split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 10):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.02)
    os.killpg(driver.pid, signal.SIGINT)
    _, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 130, stderr
    assert stderr == "ghostbatch: interrupted; run the same command again to continue\n"
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["metrics"] == metrics.stat().st_size, "a record is lost"

    def check(_, event):
        assert event.update > saved["state"]["update"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(
            *(study, [cell], tmp_path),
            jobs=1,
            on_event=check,
            where=CPU,
            make_executor=lambda _lock: RayExecutor(cluster),
        )


@pytest.mark.usefixtures("cluster")
def test_a_refusal_on_a_node_reaches_the_study(tiny, tmp_path):
    study = Study("small", {"tiny": Row({"one": tiny})}, seeds=(0,))
    with pytest.raises(InputError, match=r"^micro: "):
        run(study, tmp_path, where=replace(CPU, micro=48))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("where", "line"),
    [
        (Where(device="cuda"), "device: Ray has no cuda to choose from; use cpu, or"),
        (Where(device="cuda:1"), "device: Ray has no cuda:1 to choose from; use cpu, or"),
        (Where(threads=3), "threads: a job needs 3 CPUs of one node, and no node has more than 2;"),
        (Where(threads=2, ranks=2), "threads: a job needs 4 CPUs of one node, and no node has"),
    ],
    ids=["no-gpu", "one-gpu", "threads", "ranks"],
)
def test_what_no_node_can_run_is_refused_and_nothing_is_written(where, line, tmp_path):
    with pytest.raises(InputError, match=f"^{line}"):
        run(find_study("quick"), tmp_path / "out", where=where)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("cluster")
def test_a_folder_that_a_node_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ghostbatch.study.ray.SEEN_WITHIN", 0.1)
    monkeypatch.setattr(Path, "touch", lambda _path: None)  # as if it were on another disk
    line = f"^out: .* does not see {tmp_path}; use a folder"
    with closing(RayExecutor("auto")) as executor, pytest.raises(InputError, match=line):
        executor.prepare(tmp_path, CPU)


def test_a_node_that_can_take_the_lock_of_a_study_does_not_see_it(tmp_path):
    (tmp_path / "probe").touch()
    assert _look(tmp_path / "probe", 0) == (True, False)
    with locked(tmp_path):
        assert _look(tmp_path / "probe", 0) == (True, True)


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^ray: is not installed; .* 'ghostbatch\[ray\]'$"):
        RayExecutor("auto")


def test_an_address_where_nothing_listens_is_refused():
    with pytest.raises(InputError, match=r"^ray: 127.0.0.1:1 cannot be reached \(Connection"):
        _connect(ray, "127.0.0.1:1")


def test_ray_client_is_refused():
    with pytest.raises(InputError, match=r"^ray: Ray Client does not stream"):
        _connect(ray, "ray://host:10001")
