"""Performs a pipeline schedule: one loop over a rank's actions, and the messages between ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ms_parallel.cluster.failures import explain
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.watch import position
from ms_parallel.models.batch import Batch
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.pipeline.messages import Mailbox
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.schedules.table.action import COMPUTE, Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.sharding import after_weight_gradients, set_last_backward
from ms_parallel.split.weight_gradients import Later, putting_off

__all__ = ["Finish", "Key", "Runtime", "Step", "call_stage"]

Finish = Callable[[Tensor, Batch], Tensor]
"""What the last stage makes of its hidden state: in training the scalar to go back from."""

Call = Callable[..., Tensor]
"""Calls a stage: (stage, what enters, positions=, documents=, cache=) to what leaves it."""

Key = tuple[int, int]
"""(stage, microbatch)."""
WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""What ends with gradients of weights."""
UNTIMED = nullcontext()


def call_stage(stage: nn.Module, entering: Tensor, **context: Any) -> Tensor:
    """Call a stage of our own models, whose head waits for the loss."""
    hidden: Tensor = stage(entering, logits=False, **context)
    return hidden


@define
class Step:
    """What one performance of a schedule holds; each entry goes when it is last needed."""

    microbatches: Sequence[Batch]
    finish: Finish
    caches: Mapping[int, KeyValueCache]
    gradients_left: dict[int, int]
    """For each stage the microbatches whose gradients of weights are still to come."""
    split: frozenset[Key]
    """Those whose backward is one of inputs and, later, one of weights."""
    inputs: dict[Key, Tensor] = field(factory=dict)
    outputs: dict[Key, Tensor] = field(factory=dict)
    roots: dict[Key, GradientEdge] = field(factory=dict)
    """Where the backward starts; keeps the graph but not the output."""
    gradients: dict[Key, Tensor] = field(factory=dict)
    """Of a stage's output, and after its backward of its input."""
    later: dict[Key, Later] = field(factory=dict)
    """Of a split backward, what is left to do for the weights."""
    results: dict[int, Tensor] = field(factory=dict)


