"""A model of transformers that sees, trained from packed rows of text and pictures.

Its text model is run with our attention, so that the documents of a row stay apart as they do in
every other model here; its vision tower reads each picture by itself, as transformers lets it.
"""

from typing import Any

import torch
from torch import Tensor

from ms_parallel import operators
from ms_parallel.errors import ModelError
from ms_parallel.models.batch import GRIDS, PATCHES, POSITIONS, Batch
from ms_parallel.models.foreign.around import Around
from ms_parallel.models.foreign.attention import registered
from ms_parallel.models.foreign.packing import Now, keep_apart
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import tree_leaves

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The `model_type` of those whose pictures, positions and pictures' places are known here."""


class SeeingModel(Around):
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL that an `Engine` trains as a module of the user's own.

    Its parameters bear transformers' names. Give the engine `plan=model.plan`, which names the
    blocks that are sharded and recomputed one by one.

    Args:
        model: transformers' `AutoModelForImageTextToText`, with its weights; it is taken over.

    Raises:
        ModelError: it is a model of another kind.
    """

    def __init__(self, model: Any) -> None:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if kind not in KINDS:
            raise ModelError(f"{kind!r} is not known to see; known: {', '.join(KINDS)}")
        super().__init__(model)
        model.model.language_model.set_attn_implementation(registered(operators))
        now = self.__dict__["now"] = Now()
        for block in model.model.language_model.layers:
            keep_apart(block, now, operators)

    @property
    def plan(self) -> ModelPlan:
        """The plan, which names the blocks of its text model."""
        return ModelPlan(blocks="model.language_model.layers.*")

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        pictures: Batch | None = None,
    ) -> Tensor:
        """Turn tokens, and the pictures that stand among them, into logits.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int64; used where there are no pictures.
            documents: (B, S) int32; attention never crosses.
            pictures: patches, grids and positions (3, B, S), as `ms_data.InstructionStream` gives
                them.

        Returns:
            (B, S, V).
        """
        inner, now = self.inner, self.now
        where = positions if pictures is None else pictures[POSITIONS]
        seen: dict[str, Any] = {}
        if pictures is not None and len(pictures[GRIDS]):
            seen = {PATCHES: pictures[PATCHES].to(self._dtype), GRIDS: pictures[GRIDS]}
        now.running, now.documents = True, documents
        try:
            made: Tensor = inner(
                input_ids=tokens, position_ids=where, use_cache=False, **seen
            ).logits
        finally:
            now.running, now.documents = False, None
        return made if seen else made + self._nothing_seen()

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = next(self.inner.model.visual.parameters()).dtype
        return found

    def _nothing_seen(self) -> Tensor:
        """Return zero, made by the vision tower of a blank picture of one token.

        So its weights have a gradient on every process, which sharding asks for, also where a
        microbatch happens to hold no picture.
        """
        vision = self.inner.config.vision_config
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        weight = next(self.inner.model.visual.parameters())
        patches = torch.zeros(merge**2, width, dtype=self._dtype, device=weight.device)
        grid = torch.tensor([[1, merge, merge]], device=weight.device)
        found = self.inner.model.get_image_features(patches, grid)
        features = (found.pooler_output, getattr(found, "deepstack_features", None) or ())
        tensors = tree_leaves(features)
        zero: Tensor = torch.stack([each.sum() for each in tensors]).sum() * 0.0
        return zero
