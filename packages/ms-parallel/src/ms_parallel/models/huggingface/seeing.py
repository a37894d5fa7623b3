"""A vision-language model of transformers, trained on packed rows of text and pictures.

Its text model uses our attention, which keeps the documents of a row apart as in all other models.
Its vision tower is transformers' own and processes each picture separately.
"""

from typing import Any

import torch
from torch import Tensor

from ms_parallel import operators
from ms_parallel.errors import ModelError
from ms_parallel.models.batch import GRIDS, PATCHES, POSITIONS, Batch
from ms_parallel.models.huggingface.around import Around
from ms_parallel.models.huggingface.attention import registered
from ms_parallel.models.huggingface.packing import Now, keep_apart
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import tree_leaves

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Supported `model_type`s."""


class SeeingModel(Around):
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL that an `Engine` trains as a module of the user's own.

    Its parameters have transformers' names. Pass `plan=model.plan` to the engine; it names the
    blocks that are sharded and recomputed one by one.

    Args:
        model: transformers' `AutoModelForImageTextToText`, with its weights; changed in place.

    Raises:
        ModelError: the model type is not supported.
    """

    def __init__(self, model: Any) -> None:
        model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if model_type not in KINDS:
            raise ModelError(f"{model_type!r} is not known to see; known: {', '.join(KINDS)}")
        super().__init__(model)
        model.model.language_model.set_attn_implementation(registered(operators))
        now = self.__dict__["now"] = Now()
        for block in model.model.language_model.layers:
            keep_apart(block, now, operators)

    @property
    def plan(self) -> ModelPlan:
        """Plan that names the blocks of the text model."""
        return ModelPlan(blocks="model.language_model.layers.*")

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        pictures: Batch | None = None,
    ) -> Tensor:
        """Compute logits from tokens and the pictures among them.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int64; used only without pictures.
            documents: (B, S) int32; attention does not cross documents.
            pictures: patches, grids and positions (3, B, S), as `ms_data.InstructionStream` returns
                them.

        Returns:
            (B, S, V).
        """
        inner, now = self.inner, self.now
        position_ids = positions if pictures is None else pictures[POSITIONS]
        vision_inputs: dict[str, Any] = {}
        if pictures is not None and len(pictures[GRIDS]):
            vision_inputs = {PATCHES: pictures[PATCHES].to(self._dtype), GRIDS: pictures[GRIDS]}
        now.running, now.documents = True, documents
        try:
            logits: Tensor = inner(
                input_ids=tokens, position_ids=position_ids, use_cache=False, **vision_inputs
            ).logits
        finally:
            now.running, now.documents = False, None
        return logits if vision_inputs else logits + self._nothing_seen()

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.inner.model.visual.parameters()).dtype
        return dtype

    def _nothing_seen(self) -> Tensor:
        """Return zero, computed by the vision tower from a blank picture of one token.

        It gives the tower's weights a gradient on every process, as sharding requires, even if the
        microbatch has no picture.
        """
        vision = self.inner.config.vision_config
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        weight = next(self.inner.model.visual.parameters())
        patches = torch.zeros(merge**2, width, dtype=self._dtype, device=weight.device)
        grid = torch.tensor([[1, merge, merge]], device=weight.device)
        outputs = self.inner.model.get_image_features(patches, grid)
        features = (outputs.pooler_output, getattr(outputs, "deepstack_features", None) or ())
        tensors = tree_leaves(features)
        zero: Tensor = torch.stack([tensor.sum() for tensor in tensors]).sum() * 0.0
        return zero
