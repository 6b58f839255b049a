"""An executor for tests of what submits jobs."""

from ghostbatch.train import Record, Summary

RECORD = Record(update=1, epoch=1.0, split="train", loss=1.0, accuracy=1.0, lr=1.0, distance=1.0)
SUMMARY = Summary(
    status="finished", accuracy=1.0, loss=1.0, updates=1, epochs=1.0, distance=1.0, seconds=1.0
)


class FakeExecutor:
    """Runs nothing: each job yields a record, and then its summary or an error.

    ``error`` is raised by every job; or it is a function of the job that returns an error or None.
    """

    def __init__(self, error=None):
        self.jobs, self.error = [], error

    def prepare(self, _out, _where):
        """Return one device."""
        return ["cpu"]

    def submit(self, job):
        """Note the job, and return its events."""
        self.jobs.append(job)
        return self.events(self.error(job) if callable(self.error) else self.error)

    def events(self, error):
        """Yield the events of a job."""
        yield RECORD
        if error is not None:
            raise error
        yield SUMMARY

    def close(self):
        """End nothing."""
