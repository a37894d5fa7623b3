"""Record a training script's steps and modules from outside, with torch's own hooks.

A step starts at the first forward after an optimizer step and ends at the next such forward. So
gradient accumulation counts as one step, as do two optimizers that step alternately. If no model is
called, a step ends when one of its optimizers is about to step again. Training code without torch
optimizers calls `mark_step`.

The models are found when an optimizer first steps: they are the outermost modules that own its
parameters. Modules are hooked down to `DEPTH` levels below; hooks on every module would cost too
much time. Compiled modules are hooked from outside only: a hook inside would be compiled too.

Needs torch; imported once the script has imported it.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ms_profile.log.ring import Kind, Ring

DEPTH: Final = 2
MAX_MODULES: Final = 512
MARKED: Final = 0
"""Represents `mark` in the set of optimizer ids."""
INNER: Final = int(Kind.MODULE)
CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)


class StepWatch:
    """Record modules, optimizers and the gaps between them into a ring, step by step.

    Args:
        ring: destination of the spans.
        on_step: called with the number of the step that begins; not called for step 0.
        on_update: called after a weight update, once the number of optimizers of the previous step
            have stepped. No pipeline message is in flight then; at a step's start one may be.
    """

    def __init__(
        self, ring: Ring, on_step: Callable[[int], None], on_update: Callable[[], None]
    ) -> None:
        self._ring, self._on_step, self._on_update = ring, on_step, on_update
        self._between_name = ring.name("between steps")
        self._backward_name = ring.name("backward")
        self._step_name = ring.name("step")
        self._step_span = ring.begin(self._step_name, Kind.STEP)
        self._open: list[int] = []
        self._optimizing: list[int] = []
        self._gap: int | None = None
        self._optimizers: set[int] = set()
        self._watched: set[int] = set()
        self._forward_seen = False
        self._stepped: set[int] = set()
        self._expected = 0
        self.steps = 0
        """Number of finished steps."""
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def close(self) -> None:
        """Remove every hook, end open spans, and count the last step if it was completed."""
        self.unhook()
        self.steps += bool(self._stepped)
        self._end_gap()
        self._ring.end(self._step_span)

    def unhook(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def mark(self, models: Iterable[nn.Module]) -> None:
        """Record a weight update and watch the models that were updated."""
        for model in models:
            self._watch_model(model)
        # Two updates without a forward in between: a step without a watched model.
        if MARKED in self._stepped and not self._forward_seen:
            self._begin_step()
        self._end_gap()
        self._note_update(MARKED)
        self._gap = self._ring.begin(self._between_name, Kind.BETWEEN)

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers.add(id(optimizer))
            self._watch_models(optimizer)
        if id(optimizer) in self._stepped and not self._forward_seen:
            self._begin_step()
        self._end_gap()
        name = self._ring.name(type(optimizer).__name__)
        self._optimizing.append(self._ring.begin(name, Kind.OPTIMIZER))

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if self._optimizing:
            self._ring.end(self._optimizing.pop())
        self._end_gap()
        self._note_update(id(optimizer))
        self._gap = self._ring.begin(self._between_name, Kind.BETWEEN)

    def _note_update(self, optimizer: int) -> None:
        self._stepped.add(optimizer)
        # The same number of optimizers as in the previous step: the weights are up to date.
        if len(self._stepped) >= self._expected:
            self._on_update()

    def _begin_step(self) -> None:
        self._expected = len(self._stepped)
        self._stepped.clear()
        self.steps += 1
        self._end_gap()
        self._ring.end(self._step_span)
        # Before the callback, whose spans belong to the new step.
        self._ring.step = self.steps
        self._on_step(self.steps)
        self._step_span = self._ring.begin(self._step_name, Kind.STEP)

    def _end_gap(self) -> None:
        if self._gap is not None:
            self._ring.end(self._gap)
            self._gap = None

    def _watch_models(self, optimizer: Optimizer) -> None:
        for model in find_models(optimizer):
            self._watch_model(model)

    def _watch_model(self, model: nn.Module) -> None:
        if id(model) in self._watched:
            return
        for path, module in modules_to_watch(model):
            if id(module) not in self._watched:
                self._watched.add(id(module))
                self._watch(path, module)

    def _watch(self, path: str, module: nn.Module) -> None:
        name = self._ring.name(path)
        pre_hook = partial(self._before_module, name)
        self._handles += [
            module.register_forward_pre_hook(pre_hook, prepend=True),
            # Called even if the forward raises, so that the span ends.
            module.register_forward_hook(self._after_module, always_call=True),
        ]

    def _before_module(self, name: int, *_: object) -> None:
        if is_compiling():
            return
        # Inside another forward, or recomputed by activation checkpointing.
        if self._open or _in_backward():
            self._open.append(self._ring.begin(name, INNER))
            return
        self._forward_seen = True
        # The first forward after an update begins the next step.
        if self._stepped:
            self._begin_step()
        self._end_gap()
        self._open.append(self._ring.begin(name, Kind.FORWARD))

    def _after_module(self, *_: object) -> None:
        if is_compiling() or not self._open:
            return
        self._ring.end(self._open.pop())
        # The outermost forward has returned: until the optimizer steps, this is the backward.
        if not self._open and torch.is_grad_enabled() and not _in_backward():
            self._end_gap()
            self._gap = self._ring.begin(self._backward_name, Kind.BACKWARD)


def find_models(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost live modules that own at least one parameter of the optimizer."""
    owned = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    # `isinstance` would read `__class__`, which makes lazy proxies import their module.
    live = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    inner = {id(child) for module in live for child in module.__dict__["_modules"].values()}
    return [
        module
        for module in live
        if id(module) not in inner and any(id(weight) in owned for weight in module.parameters())
    ]


def modules_to_watch(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model and the submodules that get spans, each with its name."""
    modules = [(type(model).__name__, model)]
    modules += _inside(model, "", 0)
    return modules[:MAX_MODULES]


def _inside(module: nn.Module, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if _compiled(module) or isinstance(module, torch.jit.ScriptModule):
        return
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, CONTAINERS):  # ModuleList and ModuleDict are never called themselves
            yield from _inside(child, child_path, depth)
        elif depth < DEPTH and not _compiled(child):
            yield child_path, child
            yield from _inside(child, child_path, depth + 1)


def _compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _in_backward() -> bool:
    """Return whether autograd is running: a recomputed forward belongs to the backward pass."""
    current_task_id = getattr(torch._C, "_current_graph_task_id", None)
    return current_task_id is not None and current_task_id() != -1
