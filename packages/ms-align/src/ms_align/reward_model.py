"""A reward model: a language model's body and one number a token; saved, loaded, and a reward."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ms_align.durable import write_synced, writing
from ms_align.errors import DamageError, ModelError
from ms_align.language_model import language_model
from ms_align.model_folder import load_model, save_model

__all__ = ["HEAD_FILE", "RewardModel"]

HEAD_FILE = "reward_head.safetensors"
"""Written last into a reward model's folder."""


class RewardModel(nn.Module):
    """Scores of whole texts.

    Args:
        body: a causal language model that shows hidden states.
        head: from a hidden state to a score; a fresh one, at 0, by default.

    Raises:
        ModelError: the body shows no hidden states.
    """

    def __init__(self, body: nn.Module, head: nn.Linear | None = None) -> None:
        super().__init__()
        face = language_model(body)
        if face.hidden_size is None:
            raise ModelError(
                f"{type(body).__name__} shows no hidden states for a score; give a decoder of "
                "ms-parallel or a causal language model of transformers"
            )
        self.body = body
        if head is None:
            head = nn.Linear(face.hidden_size, 1)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.head = head
        self._face = face

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Scores (B,) float32 of rows of tokens (B, S), each at its last token.

        Args:
            tokens: int64; what stands behind a row's length has no influence.
            lengths: of each row, (B,); S by default.
        """
        hidden = self._face.hidden(tokens, None, None)
        if lengths is None:
            lengths = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        scores: Tensor = self.head(hidden[rows, lengths - 1].float())[:, 0]
        return scores

    def save(self, folder: str | Path) -> None:
        """Write body and head to a folder that `load` reads.

        Raises:
            ModelError: the folder cannot be written.
        """
        path = Path(folder)
        save_model(self.body, path)
        with writing(path / HEAD_FILE):
            weights: dict[str, Any] = {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in self.head.named_parameters()
            }
            aside = path / (HEAD_FILE + ".partial")
            write_synced(aside, save(weights))
            aside.replace(path / HEAD_FILE)

    @classmethod
    def load(cls, folder: str | Path) -> "RewardModel":
        """What `save` wrote.

        Raises:
            ModelError: there is no reward model in the folder.
            DamageError: its head is not what was written.
        """
        path = Path(folder)
        try:
            content = (path / HEAD_FILE).read_bytes()
        except OSError as error:
            raise ModelError(
                f"{folder} holds no reward model ({HEAD_FILE}: {error.strerror}); train one with "
                "`ms-align reward`"
            ) from error
        try:
            weights = load(content)
        except (SafetensorError, msgspec.MsgspecError) as error:
            raise DamageError(f"{path / HEAD_FILE} is damaged: {error}") from error
        model = cls(load_model(path))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.head.named_parameters()}
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
            raise ModelError(f"{path / HEAD_FILE} does not fit the model beside it; train it anew")
        model.head.load_state_dict(weights)
        return model.eval()