class Runtime:
    """Runs this process's stages as a schedule says.

    Args:
        stages: this process's stages by number; called with hidden states or tokens and the
            keyword arguments of `Decoder.forward`.
        groups: the layout's processes.
        call: calls a stage, with what enters it and the positions, documents and cache.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], groups: Groups, call: Call | None = None
    ) -> None:
        self.stages = stages
        self.call = call or call_stage
        self.groups = groups
        self.mailbox = Mailbox(groups)
        self.recorder: Recorder | None = None
        """Notes when each computation runs, waiting for messages left out."""

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Batch],
        finish: Finish,
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
    ) -> list[Tensor]:
        """Perform `schedule` and return, for each microbatch, what the last stage made (detached).

        A schedule of forwards alone evaluates; call it under `torch.no_grad()`, with a cache a
        stage to generate. The list is empty on processes that do not hold the last stage.
        """
        if self.recorder:
            self.recorder.schedule = schedule
        row = schedule.actions[self.groups.place.pipeline]
        computations = [part for action in row for part in action.computations]
        step = Step(
            microbatches=microbatches,
            finish=finish,
            caches=caches or {},
            gradients_left={
                stage: sum(a.stage == stage and a.kind in WEIGHTS for a in computations)
                for stage in self.stages
            },
            split=frozenset(
                (a.stage, a.microbatch) for a in computations if a.kind is Kind.BACKWARD_INPUT
            ),
        )
        doing = row[0]
        position.passes += 1
        try:
            for action in row:
                for doing in action.parts or (action,):
                    position.action = doing
                    self._perform(doing, step, schedule)
            self.mailbox.flush()
            self.mailbox.wait_for_sends()
            position.action = None
        except Exception as error:
            self.mailbox.forget()
            told = explain(error, doing, self.groups)
            if told is error:
                raise
            raise told from error
        return [step.results[index] for index in sorted(step.results)]

    def _perform(self, action: Action, step: Step, schedule: Schedule) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        if action.kind in COMPUTE:
            self.mailbox.flush()
        match action.kind:
            case Kind.FORWARD:
                self._forward(key, step, schedule)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(key, step, schedule)
            case Kind.BACKWARD_WEIGHT:
                step.gradients_left[stage] -= 1
                with self.recorder or UNTIMED:
                    step.later.pop(key).settle()
                    after_weight_gradients(self.stages[stage], step.gradients_left[stage] == 0)
            case Kind.SEND_FORWARD:
                peer = schedule.placement[stage + 1]
                self.mailbox.send(step.outputs.pop(key), peer, self._shape(step, key))
            case Kind.RECV_FORWARD:
                peer = schedule.placement[stage - 1]
                self.mailbox.receive((*key, "F"), peer, self._shape(step, (stage - 1, microbatch)))
            case Kind.SEND_BACKWARD:
                peer = schedule.placement[stage - 1]
                shape = self._shape(step, (stage - 1, microbatch))
                self.mailbox.send(step.gradients.pop(key), peer, shape)
            case Kind.RECV_BACKWARD:
                peer = schedule.placement[stage + 1]
                self.mailbox.receive((*key, "B"), peer, self._shape(step, key))
            case _:
                # FSDP gathers and frees weights and sums their gradients when it is due; sends are
                # waited for when the row is done.
                pass

    def _shape(self, step: Step, boundary: Key) -> tuple[int, ...]:
        """Under which the shape of what crosses a boundary is remembered."""
        stage, microbatch = boundary
        return (stage, *step.microbatches[microbatch]["tokens"].shape)

    def _forward(self, key: Key, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        batch = step.microbatches[microbatch]
        if stage == 0:
            entering = batch["tokens"]
        elif schedule.placement[stage - 1] == schedule.placement[stage]:
            entering = step.outputs.pop((stage - 1, microbatch))
        else:
            entering = self.mailbox.take((*key, "F"))
        if stage > 0 and torch.is_grad_enabled():
            entering = step.inputs[key] = entering.detach().requires_grad_()
        if key in step.split:
            step.later[key] = Later()
        with (
            self.recorder or UNTIMED,
            putting_off(step.later[key]) if key in step.split else UNTIMED,
        ):
            hidden = self._compute(key, entering, step, schedule)
        if hidden.requires_grad:
            step.roots[key] = get_gradient_edge(hidden)
        if stage + 1 == schedule.stages:
            step.results[microbatch] = hidden.detach()
        else:
            step.outputs[key] = hidden.detach()

    def _compute(self, key: Key, entering: Tensor, step: Step, schedule: Schedule) -> Tensor:
        """What a stage makes of what enters it; on the last stage, what is made of that."""
        stage, microbatch = key
        batch = step.microbatches[microbatch]
        hidden = self.call(
            self.stages[stage],
            entering,
            positions=batch.get("positions"),
            documents=batch.get("documents"),
            cache=step.caches.get(stage),
        )
        return step.finish(hidden, batch) if stage + 1 == schedule.stages else hidden

    def _backward(self, key: Key, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        gradient: Tensor | None = None
        if stage + 1 < schedule.stages:
            near = schedule.placement[stage + 1] == schedule.placement[stage]
            after = (stage + 1, microbatch)
            gradient = step.gradients.pop(after) if near else self.mailbox.take((*key, "B"))
        split = key in step.split
        step.gradients_left[stage] -= not split
        # Where the last gradients are put off, what follows them sums over the data axis.
        last = not split and step.gradients_left[stage] == 0
        set_last_backward(self.stages[stage], last)
        again = putting_off(step.later[key]) if split else UNTIMED  # for recomputed blocks
        with self.recorder or UNTIMED, again:
            torch.autograd.backward(step.roots.pop(key), gradient)
        if stage > 0:
            entered = step.inputs.pop(key)
            assert entered.grad is not None
            step.gradients[key] = entered.grad
