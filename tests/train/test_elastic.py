"""A run on two ranks that is stopped, loses a rank, or is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from image_folder import write_images

from ghostbatch.files import locked, parse_line

SCRIPT = Path(__file__).with_name("elastic.py")
FP64 = ("--precision", "fp64")
BAD = ("ant/0.png", "ant/6.png", "bee/1.png", "cow/2.png", "cow/5.png")


class Launch:
    """torchrun with two ranks of a command, as it runs."""

    def __init__(self, folder, seconds, *command, restarts=0):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node=2", f"--max-restarts={restarts}", SCRIPT, folder),
                *(str(seconds), *map(str, command)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def rank(self, number):
        return int((self.folder / f"rank-{number}").read_text())

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self):
        """Exit code, stdout and stderr; a launch that hangs fails the test."""
        try:
            stdout, stderr = self.process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, stdout, stderr


def ours(stderr):
    """The lines that ghostbatch itself has written, without those about bad images."""
    lines = (line for line in stderr.splitlines() if not line.endswith("; it is skipped"))
    return [line for line in lines if line.startswith("ghostbatch: ")]


def checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("elastic")


def on_folder(images):
    """The command for a run of one epoch of 24 images, some of which are bad."""
    write_images(images)
    for name in BAD:
        (images / "train" / name).write_bytes(b"")
    return (
        *("train", "f1-digits", "--model", "python:small_networks:dropping", "--device", "cpu"),
        *("--data", f"folder:{images}", "--image-size", 12, "--batch", 8, "--base-batch", 8),
        *("--ghost", 4, "--regime.epochs", 1, "--regime.drops", ",", "--workers", 1),
        *("--on-bad-image", "skip", "--bad-image-limit", 0.3),
    )


@pytest.fixture(scope="module")
def printed(base, small):
    """A run on two ranks without any interruption, then commands that are refused."""
    commands = [
        (*small, *FP64, "--out", base / "whole", "--download"),
        (*small, *FP64, "--out", base / "sizes", "--micro", 48),
        (*small, *FP64, "--out", base / "whole", "--seed", 1),
        (*small, *FP64, "--out", base / "locked"),
        (*small, *FP64, "--out", "/proc/run"),
        (*small, *FP64, "--out", base / "device", "--device", "quantum"),
        ("study", "quick", "--out", base / "study"),
        (*(w.replace("dropping", "bad_on_rank_one") for w in small), "--out", base / "bad"),
        (*on_folder(base / "images"), "--out", base / "skipped"),
    ]
    words = [word for command in commands for word in (*command, "--then")][:-1]
    with locked(base / "locked"):
        return Launch(base / "first", 0, *words).end()


@pytest.fixture(scope="module")
def whole(base, printed):
    assert printed[0] == 0, printed[2][-3000:]
    return base / "whole"


def test_every_line_is_printed_once(whole, printed):
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    evaluated = [r["update"] for r in records if r["split"] == "validation"]
    lines = printed[1].splitlines()
    first = lines[: 1 + next(n for n, line in enumerate(lines) if line.startswith("finished"))]
    assert [int(n) for n in re.findall(r"^ +(\d+) ", "\n".join(first), re.M)] == evaluated
    assert first[-1].startswith("finished: accuracy ")
    assert sum(line.startswith("recipe ") for line in first) == 1
    assert printed[1].count("finished: ") == 2, "and that of the run on a folder"


def test_refusals_are_one_line_and_an_exit_on_every_rank(base, printed, whole):
    code, _, stderr = printed
    assert code == 0
    for rank in (0, 1):
        codes = re.findall(rf"^rank {rank}: exit (\w+)", stderr, re.MULTILINE)
        assert codes == ["0", "2", "2", "2", "2", "2", "2", "3", "0"]
    problems = [
        "micro: batch 128 does not split into micro-batches of 48 over 2 ranks without "
        "splitting ghosts of 16; use micro 128, 64 or 32",
        f"out: {whole} belongs to another recipe (other seed); choose another folder or delete it",
        f"out: {base / 'locked'} is in use by another process; wait or choose another",
        "out: /proc/run cannot be written to (No such file or directory); choose another folder",
        "device: quantum is not available here; use cpu",
        "study: torchrun would run it once per rank; start it alone; it has --ranks",
    ]
    assert ours(stderr) == [f"ghostbatch: {problem}" for problem in problems]
    assert "Traceback" not in stderr
    assert not [name for name in ("sizes", "device", "study") if (base / name).exists()]


def test_a_bad_value_on_one_rank_ends_all_and_is_traced_to_its_layer(base, printed):
    summary = json.loads((base / "bad" / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("diverged", 0)
    assert summary["reason"] == (
        "update 1: the loss is nan, first in the output of layer 3 (BadOnRankOne); "
        "lower regime.lr or add regime.warmup"
    )
    assert printed[1].count("diverged (update 1: ") == 1


def test_the_images_that_any_rank_has_skipped_are_counted(base, printed):
    _, stdout, stderr = printed
    summary = json.loads((base / "skipped" / "summary.json").read_text())
    assert summary["skipped_images"] == len(BAD)
    assert f"; {len(BAD)} images skipped; {base / 'skipped'}" in stdout
    assert {name for name in BAD if f"{name} cannot be read" in stderr} == set(BAD)


@pytest.fixture(scope="module")
def stopped(base, small):
    """A run whose torchrun got a SIGTERM in the middle."""
    out = base / "stopped"
    launch = Launch(base / "second", 0.1, *small, *FP64, "--out", out)
    launch.until(lambda: (out / "metrics.jsonl").exists() and lines_of(out) >= 8)
    launch.process.send_signal(signal.SIGTERM)
    _, _, stderr = launch.end()
    shutil.copytree(out, base / "on one rank")
    return out, stderr


def lines_of(out):
    return (out / "metrics.jsonl").read_bytes().count(b"\n")


def test_a_sigterm_to_torchrun_saves_the_update_at_hand(stopped):
    out, stderr = stopped
    content = checkpoint(out)
    assert 3 <= content["state"]["update"] < 31
    assert content["metrics"] == (out / "metrics.jsonl").stat().st_size
    assert ours(stderr) == ["ghostbatch: terminated; run the same command again to continue"]


def test_what_was_stopped_on_two_ranks_ends_on_one_with_the_same_numbers(
    base, stopped, launch, small, whole
):
    assert stopped[0].parent == whole.parent == base
    child = launch(*small, *FP64, "--out", base / "on one rank")
    assert child.wait() == 0, child.said
    one, two = (checkpoint(base / name)["state"] for name in ("on one rank", "whole"))
    torch.testing.assert_close(one["model"], two["model"], rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(
        *((base / n / "metrics.jsonl").read_bytes().splitlines() for n in ("on one rank", "whole")),
        strict=True,
    ):
        for found, expected in zip(*(parse_line(r).values() for r in (mine, theirs)), strict=True):
            number = isinstance(expected, float)
            assert found == (pytest.approx(expected, rel=1e-9) if number else expected)


def test_a_stopped_run_that_loses_a_rank_restarts_itself_and_ends_bit_identical(
    base, stopped, small, whole, outcome
):
    """Resumed by two ranks, one of which is killed; torchrun starts both again."""
    out, _ = stopped
    before = checkpoint(out)["state"]["update"]
    launch = Launch(
        *(base / "third", 0.1, *small, *FP64, "--out", out, "--checkpoint-updates", 2), restarts=2
    )
    launch.until(lambda: checkpoint(out)["state"]["update"] >= before + 4)
    os.kill(launch.rank(1), signal.SIGKILL)
    code, stdout, stderr = launch.end()
    assert code == 0, stderr[-3000:]
    assert stdout.count("finished: accuracy") == 1
    assert outcome(out) == outcome(whole)


def test_a_rank_that_stops_ends_the_others_in_one_line_and_keeps_the_checkpoint(
    base, small, whole, launch
):
    out = base / "one rank stands still"
    waiting = Launch(
        *(base / "fourth", 0.1, *small, *FP64, "--out", out),
        *("--checkpoint-updates", 1, "--timeout", 5),
    )
    waiting.until((out / "checkpoint.pt").exists)
    os.kill(waiting.rank(1), signal.SIGSTOP)
    waiting.until(lambda: not runs(waiting.rank(0)))
    os.kill(waiting.rank(1), signal.SIGKILL)  # or torchrun would wait half a minute for it
    code, _, stderr = waiting.end()
    assert code == 1
    assert ours(stderr) == [
        "ghostbatch: a rank did not answer within 5 seconds; end all ranks and run the same "
        "command again to continue from the last checkpoint, with a longer timeout if none was "
        "stopped"
    ]
    assert 1 <= checkpoint(out)["state"]["update"] < 31
    again = launch(*small, *FP64, "--out", out)
    assert again.wait() == 0, again.said
    mine, theirs = (checkpoint(folder)["state"]["model"] for folder in (out, whole))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def runs(process):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
