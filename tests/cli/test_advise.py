"""``ghostbatch advise`` agrees with ``ghostbatch plan``, and with what was published."""

import json
from pathlib import Path
from statistics import mean, stdev

import pytest

from ghostbatch.study.advice import MEASURED, efficiency, images_factor
from ghostbatch.study.paper import table1

RESULTS = Path(__file__).parents[2] / "results" / "table1"
RESNET44 = "--base-batch 128 --epochs 200 --lr 0.1 --drops 81:0.01,122:0.001,164:0.0001".split()
LARGE = ["--batch", "4096"]


def advise(run, *words):
    code, out, err = run("advise", *RESNET44, *words)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("hold", ["epochs", "updates", "rate"])
@pytest.mark.parametrize("more", [[], ["--ghost", "32", "--lr-rule", "linear"]], ids=str)
def test_the_advice_is_what_plan_prints_for_the_same_regime(run, hold, more):
    flags = [*LARGE, "--hold", hold, *more, "--json"]
    planned = json.loads(run("plan", "resnet44-cifar10", *flags)[1])
    advised = json.loads(advise(run, *flags, "--samples", "50000"))
    for which in ("original", "adapted"):
        assert planned[which].items() <= advised[which].items()
        assert set(advised[which]) - set(planned[which]) == {"warmup", "clip"}


@pytest.mark.parametrize("hold", ["epochs", "updates", "rate"])
def test_the_warmup_is_the_one_that_was_measured_whatever_is_held(run, hold):
    words = ("--hold", hold, "--json")
    assert json.loads(advise(run, *LARGE, *words))["adapted"]["warmup"] == 5
    short = json.loads(
        run("advise", *LARGE, *RESNET44[:2], *"--epochs 9 --lr 1".split(), *words)[1]
    )
    epochs = short["adapted"]["epochs"]
    assert short["adapted"]["warmup"] == pytest.approx(min(5, epochs / 10))


def test_a_rate_that_is_not_scaled_needs_no_warmup(run):
    out = advise(run, *LARGE, "--lr-rule", "none")
    assert "\nwarm-up: none\n" in out
    assert "86.00 to 86.10 %" in out


def test_the_warmup_has_the_evidence_of_its_own_rule(run):
    rules = {rule: advise(run, *LARGE, "--lr-rule", rule) for rule in ("sqrt", "linear")}
    found = {rule: text.partition("warm-up: ")[2].splitlines()[2] for rule, text in rules.items()}
    assert found["sqrt"].startswith("  evidence: here, +LR to +LR, warm-up: ResNet44 88.30")
    assert found["linear"].startswith("  evidence: not measured here at this rate; with the")


def test_every_setting_has_its_value_a_reason_and_evidence(run):
    out = advise(run, *LARGE)
    names = ["learning rate", "warm-up", "ghost", "epochs", "clipping"]
    blocks = out.split("\n\n")
    assert blocks[0] == "from batch 128 to batch 4,096"
    assert [block.split(":")[0] for block in blocks[1:-1]] == names
    for block in blocks[1:-1]:
        _, why, evidence = block.split("\n")
        assert why.startswith("  why: ")
        assert evidence.startswith("  evidence: ")
    assert "0.5657, 0.05657 from epoch 2592" in out
    assert "updates: 78,125 before, 78,125 now" in advise(run, *LARGE, "--samples", "50000")


def test_our_figures_are_all_those_of_the_published_runs():
    runs = {}
    for path in RESULTS.glob("*/*/seed-*.json"):
        run = json.loads(path.read_text())
        network, place = run["row"].partition("-")[0], run["column"]
        runs.setdefault(network, {}).setdefault(place, []).append(run["summary"]["accuracy"])
    assert {network.lower() for network in MEASURED} == runs.keys()
    for network, means in MEASURED.items():
        found = {column: mean(each) for column, each in runs[network.lower()].items()}
        assert found == pytest.approx(means, abs=6e-3)
    assert stdev(runs["resnet44"]["+GBN, warm-up"]) == pytest.approx(0.35, abs=6e-3)


def test_the_papers_changes_are_those_between_the_columns_of_its_table(run):
    table = [tuple(row.paper.values()) for row in table1().rows.values()]
    gains = sorted(lr - lb for _, lb, lr, _, _ in table)
    assert gains[0] == pytest.approx(97.55 - 97.05)  # F1
    assert gains[-1] == pytest.approx(57.38 - 51.50)  # C3
    out = advise(run, *LARGE)
    for change in ("LB to +LR: +0.50 to +5.88", "+LR to +GBN: +0.05 to +2.90", "-0.13 to +1.95"):
        assert change in out


def speed(batch, noise_scale):
    """Return the loss that the best step at a batch gains, of the largest possible."""
    rate = 1 / (1 + noise_scale / batch)  # of a quadratic with |G| = H = 1, by its best rate
    variance = noise_scale / batch
    return 2 * rate - rate**2 * (1 + variance)  # twice the expected decrease


