"""The images of a folder that cannot be read and are skipped, and how many of them may be."""

from typing import Literal

from ghostbatch.errors import InputError, RankLocalError

OnBadImage = Literal["fatal", "skip"]
"""What an image that cannot be read does: end the run, or be replaced by another one."""

BAD_IMAGE_LIMIT = 0.01
"""Default of the largest fraction of the images that may be skipped."""


class SkippedImages:
    """The numbers of the skipped images, by part of the data set; a run keeps them."""

    def __init__(self, limit: float = BAD_IMAGE_LIMIT) -> None:
        self.limit = limit
        self.parts: dict[str, set[int]] = {"train": set(), "test": set()}

    def add(self, part: str, number: int, images: int) -> bool:
        """Note a skipped image, of ``images`` in a part; return whether it is new.

        Refuse more than `limit` allows.
        """
        skipped = self.parts[part]
        if number in skipped:
            return False
        skipped.add(number)
        if len(skipped) > self.limit * images:
            what = f"{len(skipped)} of {images:,} {part} images cannot be read"
            problem = f"{what}, which is more than a fraction of {self.limit:g}"
            raise RankLocalError(
                "bad_image_limit", problem, "repair the images, or raise the limit"
            )
        return True

    def state_dict(self) -> dict[str, list[int]]:
        """Return the numbers as plain lists for a checkpoint."""
        return {part: sorted(numbers) for part, numbers in self.parts.items()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Continue from what `state_dict` returned."""
        for part, numbers in state.items():
            self.parts[part] = set(numbers)


def check_limit(limit: float) -> None:
    """Refuse a limit that is not a fraction."""
    if not 0 <= limit <= 1:
        raise InputError("bad_image_limit", f"{limit} is no fraction", "use 0 to 1")
