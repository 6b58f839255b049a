"""Logistic regression on separable data, against a support vector machine."""

import numpy as np
import pytest

from ghostbatch.diagnostics.separable import descend, hard_margin_in_the_plane
from ghostbatch.errors import InputError

SEEDS = (0, 5)


def data(seed):
    draw = np.random.default_rng(seed)
    normal = np.array([1.0, 0.5, -0.3])
    x = draw.standard_normal((40, 3))
    y = np.sign(x @ normal)
    return x + 0.6 * y[:, None] * normal / np.linalg.norm(normal), y


def hard_margin(x, y):
    """scikit-learn's hard-margin vector; mirrored samples make its intercept 0."""
    svm = pytest.importorskip("sklearn.svm")
    signed = x * y[:, None]
    both, labels = np.r_[signed, -signed], np.r_[y * y, -y * y]
    return svm.SVC(kernel="linear", C=1e9, tol=1e-10).fit(both, labels).coef_[0]


@pytest.fixture(scope="module", params=SEEDS)
def run(request):
    x, y = data(request.param)
    return hard_margin(x, y), descend(x, y, until=1e40)


def at(found, time):
    number = int(np.searchsorted(found.times, time))
    return np.log(found.times[number]), np.array(found.weights[number])


def test_the_weights_grow_by_the_hard_margin_vector_per_unit_of_log_time(run):
    vector, found = run
    (early, w), (late, later) = at(found, 1e20), at(found, 5e39)
    growth = (later - w) / (late - early)
    assert np.linalg.norm(growth - vector) < 0.02 * np.linalg.norm(vector)
    assert found.distances == pytest.approx(np.linalg.norm(found.weights, axis=1))


def test_weights_over_log_time_approach_the_vector_as_one_over_log_time(run):
    vector, found = run
    log_t = np.log(found.times)
    off = np.linalg.norm(np.array(found.weights) / log_t[:, None] - vector, axis=1)
    late = np.array(found.times) > 1e20
    assert (np.diff(off) < 0).all()
    assert np.ptp((off * log_t)[late]) < 0.02 * (off * log_t)[-1]  # w - w_hat log t is O(1)


def test_the_gap_of_the_margin_shrinks_as_one_over_log_time(run):
    vector, found = run
    gaps = found.gaps(1 / np.linalg.norm(vector))
    late = np.array(found.times) > 1e12
    times_log = (gaps * np.log(found.times))[late]
    assert (gaps[late] > 0).all()
    assert times_log.max() < 1.6 * times_log.min()  # while log t grows by a factor of 3.3
    assert gaps[-1] < 0.005


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_the_gap_times_log_time_tends_to_its_closed_form(share):
    """Two support vectors of dual weights ``share`` and 1 - ``share``; the third sample is far."""
    signed = np.array([[1.0, 1 - share], [1.0, -share], [3.0, 0.5]])
    exact = hard_margin_in_the_plane(signed)
    assert exact.weights == pytest.approx([share, 1 - share, 0])
    assert (exact.vector, exact.slack) == (pytest.approx([1, 0]), pytest.approx(2))
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert exact.gap_limit == pytest.approx(entropy + np.log(share), abs=1e-12)
    found = descend(signed, [1, 1, 1], until=1e100)
    times_log = found.gaps(1.0) * np.log(found.times)
    late = np.log(found.times) > 50
    # The error is of order 1 / ln t, so its product with ln t is almost constant.
    errors = ((times_log - exact.gap_limit) * np.log(found.times))[late]
    assert np.ptp(errors) < 0.12 * np.abs(errors).max() + 1e-4
    # Along the vector there is no such error: w.w_hat / |w_hat|^2 - min z.w tends to the limit.
    w = np.array(found.weights[-1])
    assert w @ exact.vector - (signed @ w).min() == pytest.approx(exact.gap_limit, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_hard_margin_vector_is_that_of_a_support_vector_machine(seed):
    points = np.random.default_rng(seed).normal((3.0, 1.0), size=(30, 2))
    found = hard_margin_in_the_plane(points)
    assert found.vector == pytest.approx(hard_margin(points, np.ones(30)), rel=1e-4)
    length = found.vector @ found.vector
    assert length * found.weights @ points == pytest.approx(found.vector)
    assert found.weights.sum() == pytest.approx(1)


def test_a_rising_rate_gives_the_weights_of_a_constant_rate():
    x, y = data(5)
    fast, slow = (descend(x, y, until=3e4, constant=constant) for constant in (False, True))
    for time in (1e2, 1e3, 1e4):
        w, expected = (
            [np.interp(np.log(time), np.log(each.times), w) for w in np.array(each.weights).T]
            for each in (fast, slow)
        )
        assert np.linalg.norm(np.subtract(w, expected)) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("field", "inputs", "labels", "options"),
    [
        ("labels", [[1.0], [2.0]], [0, 1], {}),
        ("labels", [[1.0], [2.0]], [1], {}),
        ("labels", [[1.0], [2.0]], [1, -1], {"until": 1e6}),
        ("until", [[1.0], [2.0]], [1, 1], {"until": 1}),
    ],
    ids=["label 0", "too few labels", "not separable", "until below 10"],
)
def test_bad_input_is_refused_by_name(field, inputs, labels, options):
    with pytest.raises(InputError) as raised:
        descend(inputs, labels, **options)
    assert raised.value.field == field
