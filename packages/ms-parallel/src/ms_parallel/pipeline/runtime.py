"""Performs a pipeline schedule: one loop over a rank's actions, and the messages between ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ms_parallel.cluster.failures import explain
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.watch import position
from ms_parallel.models.batch import Batch, pictures_of
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.staged import RowSplit
from ms_parallel.pipeline.messages import Mailbox
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.schedules.table.action import RECEIVES, SENDS, Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.data_axis import Sharding
from ms_parallel.split.memory.offload import offloading
from ms_parallel.split.part import drop_gathered
from ms_parallel.split.sharding import after_weight_gradients, gather_weights, set_last_backward
from ms_parallel.split.weight_gradients import Later, putting_off

Finish = Callable[[int, Tensor], Tensor]
"""Maps a microbatch's number and the last stage's hidden states to its result: the loss in
training."""

Call = Callable[..., Tensor]
"""Computes a stage's output from (input, positions=, documents=, cache=), with row_split= and
pictures= where there are any."""

Take = Callable[[int, int, bool], None]
"""Called after a backward with (stage, microbatch, whether its weight gradients are complete)."""

Key = tuple[int, int]
"""(stage, microbatch)."""
WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""Actions that complete a microbatch's gradients of weights."""
UNTIMED = nullcontext()


@define
class Step:
    """The state of one run of a schedule; each entry goes when it is last needed."""

    microbatches: Sequence[Batch]
    finish: Finish
    take: Take | None
    """Collects each microbatch's gradients, which are then not summed over the data axis."""
    caches: Mapping[int, KeyValueCache]
    row_splits: Sequence[RowSplit | None]
    gradients_left: dict[int, int]
    """For each stage the microbatches whose gradients of weights are still to come."""
    split: frozenset[Key]
    """Microbatches whose backward is one of inputs and, later, one of weights."""
    reduced: frozenset[int]
    """Stages whose gradients REDUCE_GRAD sums over the data axis; else the last backward does."""
    inputs: dict[Key, Tensor] = field(factory=dict)
    outputs: dict[Key, Tensor] = field(factory=dict)
    roots: dict[Key, GradientEdge] = field(factory=dict)
    """Where the backward starts; keeps the graph but not the output."""
    gradients: dict[Key, Tensor] = field(factory=dict)
    """Gradient of a stage's output; after its backward, of its input."""
    later: dict[Key, Later] = field(factory=dict)
    """What a split backward has left to do for the weights."""
    results: dict[int, Tensor] = field(factory=dict)


