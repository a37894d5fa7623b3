"""Checkpoint of a calibration: one sealed file per finished decoder layer.

Each decoder layer is written once, so a checkpoint is as large as the model's decoder layers. A
restarted run loads the stored layers and continues with the next layer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from attrs import frozen
from torch import Tensor, nn

from ms_compress.errors import ConfigError
from ms_compress.files.durable import writing
from ms_compress.training.identity import check_identity, digest_of
from ms_compress.training.sealed_file import opened, write_sealed


class BlockHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-compress-block/1", tag_field="format"
):
    """Settings on which a stored decoder layer depends."""

    identity: dict[str, str]


@frozen(kw_only=True, eq=False)
class BlockFiles:
    """Decoder layers stored in a folder, which is created by the first one."""

    folder: Path
    identity: Mapping[str, str]
    """Settings that the calibration depends on; files with other settings are rejected."""

    def load(self, name: str, block: nn.Module) -> bool:
        """Restore a decoder layer; return False if it is not stored.

        Raises:
            ConfigError: the file belongs to another run, or is damaged.
        """
        path = self.folder / name
        if not path.is_file():
            return False
        with opened(path) as (line, payload):
            try:
                header = msgspec.json.decode(line, type=BlockHeader)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{path} is not a layer stored by this version of ms-compress ({error}); remove"
                    f" {self.folder} to restart"
                ) from error
            check_identity(self.folder, header.identity, self.identity)
            block.load_state_dict(torch.load(payload, weights_only=True))
        return True

    def save(self, name: str, block: nn.Module) -> None:
        """Store a finished decoder layer.

        Raises:
            WriteError: the disk is full, or the folder cannot be written.
        """
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        header = msgspec.json.encode(BlockHeader(identity=dict(self.identity)))
        state = block.state_dict()
        write_sealed(self.folder / name, header, lambda file: torch.save(state, file))

    def remove(self) -> None:
        """Remove the stored layers, and the folder if it is then empty."""
        if self.folder.is_dir():
            with writing(self.folder):
                for path in self.folder.glob("model.layers.*"):
                    path.unlink()
                if not any(self.folder.iterdir()):
                    self.folder.rmdir()


def calibration_identity(settings: Mapping[str, str], batches: Sequence[Tensor]) -> dict[str, str]:
    """Return the settings of a run and a digest of its calibration tokens."""
    tokens = [batch.cpu().contiguous().numpy().tobytes() for batch in batches]
    shapes = repr([tuple(batch.shape) for batch in batches]).encode()
    return {**settings, "calibration tokens": digest_of(shapes, *tokens)}
