"""Which device each job runs on."""

import pytest

from ghostbatch.errors import InputError
from ghostbatch.study.placement import Placement, find_devices, gpu_share

CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        pytest.param(None, 0, ["cpu"], id="no-gpu"),
        pytest.param(None, 3, ["cuda:0", "cuda:1", "cuda:2"], id="all-gpus"),
        pytest.param("cuda", 2, ["cuda:0", "cuda:1"], id="cuda-is-all-gpus"),
        pytest.param("cuda:1", 2, ["cuda:1"], id="one-gpu-by-name"),
        pytest.param("cpu", 2, ["cpu"], id="cpu-beside-gpus"),
    ],
)
def test_devices(device, gpus, expected):
    assert list(find_devices(device, gpus)) == expected


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(InputError, match=r"^ranks: 4 ranks need as many GPUs, and there are 3; "):
        find_devices(None, gpus=3, ranks=4)


def test_ranks_on_one_gpu_are_refused():
    with pytest.raises(InputError, match=r"^ranks: 2 ranks do not run on cuda:1; use cuda or cpu"):
        find_devices("cuda:1", gpus=3, ranks=2)


def test_the_share_of_a_gpu_grows_with_the_pixels_of_a_backward_pass():
    assert gpu_share(128, CIFAR) == 0.09375
    assert gpu_share(256, CIFAR) == 2 * gpu_share(128, CIFAR)
    assert gpu_share(4096, CIFAR) == gpu_share(128, IMAGENET) == 1
    assert gpu_share(2, CIFAR) == gpu_share(32, (1, 28, 28)) == 1 / 16


def test_jobs_are_spread_over_gpus():
    placement = Placement(["cuda:0", "cuda:1"], jobs=8)
    assert [placement.take(0.25) for _ in range(4)] == ["cuda:0", "cuda:1"] * 2


def test_large_jobs_do_not_share_a_gpu():
    placement = Placement(["cuda:0", "cuda:1"], jobs=8)
    assert [placement.take(1.0) for _ in range(3)] == ["cuda:0", "cuda:1", None]
    placement.release("cuda:1", 1.0)
    assert placement.take(1.0) == "cuda:1"


def test_small_jobs_share_a_gpu_until_it_is_full():
    placement = Placement(["cuda:0"], jobs=100)
    taken = [placement.take(1 / 16) for _ in range(17)]
    assert taken == ["cuda:0"] * 16 + [None]


def test_a_small_job_does_not_join_a_large_one():
    placement = Placement(["cuda:0"], jobs=8)
    assert placement.take(1.0) == "cuda:0"
    assert placement.take(1 / 16) is None


def test_no_more_jobs_run_than_allowed_over_all_devices():
    placement = Placement(["cuda:0", "cuda:1"], jobs=3)
    assert [placement.take(1 / 16) for _ in range(4)] == ["cuda:0", "cuda:1", "cuda:0", None]


@pytest.mark.parametrize("device", ["cpu", "cuda"], ids=["cpu", "gpus-that-ray-chooses"])
def test_a_device_without_shares_takes_as_many_jobs_as_allowed(device):
    placement = Placement([device], jobs=3)
    assert [placement.take(1.0) for _ in range(4)] == [device, device, device, None]
