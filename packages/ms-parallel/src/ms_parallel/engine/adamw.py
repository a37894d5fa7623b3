"""AdamW over the parts of the weights that this process holds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ms_parallel.engine.optimizer import AdamWConfig
from ms_parallel.split.part import local_part

FUSED_DEVICES = {"cpu", "cuda"}


class AdamW(torch.optim.Optimizer):
    """AdamW on the local part of each parameter; moments are float32 and lie beside them.

    Working on local tensors costs no DTensor dispatch, and lets parameters that lie on different
    meshes be updated in one fused call. It is an optimizer of torch's, so that torch's hooks, and
    profilers through them, see each update; its own `state_dict` is not used.

    Args:
        parameters: by name, those that are updated.
        config: its settings.
        weights: all weights of the models that they belong to, frozen ones too.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], config: AdamWConfig, weights: Iterable[Tensor] = ()
    ) -> None:
        every = list(dict.fromkeys((*parameters.values(), *weights)))
        super().__init__([{"params": every}], {})
        self.config = config
        self.parameters = dict(parameters)
        local = {name: local_part(parameter) for name, parameter in parameters.items()}
        self.moments = {
            name: (torch.zeros_like(part), torch.zeros_like(part)) for name, part in local.items()
        }
        self.taken = 0
        """Updates that were performed; a skipped one does not count towards bias correction."""
        self.fused = {part.device.type for part in local.values()} <= FUSED_DEVICES

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, gradients: Mapping[str, Tensor] | None, rate: float, closure: Any = None
    ) -> None:
        """Update the parameters in place.

        Args:
            gradients: this process's part of each, by name; None for an update that is skipped.
            rate: the learning rate.
            closure: not used.
        """
        if gradients is None:
            return
        parts = {name: local_part(self.parameters[name]) for name in gradients}
        matrices = [name for name, part in parts.items() if part.dim() > 1]
        vectors = [name for name, part in parts.items() if part.dim() <= 1]
        self._step(matrices, parts, gradients, rate, self.config.weight_decay)
        self._step(vectors, parts, gradients, rate, 0.0)
        self.taken += 1

    def _step(
        self,
        names: Sequence[str],
        parts: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        held = [name for name in names if parts[name].numel()]
        if not held:
            return
        device = parts[held[0]].device if self.fused else "cpu"
        steps = torch.full((len(held),), float(self.taken), device=device).unbind()
        adamw(
            [parts[name] for name in held],
            [gradients[name] for name in held],
            [self.moments[name][0] for name in held],
            [self.moments[name][1] for name in held],
            [],
            list(steps),
            foreach=False if self.fused else None,
            fused=self.fused,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.config.epsilon,
            maximize=False,
        )
