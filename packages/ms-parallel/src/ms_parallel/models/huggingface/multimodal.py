"""Multimodal models of transformers, trained on packed rows of text, images, video and audio.

The text model uses our attention, which does not cross documents. The towers that encode images,
video and audio are transformers', and process each item separately.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_parallel import operators
from ms_parallel.entry import one_line
from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import read_json
from ms_parallel.models.batch import MEDIA, POSITIONS, Batch
from ms_parallel.models.huggingface.attention import registered
from ms_parallel.models.huggingface.config import AUDIO_TYPES, MULTIMODAL_TYPES, transformers
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.models.huggingface.packing import ForwardState, isolate_documents
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import tree_leaves

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a model folder that its processor needs in addition to the tokenizer's."""

_FEATURES, _FRAMES = MEDIA["audio"].items


def is_multimodal(folder: str | Path) -> bool:
    """Whether a folder's config.json is of a supported multimodal model.

    Raises:
        ModelError: config.json cannot be read.
    """
    path = Path(folder) / "config.json"
    if not os.path.isfile(
        path
    ):  # also for a name that is too long, an error that opening it reports
        return False
    return read_json(path, dict[str, Any], error=ModelError).get("model_type") in MULTIMODAL_TYPES


class MultimodalModel(ModuleWrapper):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen2-Audio, which an `Engine` treats as a user module.

    Parameters have transformers' names. The blocks of the text model, which `plan` names, are the
    units of sharding and activation checkpointing.

    Args:
        model: transformers' `AutoModelForMultimodalLM` with its weights; modified in place.
        folder: folder whose processor files `Engine.save` copies; None for none.

    Raises:
        ModelError: the model type is not supported.
    """

    model_types = MULTIMODAL_TYPES
    """Supported `model_type`s."""

    def __init__(self, model: Any, folder: str | Path | None = None) -> None:
        model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if model_type not in MULTIMODAL_TYPES:
            raise ModelError(
                f"model_type must be one of {', '.join(MULTIMODAL_TYPES)}, got {model_type!r}"
            )
        super().__init__(model)
        self.__dict__["folder"] = None if folder is None else Path(folder)
        # The text model only: the towers attend in both directions.
        model.model.language_model.set_attn_implementation(registered(operators))
        state = self.__dict__["state"] = ForwardState()
        for block in model.model.language_model.layers:
            isolate_documents(block, state, operators)

    @classmethod
    def load(cls, folder: str | Path, *, weights: bool = True, seed: int = 0) -> "MultimodalModel":
        """Build the model of a folder in float32, on the CPU.

        Args:
            folder: folder with config.json and, as safetensors, the weights.
            weights: read the weights; False initializes them randomly.
            seed: seed of random weights.

        Raises:
            ModelError: transformers is not installed, or the folder cannot be read.
        """
        package, folder = transformers(), Path(folder)
        auto = package.AutoModelForMultimodalLM
        try:
            if not weights:
                config = package.AutoConfig.from_pretrained(folder, local_files_only=True)
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(seed)
                    return cls(auto.from_config(config, dtype=torch.float32), folder)
            model, report = auto.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many types for damaged files
            reason = one_line(str(error))[:200]
            raise ModelError(f"{folder} cannot be read: {reason}; copy it again") from error
        for problem in ("missing_keys", "mismatched_keys"):
            if names := sorted(str(name) for name in report[problem]):
                raise ModelError(
                    f"{folder} has {len(names)} {problem.replace('_', ' ')}, first {names[0]!r},"
                    " which would be initialized randomly; copy it again"
                )
        return cls(model, folder)

    @property
    def plan(self) -> ModelPlan:
        """Parallel plan with the blocks of the text model."""
        return ModelPlan(blocks="model.language_model.layers.*")

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        media: Batch | None = None,
    ) -> Tensor:
        """Compute logits from tokens and the media among them.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int64; not used if `media` has positions (3, B, S).
            documents: (B, S) int32; attention does not cross documents.
            media: inputs of the towers, see `models.batch.MEDIA`.

        Returns:
            (B, S, V).
        """
        media, state = media or {}, self.state
        audio = self.inner.config.model_type in AUDIO_TYPES
        inputs = self._audio_inputs(tokens, media) if audio else self._vision_inputs(tokens, media)
        state.running, state.documents = True, documents
        try:
            logits: Tensor = self.inner(
                **inputs, position_ids=media.get(POSITIONS, positions), use_cache=False
            ).logits
        finally:
            state.running, state.documents = False, None
        # Sharding needs a gradient for the tower's weights on every process, also in microbatches
        # without media: a zero keeps them in the autograd graph.
        if len(inputs) == 1 and not audio:
            logits = logits + self._vision_zero()
        return logits

    def _vision_inputs(self, tokens: Tensor, media: Batch) -> dict[str, Tensor]:
        """Return tokens, and patches and grids of images and of videos if there are any."""
        inputs = {"input_ids": tokens}
        dtype = next(self.inner.model.visual.parameters()).dtype
        for keys in (MEDIA["image"], MEDIA["video"]):
            patches, (grids,) = keys.patches, keys.items
            if patches is not None and grids in media and len(media[grids]):
                inputs |= {patches: media[patches].to(dtype), grids: media[grids]}
        return inputs

    def _vision_zero(self) -> Tensor:
        """Return zero, computed by the vision tower from a blank one-token image."""
        vision = self.inner.config.vision_config
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        weight = next(self.inner.model.visual.parameters())
        patches = torch.zeros(merge**2, width, dtype=weight.dtype, device=weight.device)
        # One image: time, height, width in patches
        grid = torch.tensor([[1, merge, merge]], device=weight.device)
        outputs = self.inner.model.get_image_features(patches, grid)
        features = (outputs.pooler_output, getattr(outputs, "deepstack_features", None) or ())
        tensors = tree_leaves(features)
        zero: Tensor = torch.stack([tensor.sum() for tensor in tensors]).sum() * 0.0
        return zero

    def _audio_inputs(self, tokens: Tensor, media: Batch) -> dict[str, Tensor]:
        """Return embeddings (B, S, H) of the tokens, with the encoded audio in its places.

        transformers' forward recognizes expanded placeholders by two of them in a row, and so
        misreads a batch whose clips have one token each; this gives it the embeddings instead.
        """
        model, config = self.inner.model, self.inner.config
        embeddings: Tensor = self.inner.get_input_embeddings()(tokens)
        weight = model.audio_tower.conv1.weight
        if _FEATURES in media and len(media[_FEATURES]):
            features, lengths = media[_FEATURES], media[_FRAMES].sum(1)  # (n, mels, frames), (n,)
        else:  # a silent clip whose tokens are not used
            frames = config.audio_config.max_source_positions * 2
            features = weight.new_zeros(1, config.audio_config.num_mel_bins, frames)
            lengths = torch.zeros(1, dtype=torch.int64, device=weight.device)
        # A strided convolution halves the frames, and a mean pool the encoder's outputs.
        encoded, pooled = (lengths - 1) // 2 + 1, (lengths - 3) // 4 + 1  # (n,)
        frames = torch.arange((features.shape[2] - 1) // 2 + 1, device=features.device)
        # (n, 1, 1, encoder positions): no attention to the padding of a clip.
        silence = (frames >= encoded.clamp(min=1)[:, None])[:, None, None]
        mask = torch.zeros(silence.shape, dtype=weight.dtype, device=weight.device)
        mask = mask.masked_fill(silence, torch.finfo(weight.dtype).min)
        outputs = model.audio_tower(features.to(weight.dtype), attention_mask=mask)
        projected = model.multi_modal_projector(outputs.last_hidden_state)  # (n, tokens, H)
        used = torch.arange(projected.shape[1], device=pooled.device) < pooled[:, None]
        clips = projected[used].to(embeddings.dtype)  # (audio tokens, H)
        places = tokens == config.audio_token_id
        if int(places.sum()) != len(clips):
            raise ModelError(
                f"the batch must have one audio token for each output of the audio encoder, got"
                f" {int(places.sum())} tokens and {len(clips)} outputs; build the shards with the"
                " processor of this model"
            )
        embeddings = embeddings.masked_scatter(places[..., None], clips)
        return {"inputs_embeds": embeddings + projected.sum() * 0.0}