@pytest.mark.parametrize("noise_scale", [20.0, 1000.0, 30_000.0])
def test_updates_to_a_loss_are_those_of_the_best_steps_on_a_noisy_quadratic(noise_scale):
    for batch in (128, 1024, 4096):
        factor = images_factor(batch, 128, noise_scale) * 128 / batch
        assert factor == pytest.approx(speed(128, noise_scale) / speed(batch, noise_scale))
        per_image = speed(batch, noise_scale) / batch
        smallest = speed(1e-6, noise_scale) / 1e-6
        assert efficiency(batch, noise_scale) == pytest.approx(per_image / smallest, rel=1e-6)


def test_a_noise_scale_says_whether_the_batch_pays(run):
    out = advise(run, *LARGE, "--noise-scale", "1000", "--interval", "800,1300")
    block = out.split("\n\n")[1]
    assert block.startswith("batch: 4,096 is 4.1 times the noise scale of 1,000 samples [800, 1,3")
    updates, images = "0.141 [0.118, 0.165]", "4.52 [3.78, 5.28]"
    assert f"{updates} times the updates and {images} times the images of batch 128" in block
    page = (RESULTS.parents[1] / "docs" / "noise-scale.md").read_text()
    assert updates in page
    assert images in page
    assert "each image does 19.6 % of what it does in the smallest batches (88.7 % at 128)" in block
    assert "McCandlish et al. 2018" in block
    assert "grows during training" in block
    found = json.loads(advise(run, *LARGE, "--noise-scale", "1000", "--json"))
    assert found["advice"][0]["setting"] == "batch"
    assert "0.141 times the updates and 4.52 times" in found["advice"][0]["reason"]
    assert "[1, 32] times the images" in advise(
        run, *LARGE, "--noise-scale", "9", "--interval", "0,inf"
    )


def test_plan_says_it_in_the_words_of_advise(run):
    words = (*LARGE, "--noise-scale", "1000", "--interval", "800,1300")
    block = advise(run, *words).split("\n\n")[1]
    out = run("plan", "resnet44-cifar10", *words)[1]
    assert out.endswith(f"\n\n{block}\n")
    plain = json.loads(run("plan", "resnet44-cifar10", *LARGE, "--json")[1])
    found = json.loads(run("plan", "resnet44-cifar10", *words, "--json")[1])
    assert found.pop("advice") == json.loads(advise(run, *words, "--json"))["advice"][:1]
    assert found == plain
    code, out, err = run("plan", "f1-digits", *"--batch 32 --interval 8,9".split())
    assert (code, out) == (2, "")
    assert err.startswith("ghostbatch: interval: there is no noise scale")
    growing = "--batch 32 --hold epochs --grow 512 --noise-scale 90".split()
    code, out, err = run("plan", "f1-digits", *growing)
    assert (code, out) == (2, "")
    assert err.startswith("ghostbatch: noise_scale: the advice is for one batch, and this one grow")


def test_a_held_sum_of_rates_is_said_to_be_not_measured(run):
    out = advise(run, *LARGE, "--hold", "rate", "--samples", "50000")
    assert "epochs: 1,131.37, with 0.1768 times the updates\n" in out
    assert "this costs 5.657 times the images, and --hold epochs keeps 200 epochs" in out
    assert "evidence: not measured here, and no column of the paper" in out
    assert "updates: 78,125 before, 13,811 now" in out


def test_no_drops_are_shown_as_they_can_be_given(run):
    text = " ".join(run("advise", "--help")[1].replace("│", " ").split())
    assert "each with its epoch. (default: None)" in text
    given = (json.loads(advise(run, *LARGE, "--json", "--drops", none)) for none in (",", "None"))
    assert [each["original"]["drops"] for each in given] == [[], []]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--batch 128", "batch: 128 is not above base_batch 128; give a larger one"),
        ("--batch 4096 --lr -1", "lr: -1.0 is out of range"),
        (
            "--batch 4096 --drops 300:0.1",
            "drops: epoch 300 is not before the end at 200",
        ),
        ("--batch 4096 --drops soon", "drops: 'soon' is not a drop; write EPOCH:LR or"),
        ("--batch 4096 --samples 1000", "samples: 1000 are fewer than batch 4096; give the size"),
        ("--batch 4096 --base-batch 0", "base_batch: 0 is below 2"),
        ("--batch 4096 --samples -5", "samples: -5 are fewer than batch 4096"),
        ("--batch 4096 --hold distance", "hold: 'distance' is unknown"),
        ("", "batch: this flag is required"),
        ("--batch 4096 --noise-scale inf", "noise_scale: inf is not a finite number above 0"),
        ("--batch 4096 --noise-scale 0", "noise_scale: 0 is not a finite number above 0"),
        ("--batch 4096 --interval 8,9", "interval: there is no noise scale; give noise_scale"),
        ("--batch 4096 --noise-scale 5 --interval 8,9", "interval: 8 to 9 does not contain the"),
        ("--batch 4096 --noise-scale 5 --interval 8", "interval: '8' is not an interval; give"),
    ],
)
def test_wrong_input_is_one_line_with_the_field(run, words, line):
    code, out, err = run("advise", *RESNET44, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"ghostbatch: {line}")
    assert err.count("\n") == 1
