"""Errors as they reach users and other processes."""

import pickle

from ghostbatch.errors import InputError, portable


class DemandingError(OSError):
    """An error that pickle cannot rebuild, such as urllib's HTTPError."""

    def __init__(self, url, code, stream):
        super().__init__(code, f"cannot read {url}")
        self.stream = stream


def again(error):
    """Return the error as another process gets it."""
    return pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)


def test_an_error_that_pickle_cannot_carry_arrives_with_its_number_and_text(tmp_path):
    with (tmp_path / "file").open("w") as stream:
        sent = portable(DemandingError("page", 5, stream))
    arrived = again(sent)
    assert (arrived.errno, arrived.strerror) == (5, "cannot read page")
    without_text = again(portable(OSError("image file is truncated")))
    assert without_text.strerror == "image file is truncated"


def test_wrong_input_stays_as_it_is():
    error = InputError("batch", "1 is below 2", "use 2 or more")
    assert portable(error) is error
