"""Reward models: a language model with a scalar head, usable as a reward and saved as a folder.

model/config.json                    sequence classifier of transformers with one output
/model.safetensors.index.json   refers to the weights in the two files below
/body/                          the language model in its own format
/reward_head.safetensors        the head, written last
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from ms_align.arguments import check_type
from ms_align.errors import DamageError, ModelError, WriteError
from ms_align.files.durable import atomic_folder, write_file
from ms_align.files.untrusted import check_file, check_path, read_bytes, read_json
from ms_align.models.finite import check_tensors
from ms_align.models.folder import load_model, save_model
from ms_align.models.language_model import language_model
from ms_align.tokenizer_files import TokenizerFiles, write_tokenizer_files

HEAD_FILE = "reward_head.safetensors"
BODY, INDEX = "body", "model.safetensors.index.json"


def is_reward_model(folder: Path) -> bool:
    """Return True for a folder written by `RewardModel.save`."""
    return (folder / HEAD_FILE).is_file()


class RewardModel(nn.Module):
    """Scores texts at their last token.

    Args:
        body: causal language model that exposes hidden states.
        head: linear layer from hidden states to a score. Default: a zero layer without bias.

    Raises:
        ModelError: the body does not expose hidden states.
    """

    def __init__(self, body: nn.Module, head: nn.Linear | None = None) -> None:
        super().__init__()
        interface = language_model(body)
        if interface.hidden_size is None:
            raise ModelError(
                f"a reward model needs hidden states, which {type(body).__name__} does not expose; "
                "use a decoder of ms-parallel or a causal language model of transformers"
            )
        self.body = body
        check_type("head", head, nn.Linear, "a torch.nn.Linear", error=ModelError, optional=True)
        if head is None:
            device = next(body.parameters()).device
            head = nn.Linear(interface.hidden_size, 1, bias=False, device=device)
            nn.init.zeros_(head.weight)
        self.head = head
        self._interface = interface
        self.vocabulary_size = interface.vocabulary_size
        """Vocabulary size of the body; None if unknown."""
        self.name_or_path = ""
        """Folder that the model was loaded from."""

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the score at the last token of each row, (B,) float32.

        Args:
            tokens: (B, S) int64; tokens beyond a row's length are ignored.
            lengths: (B,) row lengths. None: S.
        """
        check_type("tokens", tokens, Tensor, "a tensor", error=ModelError)
        check_type("lengths", lengths, Tensor, "a tensor", error=ModelError, optional=True)
        # Right padding does not influence earlier positions of a causal model.
        hidden = self._interface.hidden(tokens, None, None)
        if lengths is None:
            lengths = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        scores: Tensor = self.head(hidden[rows, lengths - 1].float())[:, 0]  # (B,)
        return scores

    def save(
        self,
        folder: str | Path,
        tokenizer: TokenizerFiles | None = None,
        *,
        base: str | Path | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a folder that `load` can read, as can transformers, as a sequence classifier.

        transformers ignores the head's bias, so its scores are lower by a bias that you trained.

        Args:
            folder: folder to write; an existing reward model is replaced.
            tokenizer: tokenizer files to write with the model.
            base: folder of the base model; see `write_tokenizer_files`.
            dtype: dtype of the body's saved weights. None: their own.

        Raises:
            WriteError: the folder cannot be written.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        if base is not None:
            check_path("base", base, error=WriteError)
            base = Path(base)
        check_type(
            "tokenizer",
            tokenizer,
            TokenizerFiles,
            "TokenizerFiles",
            error=ModelError,
            optional=True,
        )
        with atomic_folder(Path(folder), overwrite=True) as partial:
            save_model(self.body, partial / BODY, dtype=dtype)
            write_tokenizer_files(partial / BODY, tokenizer, base=base)
            self._write_head(partial)
            if (partial / BODY / "config.json").is_file():
                self._write_classifier(partial, tokenizer)

    def _write_head(self, folder: Path) -> None:
        weights = {
            "score.weight" if name == "weight" else name: tensor.detach().cpu().contiguous()
            for name, tensor in self.head.named_parameters()
        }
        write_file(folder / HEAD_FILE, save(weights, {"format": "pt"}))

    def _write_classifier(self, folder: Path, tokenizer: TokenizerFiles | None) -> None:
        config = read_json(folder / BODY / "config.json", dict[str, Any], error=ModelError)
        # For example LlamaForCausalLM or GPT2LMHeadModel.
        family = str(config["architectures"][0]).partition("For")[0].removesuffix("LMHeadModel")
        config |= {
            "architectures": [f"{family}ForSequenceClassification"],
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
        }
        weight_map: dict[str, str] = {}
        for path in sorted((folder / BODY).glob("*.safetensors")):
            check_file(path, error=ModelError)
            with safe_open(path, "pt") as file:
                weight_map |= dict.fromkeys(file.keys(), f"{BODY}/{path.name}")
        weight_map["score.weight"] = HEAD_FILE
        index = {"metadata": {}, "weight_map": weight_map}
        write_file(folder / INDEX, msgspec.json.encode(index))
        write_file(folder / "config.json", msgspec.json.encode(config))
        pad_token = _padding_token(config, tokenizer)
        if pad_token is not None and tokenizer is not None:
            tokenizer = tokenizer.with_pad_token(pad_token)
        write_tokenizer_files(folder, tokenizer)
        if pad_token is None:
            # The classifier scores the last token that differs from pad_token_id, which therefore
            # must not equal an end token.
            settings = read_json(folder / "config.json", dict[str, Any], error=ModelError)
            settings["pad_token_id"] = None
            write_file(folder / "config.json", msgspec.json.encode(settings))

    @classmethod
    def load(cls, folder: str | Path) -> "RewardModel":
        """Load a folder written by `save`.

        Raises:
            ModelError: the folder has no reward model.
            DamageError: the head file is damaged.
        """
        check_path("a reward model", folder, error=ModelError)
        path = Path(folder)
        if not is_reward_model(path):
            raise ModelError(
                f"{folder} is not a reward model ({HEAD_FILE} is missing); train one with "
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
            raise ModelError(
                f"{path / HEAD_FILE} does not match the model in its folder; train it again"
            )
        head.load_state_dict(weights)
        model = cls(body, head.to(next(body.parameters()).device)).eval()
        model.name_or_path = str(path)
        return model


def _padding_token(config: dict[str, Any], tokenizer: TokenizerFiles | None) -> int | None:
    """Return a padding token that is not an end token; None if the vocabulary has none."""
    if tokenizer is None:
        return None
    pad = tokenizer.id_of("pad_token")
    if pad is not None and pad not in tokenizer.ends:
        return pad
    return tokenizer.size if 0 < tokenizer.size < int(config.get("vocab_size", 0)) else None
