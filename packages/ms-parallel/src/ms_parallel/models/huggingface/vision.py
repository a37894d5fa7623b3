"""Vision-language models of transformers, trained on packed rows of text and images.

The text model uses our attention, which does not cross documents. The vision tower is transformers'
and processes each image separately.
"""

from typing import Any

import torch
from torch import Tensor

from ms_parallel import operators
from ms_parallel.errors import ModelError
from ms_parallel.models.batch import GRIDS, PATCHES, POSITIONS, Batch
from ms_parallel.models.huggingface.attention import registered
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.models.huggingface.packing import ForwardState, isolate_documents
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import tree_leaves

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Supported `model_type`s."""


class VisionLanguageModel(ModuleWrapper):
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL wrapped for an `Engine`, which treats it as a user module.

    Parameters have transformers' names. Pass `plan=model.plan` to the engine: it names the blocks,
    which are the units of sharding and activation checkpointing.

    Args:
        model: transformers' `AutoModelForImageTextToText` with its weights; modified in place.

    Raises:
        ModelError: the model type is not supported.
    """

    def __init__(self, model: Any) -> None:
        model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if model_type not in MODEL_TYPES:
            raise ModelError(
                f"model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}"
            )
        super().__init__(model)
        # The text model only: the vision tower attends in both directions.
        model.model.language_model.set_attn_implementation(registered(operators))
        state = self.__dict__["state"] = ForwardState()
        for block in model.model.language_model.layers:
            isolate_documents(block, state, operators)

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
        pictures: Batch | None = None,
    ) -> Tensor:
        """Compute logits from tokens and the images among them.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int64; used only without pictures.
            documents: (B, S) int32; attention does not cross documents.
            pictures: patches, grids and positions (3, B, S) of the images, in the format of
                `ms_data.InstructionStream`.

        Returns:
            (B, S, V).
        """
        inner, state = self.inner, self.state
        position_ids = positions if pictures is None else pictures[POSITIONS]
        vision_inputs: dict[str, Any] = {}
        if pictures is not None and len(pictures[GRIDS]):
            vision_inputs = {PATCHES: pictures[PATCHES].to(self._dtype), GRIDS: pictures[GRIDS]}
        state.running, state.documents = True, documents
        try:
            logits: Tensor = inner(
                input_ids=tokens, position_ids=position_ids, use_cache=False, **vision_inputs
            ).logits
        finally:
            state.running, state.documents = False, None
        # Without images, a zero keeps the vision weights in the autograd graph.
        return logits if vision_inputs else logits + self._vision_zero()

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.inner.model.visual.parameters()).dtype
        return dtype

    def _vision_zero(self) -> Tensor:
        """Return zero, computed by the vision tower from a blank one-token image.

        Sharding needs a gradient for the tower's weights on every process, also in microbatches
        without images.
        """
        vision = self.inner.config.vision_config
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        weight = next(self.inner.model.visual.parameters())
        patches = torch.zeros(merge**2, width, dtype=self._dtype, device=weight.device)
        # One image: time, height, width in patches
        grid = torch.tensor([[1, merge, merge]], device=weight.device)
        outputs = self.inner.model.get_image_features(patches, grid)
        features = (outputs.pooler_output, getattr(outputs, "deepstack_features", None) or ())
        tensors = tree_leaves(features)
        zero: Tensor = torch.stack([tensor.sum() for tensor in tensors]).sum() * 0.0
        return zero
