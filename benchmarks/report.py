"""The time that studies of many finished runs take to list, resume and report, against 5 seconds.

    PYTHONPATH=tests/support python benchmarks/report.py   # writes 250 MB of runs first

1,020 runs are table 1 with 34 seeds; 200 runs are one of its rows with 40 seeds and about 5,000
records each. A command's time is that of a process, with its imports; CPU time is that of all its
threads and processes.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from finished_runs import write_study_folder

from ghostbatch.study import find_study

LIMIT = 5.0


def main() -> None:
    """Write two studies; print the time of each command."""
    table = find_study("table1")
    many = replace(table, seeds=tuple(range(34)))
    row = {"resnet44-cifar10": table.rows["resnet44-cifar10"]}
    long = replace(table, rows=row, seeds=tuple(range(40)))
    with tempfile.TemporaryDirectory() as place:
        first, second = Path(place) / "many", Path(place) / "long"
        write_study_folder(many, first)
        write_study_folder(long, second, evaluations=2420)
        study = ["study", "table1", "--out", str(first), "--seeds", ",".join(map(str, many.seeds))]
        _time("list 1,020 runs", [*study, "--dry-run"])
        _time("resume and report 1,020 runs", study)
        _time("report 1,020 runs", ["report", str(first)])
        _time("report 200 runs of 5,000 records", ["report", str(second)])


def _time(name: str, words: list[str], tries: int = 3) -> None:
    """Run a command some times; print the least of its times."""
    times = []
    for _ in range(tries):
        start, before = time.monotonic(), os.times()
        command = [sys.executable, "-m", "ghostbatch", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        cpu = os.times().children_user - before.children_user
        times.append((time.monotonic() - start, cpu))
    seconds, cpu = min(times)
    print(f"{name:<34}{seconds:5.1f} s, {seconds / LIMIT:4.0%} of {LIMIT:g} s; CPU {cpu:.1f} s")


if __name__ == "__main__":
    main()
