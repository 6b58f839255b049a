"""Runs jobs as tasks of a Ray cluster.

A task asks Ray for the CPUs and the share of a GPU that its job needs. On its node it starts the
same worker process as `ghostbatch.study.local`, and yields the worker's replies. Ray does not retry
a task, since the study retries lost workers.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from threading import Thread, current_thread, main_thread
from typing import Any
from warnings import warn

from ghostbatch.data.catalog import find_data_dir
from ghostbatch.errors import InputError
from ghostbatch.files import locked
from ghostbatch.optional import import_ray
from ghostbatch.study.executor import Event, Job, LogLine, Where, WorkerDied, forward
from ghostbatch.study.local import PATIENCE, LocalExecutor, log

POLL = 0.5
"""Seconds between two checks of a task whether it is to stop."""

SEEN_WITHIN = 10.0
"""Seconds in which a new file must be seen on every node."""

LOCAL = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
"""Options of a Ray that is started here: jobs put nothing into its object store."""


class RayExecutor:
    """Submits each job as a task; Ray queues those for which no node has room.

    A Ray that this process uses already is used, and left running in the end.

    Args:
        address: of the cluster; "auto" finds the one of this machine, "local" starts one.

    """

    def __init__(self, address: str) -> None:
        self._ray: Any = import_ray()
        self._connected = not self._ray.is_initialized()
        if self._connected:
            _connect(self._ray, address)
        self._stop = _start_stop(self._ray)
        self._run = self._ray.remote(num_returns="streaming", max_retries=0)(_run_job)
        self._tasks: dict[Any, bool] = {}
        """The tasks that have not ended, and whether each has begun."""

    @property
    def cpus(self) -> int:
        """How many CPUs the cluster has now."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def prepare(self, out: Path, where: Where) -> Sequence[str]:
        """Check that every node sees the folder, and that some node is large enough for a job."""
        nodes = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
        resources = [node["Resources"] for node in nodes]
        gpus, cpus = (
            int(max((each.get(what, 0) for each in resources), default=0))
            for what in ("GPU", "CPU")
        )
        if where.device not in (None, "cpu", "cuda") or (where.device == "cuda" and not gpus):
            problem = f"Ray has no {where.device} to choose from"
            raise InputError("device", problem, "use cpu, or cuda where nodes have GPUs")
        device = "cuda" if gpus and where.device != "cpu" else "cpu"
        if device == "cuda" and gpus < where.ranks:
            problem = f"no node has {where.ranks} GPUs, but at most {gpus}"
            raise InputError("ranks", problem, "use fewer ranks, or device cpu")
        if (needed := _cpus(where)) > cpus:
            problem = f"a job needs {needed} CPUs of one node, and no node has more than {cpus}"
            raise InputError("threads", problem, "use fewer threads or ranks")
        self._check_folder(out.absolute(), nodes)
        return (device,)

    def _check_folder(self, out: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a folder that some node does not see; warn where its lock does not hold."""
        probe = out / f".seen-{token_hex(4)}"
        look = self._ray.remote(num_cpus=0, max_retries=0)(_look)
        probe.touch()
        try:
            places = [look.options(scheduling_strategy=_on_node(n["NodeID"])) for n in nodes]
            looks = [place.remote(probe, SEEN_WITHIN) for place in places]
            for node, found in zip(nodes, looks, strict=True):
                host = node["NodeManagerHostname"]
                try:
                    sees, holds = self._ray.get(found)
                except self._ray.exceptions.RayError as error:
                    remedy = "install the same ghostbatch on every node"
                    raise InputError("ray", f"{host} ran no task ({_why(error)})", remedy) from None
                if not sees:
                    problem = f"{host} does not see {out}"
                    raise InputError("out", problem, "use a folder that all nodes share")
                if not holds:
                    problem = f"{host} does not see the lock of {out}"
                    warn(f"{problem}: nothing keeps a second study out", stacklevel=2)
        finally:
            probe.unlink(missing_ok=True)

    def submit(self, job: Job) -> Iterator[Event]:
        """Submit a task for the job, with what it needs, and return its events."""
        where = replace(job.where, data_dir=str(find_data_dir(job.where.data_dir)))
        gpus = job.share if where.ranks == 1 else where.ranks
        needs = {"num_cpus": _cpus(where), "num_gpus": gpus if where.device == "cuda" else 0}
        sent = replace(job, folder=job.folder.absolute(), where=where)
        task = self._run.options(name=job.name, **needs).remote(sent, self._stop)
        self._tasks[task] = False
        return self._events(job, task)

    def _events(self, job: Job, task: Any) -> Iterator[Event]:
        try:
            for reference in task:
                reply = self._ray.get(reference)
                if reply is None:
                    self._tasks[task] = True
                elif isinstance(reply, LogLine):
                    log(reply)
                elif isinstance(reply, Exception):
                    raise reply
                else:
                    yield reply
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(job.name, _why(error)) from None
        finally:
            self._tasks.pop(task, None)

    def close(self) -> None:
        """Have every running job save a checkpoint and end; an interrupt meanwhile kills them."""
        ray, tasks = self._ray, dict(self._tasks)
        running = {task.completed(): task for task, begun in tasks.items() if begun}
        left = list(running)
        try:
            self._stop.ask.remote()
            for task, begun in tasks.items():
                if not begun:
                    ray.cancel(task)
            if left:
                left = ray.wait(left, num_returns=len(left), timeout=PATIENCE + POLL)[1]
        finally:
            for each in left:  # Ray aborts this process if an ended task is cancelled like this
                ray.cancel(running[each], force=True)
            ray.kill(self._stop)
            if self._connected:
                ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, or start one; leave the handler of SIGTERM as it is."""
    if address.startswith("ray://"):
        problem = "Ray Client does not stream what tasks yield"
        raise InputError("ray", problem, "run the command on a node of the cluster, with auto")
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.rpartition(":")
    try:
        if host:  # Ray itself would try for a minute
            socket.create_connection((host, int(port)), timeout=10).close()
        options = LOCAL if address == "local" else {}
        ray.init(address=address, logging_level="error", **options)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"{address} cannot be reached ({_why(error)})"
        remedy = "use the address that ray start printed, or local"
        raise InputError("ray", problem, remedy) from None
    finally:
        if current_thread() is main_thread():
            signal.signal(signal.SIGTERM, handler)


def _start_stop(ray: Any) -> Any:
    """Return an actor on this node that tells the tasks when to stop.

    `ray.cancel` would count a task as ended before it has saved.
    """

    class Stop:  # Ray sends a class that is local to a function as code: nothing is imported there
        def __init__(self) -> None:
            self._asked = asyncio.Event()

        async def ask(self) -> None:
            self._asked.set()

        async def wait(self) -> None:
            await self._asked.wait()

    here = _on_node(ray.get_runtime_context().get_node_id())
    actor = ray.remote(Stop).options(num_cpus=0, max_concurrency=10**6, scheduling_strategy=here)
    return actor.remote()


def _run_job(job: Job, stop: Any) -> Iterator[Event | LogLine | Exception | None]:
    """Run a job in a worker process of this node; a task of Ray. Yield None and then its replies.

    If the study asks to stop, or this task is cancelled, the worker saves a checkpoint and ends.
    """
    yield None
    ray: Any = import_ray()
    asked = stop.wait.remote()
    replies: SimpleQueue[Event | LogLine | Exception | None] = SimpleQueue()
    executor = LocalExecutor(on_log=replies.put)
    try:
        put = partial(forward, executor.submit(job), replies.put)
        Thread(target=put, daemon=True).start()
        while not ray.wait([asked], timeout=0)[0]:
            with suppress(Empty):
                if (reply := replies.get(timeout=POLL)) is None:
                    return
                yield reply
                if isinstance(reply, Exception):
                    return
    finally:
        executor.close()


def _look(probe: Path, seconds: float) -> tuple[bool, bool]:
    """Return whether this node sees a file, and the lock of its folder; a task of Ray."""
    deadline = time.monotonic() + seconds
    while not probe.exists():
        if time.monotonic() > deadline:
            return False, False
        time.sleep(0.1)
    try:
        with locked(probe.parent, patience=0):
            return True, False
    except InputError:  # it is in use, by the study
        return True, True


def _on_node(node: str) -> Any:
    """Return the strategy that schedules a task on this node only."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _cpus(where: Where) -> int:
    """Return how many CPUs a job uses."""
    return (where.threads or 1) * where.ranks


def _why(error: Exception) -> str:
    """Return an error in one line: the first sentence of the last line of its message."""
    line = (str(error).strip().splitlines() or [""])[-1]
    return f"{type(error).__name__}: {line.split('. ')[0]}"
