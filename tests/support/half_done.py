"""Leaves runs unfinished, and damages files."""

import pytest

from ghostbatch import train


def half_done(recipe, folder, update=5, **options):
    """Leave a run after its checkpoint at this update."""

    def interrupt(record):
        if record.update > update:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=folder, on_record=interrupt, checkpoint_updates=1, **options)


def flip_bit(path, bit):
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def replace_in(path, old, new):
    """Replace bytes of a file that occur there once."""
    content = path.read_bytes()
    assert content.count(old) == 1, content
    path.write_bytes(content.replace(old, new))
