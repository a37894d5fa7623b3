"""Reads the text model of a folder that also holds one of pictures or sound."""

import logging

from torch import Tensor

from ms_parallel.weights.folder import WeightFolder

logger = logging.getLogger(__name__)

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""What the names of a text model's tensors begin with in such a folder, and alone."""


class TextPart(WeightFolder):
    """The tensors of the text model, by the names that they have alone.

    Args:
        whole: the folder.
    """

    def __init__(self, whole: WeightFolder) -> None:
        self.folder, self.whole = whole.folder, whole
        self.name_in_folder: dict[str, str] = {}
        for name in whole.names:
            for prefix, alone in PREFIXES.items():
                if name.startswith(prefix):
                    self.name_in_folder[alone + name.removeprefix(prefix)] = name
                    break
            else:
                if name == "lm_head.weight":
                    self.name_in_folder[name] = name
        left = len(whole.names) - len(self.name_in_folder)
        if left:
            logger.warning(
                "warning: %d tensors of %s are not of its text model, and are left out",
                left,
                self.folder,
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of the text model's tensors."""
        return frozenset(self.name_in_folder)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor."""
        return self.whole.shape(self.name_in_folder.get(name, name))

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read the part of a tensor inside a box, and only that part."""
        return self.whole.read(self.name_in_folder.get(name, name), box)
