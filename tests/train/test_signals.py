"""Stop signals: the update at hand is done and saved, and nothing else of it is seen."""

import os
import signal
import threading
import time

import pytest
import torch

from ghostbatch import train

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 138}
WORDS = {
    **{signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"},
    **{signal.SIGHUP: "stopped by SIGHUP", signal.SIGUSR1: "stopped by SIGUSR1"},
}


def saved(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("how", CODES)
def test_one_signal_saves_the_update_at_hand_and_the_run_ends_bit_identical(
    how, launch, small, slowly, tmp_path, whole, outcome
):
    out = tmp_path / "run"
    fault, done = slowly(0.02)
    child = launch(*small, "--out", out, **fault)
    child.until(lambda: done() >= 8)
    child.kill(how)
    assert child.wait(20) == CODES[how]
    assert child.said == [f"ghostbatch: {WORDS[how]}; run the same command again to continue"]
    content = saved(out)
    assert content["state"]["update"] == done() < 31
    assert content["metrics"] == (out / "metrics.jsonl").stat().st_size
    assert not (out / "summary.json").exists()

    again = launch(*small, "--out", out)
    assert again.wait() == 0, again.said
    assert outcome(out) == outcome(whole)


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)],
    ids=lambda s: s.name,
)
def test_a_second_signal_does_not_wait_for_the_update(
    first, second, launch, small, slowly, tmp_path
):
    out = tmp_path / "run"
    fault, done = slowly(10)
    child = launch(*small, "--out", out, **fault)
    child.until((out / "metrics.jsonl").exists)
    time.sleep(0.3)
    child.kill(first)
    time.sleep(0.3)
    began = time.monotonic()
    child.kill(second)
    assert child.wait(5) == CODES[second]
    assert time.monotonic() - began < 2
    assert child.said == [f"ghostbatch: {WORDS[second]}; run the same command again to continue"]
    assert done() == 0
    assert not (out / "checkpoint.pt").exists()


def handlers():
    return [signal.getsignal(number) for number in CODES]


@pytest.fixture
def own():
    """Handlers of the caller that note a signal and go on."""
    heard = []
    before = {n: signal.signal(n, lambda number, _: heard.append(number)) for n in CODES}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(tiny, own, how):
    signal.signal(how, signal.SIG_IGN)
    during = []

    def send(_record):
        os.kill(os.getpid(), how)
        during.append(signal.getsignal(how))

    assert train(tiny, on_record=send).status == "finished"
    assert set(during) == {signal.SIG_IGN}
    assert own == []


def test_handlers_are_the_runs_while_it_goes_and_the_callers_afterwards(tiny, own):
    before, during = handlers(), []
    train(tiny, on_record=lambda _: during.append(handlers()))
    assert own == []
    assert handlers() == before
    assert all(mine != theirs for mine, theirs in zip(during[-1], before, strict=True))

    def fail(_record):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(tiny, on_record=fail)
    assert handlers() == before


@pytest.mark.parametrize("update", [0, 16])
def test_a_callers_handler_is_called_once_when_the_update_is_saved(
    tiny, tmp_path, own, update, outcome
):
    """Also where the signal comes before the first update or after the last."""
    train(tiny, out=tmp_path / "whole")
    seen = []

    def send(record):
        if record.update == update and record.split == "validation" and not seen:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(list(own))

    train(tiny, out=tmp_path / "cut", on_record=send)
    assert seen == [[]], "the handler waits"
    assert own == [signal.SIGTERM]
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_thread_that_is_not_the_main_one_can_run_it(tiny):
    before, found = handlers(), []
    thread = threading.Thread(target=lambda: found.append(train(tiny)))
    thread.start()
    thread.join()
    assert found[0].status == "finished"
    assert handlers() == before