class Runtime:
    """Runs this process's stages as a schedule says.

    Args:
        stages: this process's stages by number.
        groups: process groups of the layout.
        calls: computes each stage; by default the stages themselves are called.
        sharding: when gradients are summed and weights freed.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        groups: Groups,
        calls: Mapping[int, Call] | None = None,
        sharding: Sharding = "auto",
    ) -> None:
        self.stages = stages
        self.calls = calls or stages
        self.sharding: Sharding = sharding
        self.groups = groups
        self.mailbox = Mailbox(groups)
        self.offload = False
        """Whether what forwards keep goes to the machine's memory."""
        self.recorder: Recorder | None = None
        """Notes when each computation runs, waiting for messages left out."""

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Batch],
        finish: Finish,
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
        row_splits: Sequence[RowSplit | None] | None = None,
        take: Take | None = None,
    ) -> list[Tensor]:
        """Perform `schedule` and return the last stage's result for each microbatch, detached.

        Every action is performed where it stands: UNSHARD gathers a stage's sharded weights and
        RESHARD frees them, REDUCE_GRAD sums its gradients over the data axis, a WAIT waits for what
        it names. What a table does not name is done all the same: weights are gathered for a
        stage's first microbatch, summed and freed after its last, and sends are waited for at the
        end. The two actions of a pair are performed one after the other.

        A schedule of forwards alone evaluates; call it under `torch.no_grad()`, with a cache a
        stage to generate. `row_splits` say of each microbatch how processes share out its rows. The
        list is empty on processes that do not hold the last stage.
        """
        if self.recorder:
            self.recorder.schedule = schedule
        row = schedule.actions[self.groups.place.pipeline]
        computations = [part for action in row for part in action.computations]
        step = Step(
            microbatches=microbatches,
            finish=finish,
            take=take,
            caches=caches or {},
            row_splits=row_splits or [None] * len(microbatches),
            gradients_left={
                stage: sum(a.stage == stage and a.kind in WEIGHTS for a in computations)
                for stage in self.stages
            },
            split=frozenset(
                (a.stage, a.microbatch) for a in computations if a.kind is Kind.BACKWARD_INPUT
            ),
            reduced=frozenset(a.stage for a in row if a.kind is Kind.REDUCE_GRAD),
        )
        doing = row[0]
        position.passes += 1
        try:
            for action in row:
                for doing in action.flat:
                    position.action = doing
                    self._perform(doing, step, schedule)
            self.mailbox.wait_for_sends()
            for stage in {a.stage for a in row if a.kind is Kind.UNSHARD}:
                drop_gathered(self.stages[stage])  # an update would leave the copies behind
            position.action = None
        except Exception as error:
            self.mailbox.forget()
            explained = explain(error, doing, self.groups)
            if explained is error:
                raise
            raise explained from error
        return [step.results[index] for index in sorted(step.results)]

    def _perform(self, action: Action, step: Step, schedule: Schedule) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        if action.kind not in SENDS | RECEIVES:
            self.mailbox.flush()
        match action.kind:
            case Kind.FORWARD:
                self._forward(key, step, schedule)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(key, step, schedule)
            case Kind.BACKWARD_WEIGHT:
                last = self._is_last(stage, step)
                with self.recorder or UNTIMED:
                    step.later.pop(key).settle()
                    self._after_weights(key, last, step)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                self._send(key, action.kind is Kind.SEND_FORWARD, step, schedule)
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                self._receive(key, action.kind is Kind.RECV_FORWARD, step, schedule)
            case Kind.WAIT_SEND_FORWARD:
                self.mailbox.wait_for_sends((*key, "F"))
            case Kind.WAIT_SEND_BACKWARD:
                self.mailbox.wait_for_sends((*key, "B"))
            case Kind.UNSHARD:
                gather_weights(self.stages[stage])
            case Kind.RESHARD:
                drop_gathered(self.stages[stage])
            case Kind.REDUCE_GRAD:
                after_weight_gradients(self.stages[stage], True, summed=step.take is None)
            case Kind.WAIT_REDUCE_GRAD:
                pass  # REDUCE_GRAD returns with what follows already ordered behind its sum
            case _:
                raise AssertionError(f"{action} is no single action")

    def _send(self, key: Key, forward: bool, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        if forward:
            to, boundary, tensor = stage + 1, key, step.outputs.pop(key)
        else:
            to, boundary, tensor = stage - 1, (stage - 1, microbatch), step.gradients.pop(key)
        name = (*key, "F" if forward else "B")
        self.mailbox.send(name, tensor, schedule.placement[to], self._shape(step, boundary))

    def _receive(self, key: Key, forward: bool, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        sender, boundary = (stage - 1, (stage - 1, microbatch)) if forward else (stage + 1, key)
        name = (*key, "F" if forward else "B")
        self.mailbox.receive(name, schedule.placement[sender], self._shape(step, boundary))

    def _after_weights(self, key: Key, last: bool, step: Step) -> None:
        """Do what follows gradients of weights that were put off."""
        stage, summed = self.stages[key[0]], step.take is None
        after_weight_gradients(stage, last, self.sharding, summed=summed)
        if step.take is not None:
            step.take(*key, True)

    def _is_last(self, stage: int, step: Step) -> bool:
        """Count gradients of weights that are now complete; whether these are to be summed.

        They are the stage's last, and the table names no REDUCE_GRAD for it.
        """
        step.gradients_left[stage] -= 1
        return step.gradients_left[stage] == 0 and stage not in step.reduced

    def _shape(self, step: Step, boundary: Key) -> tuple[int, ...]:
        """Return the key of a message's shape: the boundary's stage and the microbatch's shape."""
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
            offloading(self.stages[stage]) if self.offload else UNTIMED,
        ):
            row_split, pictures = step.row_splits[microbatch], pictures_of(batch)
            hidden = self.calls[stage](
                entering,
                positions=batch.get("positions"),
                documents=batch.get("documents"),
                cache=step.caches.get(stage),
                **({} if row_split is None else {"row_split": row_split}),
                **({} if pictures is None else {"pictures": pictures}),
            )
            if stage + 1 == schedule.stages:
                hidden = step.finish(microbatch, hidden)
        if hidden.requires_grad:
            step.roots[key] = get_gradient_edge(hidden)
        if stage + 1 == schedule.stages:
            step.results[microbatch] = hidden.detach()
        else:
            step.outputs[key] = hidden.detach()

    def _backward(self, key: Key, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        gradient: Tensor | None = None
        if stage + 1 < schedule.stages:
            near = schedule.placement[stage + 1] == schedule.placement[stage]
            after = (stage + 1, microbatch)
            gradient = step.gradients.pop(after) if near else self.mailbox.take((*key, "B"))
        split = key in step.split
        # Where the last gradients are put off, what follows them sums over the data axis.
        last = not split and self._is_last(stage, step)
        summed = step.take is None
        set_last_backward(self.stages[stage], last, self.sharding, whole=not split, summed=summed)
        again = putting_off(step.later[key]) if split else UNTIMED  # for recomputed blocks
        with self.recorder or UNTIMED, again:
            torch.autograd.backward(step.roots.pop(key), gradient)
            if step.take is not None:
                step.take(stage, microbatch, not split)
        if stage > 0:
            entered = step.inputs.pop(key)
            assert entered.grad is not None
            step.gradients[key] = entered.grad
