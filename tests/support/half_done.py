"""Leaves runs unfinished, and damages or rewrites their files."""

import pytest
import torch

from ghostbatch import train
from ghostbatch.train.checkpoint import checksum


def half_done(recipe, folder, update=5, **options):
    """Leave a run after its checkpoint at this update."""

    def interrupt(record):
        if record.update > update:
            raise KeyboardInterrupt

    options = {"checkpoint_updates": 1, **options}
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out=folder, on_record=interrupt, **options)


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


def rewrite_checkpoint(path, **changes):
    """Change fields of a checkpoint, and its checksum; a field that is None is left out."""
    content = torch.load(path, weights_only=True) | changes
    del content["checksum"]
    content = {name: value for name, value in content.items() if value is not None}
    torch.save({**content, "checksum": checksum(content)}, path)
