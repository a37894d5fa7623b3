"""The reference model that DPO and KTO share."""

from functools import partial
from typing import Any

from attrs import field, frozen

from ms_align.engines.protocol import Engine
from ms_align.engines.reference import ADAPTER_OFF, Reference, reference_of
from ms_align.settings import valid_path
from ms_align.trainers.base.offline import OfflineTrainer


@frozen(kw_only=True, slots=False)
class ReferenceTrainer(OfflineTrainer):
    """Reference model."""

    reference_model: Any = field(default=None, validator=valid_path(optional=True, objects=True))
    """Reference: a folder; in Python also a module or an Engine. Default: a frozen copy of the
    initial model, or the model without its adapters."""

    def reference(self, engine: Engine) -> Reference:
        """Build the reference; must be called before the policy is trained."""
        reference = self.reference_model
        if reference is None and engine.adapters is not None:
            reference = ADAPTER_OFF
        if reference is None and self.layout is not None:
            reference = self.model  # a sharded model is not copied but loaded a second time
        return reference_of(reference, engine, partial(self.start_engine, trained=False))
