"""A reward model: a language model's body and one number a token; saved, loaded, and a reward.

model/config.json                    a sequence classifier of transformers, with one score
/model.safetensors.index.json   whose weights are in the two files below
/body/                          the language model, as any other
/reward_head.safetensors        the head, written last
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from ms_align.errors import DamageError, ModelError, WriteError
from ms_align.files.durable import whole_folder, write_file
from ms_align.files.untrusted import check_file, check_path, read_bytes, read_json
from ms_align.models.finite import check_tensors
from ms_align.models.folder import load_model, save_model
from ms_align.models.language_model import language_model
from ms_align.tokenizer_files import TokenizerFiles, complete

HEAD_FILE = "reward_head.safetensors"
BODY, INDEX = "body", "model.safetensors.index.json"


def is_reward_model(folder: Path) -> bool:
    """Return whether `RewardModel.save` wrote the folder."""
    return (folder / HEAD_FILE).is_file()


class RewardModel(nn.Module):
    """Scores of whole texts.

    Args:
        body: a causal language model that shows hidden states.
        head: from a hidden state to a score; a fresh one, at 0 and without an offset, by default.

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
            device = next(body.parameters()).device
            head = nn.Linear(face.hidden_size, 1, bias=False, device=device)
            nn.init.zeros_(head.weight)
        self.head = head
        self._face = face
        self.vocabulary_size = face.vocabulary_size
        """Tokens that the body knows; None where it does not say."""
        self.name_or_path = ""
        """Folder that `load` read it from."""

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score rows of tokens (B, S), each at its last token, (B,) float32.

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

    def save(
        self,
        folder: str | Path,
        tokenizer: TokenizerFiles | None = None,
        *,
        base: Path | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a folder that `load` reads, and transformers as a sequence classifier.

        transformers reads no offset of a head: scores here are higher by that of a caller's own.

        Args:
            folder: takes the place of a reward model that is there.
            tokenizer: is put beside it.
            base: folder of the model that was trained; see `complete`.
            dtype: of the body's weights in the files; by default their own.

        Raises:
            WriteError: the folder cannot be written.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        if base is not None:
            check_path("base", base, error=WriteError)
        with whole_folder(Path(folder), overwrite=True) as aside:
            save_model(self.body, aside / BODY, dtype=dtype)
            complete(aside / BODY, tokenizer, base=base)
            self._write_head(aside)
            if (aside / BODY / "config.json").is_file():
                self._write_classifier(aside, tokenizer)

    def _write_head(self, folder: Path) -> None:
        weights = {
            "score.weight" if name == "weight" else name: tensor.detach().cpu().contiguous()
            for name, tensor in self.head.named_parameters()
        }
        write_file(folder / HEAD_FILE, save(weights, {"format": "pt"}))

    def _write_classifier(self, folder: Path, tokenizer: TokenizerFiles | None) -> None:
        config = read_json(folder / BODY / "config.json", dict[str, Any], error=ModelError)
        family = str(config["architectures"][0]).partition("For")[0].removesuffix("LMHeadModel")
        config |= {
            "architectures": [f"{family}ForSequenceClassification"],
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
        }
        places: dict[str, str] = {}
        for path in sorted((folder / BODY).glob("*.safetensors")):
            check_file(path, error=ModelError)
            with safe_open(path, "pt") as file:
                places |= dict.fromkeys(file.keys(), f"{BODY}/{path.name}")
        places["score.weight"] = HEAD_FILE
        index = {"metadata": {}, "weight_map": places}
        write_file(folder / INDEX, msgspec.json.encode(index))
        write_file(folder / "config.json", msgspec.json.encode(config))
        filler = _filler(config, tokenizer)
        if filler is not None and tokenizer is not None:
            tokenizer = tokenizer.padded(filler)
        complete(folder, tokenizer)
        if filler is None:
            # The classifier looks for the last token that is not this one, and would pass the end.
            known = read_json(folder / "config.json", dict[str, Any], error=ModelError)
            known["pad_token_id"] = None
            write_file(folder / "config.json", msgspec.json.encode(known))

    @classmethod
    def load(cls, folder: str | Path) -> "RewardModel":
        """Load what `save` wrote.

        Raises:
            ModelError: there is no reward model in the folder.
            DamageError: its head is not what was written.
        """
        check_path("a reward model", folder, error=ModelError)
        path = Path(folder)
        if not is_reward_model(path):
            raise ModelError(
                f"{folder} holds no reward model ({HEAD_FILE} is not there); train one with "
                "`ms-align reward`"
            )
        content = read_bytes(path / HEAD_FILE, error=DamageError)
        try:
            weights = load(content)
        except (SafetensorError, msgspec.MsgspecError) as error:
            raise DamageError(f"{path / HEAD_FILE} is damaged: {error}") from error
        check_tensors(path / HEAD_FILE, weights, error=ModelError)
        weights = {name.removeprefix("score."): tensor for name, tensor in weights.items()}
        body = load_model(path / BODY if (path / BODY).is_dir() else path)
        size = language_model(body).hidden_size or 0
        head = nn.Linear(size, 1, bias="bias" in weights)
        shapes = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()}
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
            raise ModelError(f"{path / HEAD_FILE} does not fit the model beside it; train it anew")
        head.load_state_dict(weights)
        model = cls(body, head.to(next(body.parameters()).device)).eval()
        model.name_or_path = str(path)
        return model


def _filler(config: dict[str, Any], tokenizer: TokenizerFiles | None) -> int | None:
    """Find a token to fill up rows with, which ends no text; None where there is none."""
    if tokenizer is None:
        return None
    pad = tokenizer.id_of("pad_token")
    if pad is not None and pad not in tokenizer.ends:
        return pad
    return tokenizer.size if 0 < tokenizer.size < int(config.get("vocab_size", 0)) else None
