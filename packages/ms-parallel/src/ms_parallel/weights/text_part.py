"""Reads the text model from a folder of a multimodal model."""

import logging

from torch import Tensor

from ms_parallel.weights.folder import WeightFolder

logger = logging.getLogger(__name__)

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""Prefixes of the text model's tensors in such a folder, and in a text-only folder."""


class TextPart(WeightFolder):
    """The tensors of the text model, by their names in a text-only folder.

    Args:
        source: folder of the multimodal model.
    """

    def __init__(self, source: WeightFolder) -> None:
        self.folder, self.source = source.folder, source
        self.name_in_folder: dict[str, str] = {}
        for name in source.names:
            for prefix, text_prefix in PREFIXES.items():
                if name.startswith(prefix):
                    self.name_in_folder[text_prefix + name.removeprefix(prefix)] = name
                    break
            else:
                # The output head has no prefix.
                if name == "lm_head.weight":
                    self.name_in_folder[name] = name
        skipped = len(source.names) - len(self.name_in_folder)
        if skipped:
            logger.warning(
                "warning: %d tensors of %s do not belong to its text model and are skipped",
                skipped,
                self.folder,
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of the text model's tensors."""
        return frozenset(self.name_in_folder)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor."""
        return self.source.shape(self.name_in_folder.get(name, name))

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read only the part of a tensor inside a box."""
        return self.source.read(self.name_in_folder.get(name, name), box)
