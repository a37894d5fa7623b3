"""Runs a pipeline schedule: one loop over a rank's actions, and the messages between ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ms_parallel.cluster.failures import explain
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.watch import position
from ms_parallel.memory.modes import Sharding
from ms_parallel.memory.offload import offloading
from ms_parallel.models.batch import Batch, media_of
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.experts.routing import replay_experts
from ms_parallel.models.staged import RowSplit
from ms_parallel.pipeline.messages import Mailbox
from ms_parallel.pipeline.recorder import ComputationRecorder
from ms_parallel.schedules.table.action import RECEIVES, SENDS, Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.part import drop_gathered
from ms_parallel.split.sharding import after_weight_gradients, gather_weights, set_last_backward
from ms_parallel.split.weight_gradients import DeferredWeightGrads, defer_weight_grads

Finish = Callable[[int, Tensor], Tensor]
"""Maps a microbatch index and the last stage's hidden states to a result, such as the loss."""

Call = Callable[..., Tensor]
"""Computes a stage's output from (input, positions=, documents=, cache=), with row_split= and
media= if the batch has any."""

OnGradients = Callable[[int, int, bool], None]
"""Called after a backward with (stage, microbatch, weight gradients are complete)."""

Key = tuple[int, int]
"""(stage, microbatch)."""
WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""Actions that complete a microbatch's weight gradients."""
UNTIMED = nullcontext()


@define
class Step:
    """State of one run of a schedule; entries are removed after their last use."""

    microbatches: Sequence[Batch]
    finish: Finish
    on_gradients: OnGradients | None
    """Receives each microbatch's gradients, which are then not reduced over the data axis."""
    caches: Mapping[int, KeyValueCache]
    row_splits: Sequence[RowSplit | None]
    gradients_left: dict[int, int]
    """Number of microbatches per stage whose weight gradients are not complete yet."""
    split: frozenset[Key]
    """Microbatches whose backward is split into input gradients and, later, weight gradients."""
    reduced: frozenset[int]
    """Stages with a REDUCE_GRAD action; other stages reduce in their last backward."""
    inputs: dict[Key, Tensor] = field(factory=dict)
    outputs: dict[Key, Tensor] = field(factory=dict)
    roots: dict[Key, GradientEdge] = field(factory=dict)
    """Start of the backward; keeps the graph alive but not the output."""
    gradients: dict[Key, Tensor] = field(factory=dict)
    """Gradient of a stage's output and, after its backward, of its input."""
    deferred: dict[Key, DeferredWeightGrads] = field(factory=dict)
    """Weight gradients that a split backward has not computed yet."""
    results: dict[int, Tensor] = field(factory=dict)


class Runtime:
    """Runs this process's stages according to a schedule.

    Args:
        stages: this process's stages by index.
        groups: process groups of the layout.
        calls: function that computes each stage; by default the stages themselves.
        sharding: determines when gradients are reduced and gathered weights freed.
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
        """Whether saved activations go to host memory."""
        self.recorder: ComputationRecorder | None = None
        """Records the times of computations, without waiting for messages."""

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Batch],
        finish: Finish,
        *,
        caches: Mapping[int, KeyValueCache] | None = None,
        row_splits: Sequence[RowSplit | None] | None = None,
        on_gradients: OnGradients | None = None,
    ) -> list[Tensor]:
        """Run `schedule`; return the last stage's result of each microbatch, detached.

        Actions run in table order: UNSHARD gathers a stage's sharded weights and RESHARD frees
        them, REDUCE_GRAD reduces its gradients over the data axis, and a WAIT waits for its
        message. Actions that a table omits are implied: weights are gathered for a stage's first
        microbatch, reduced and freed after its last, and sends are waited for at the end. The two
        actions of an overlapped pair run one after the other.

        A forward-only schedule evaluates; call it under `torch.no_grad()`, with one cache per stage
        to generate. `row_splits` has the split of each microbatch's rows over context ranks. The
        result is empty on processes without the last stage.
        """
        if self.recorder:
            self.recorder.schedule = schedule
        row = schedule.actions[self.groups.place.pipeline]
        computations = [part for action in row for part in action.computations]
        step = Step(
            microbatches=microbatches,
            finish=finish,
            on_gradients=on_gradients,
            caches=caches or {},
            row_splits=row_splits or [None] * len(microbatches),
            gradients_left={
                stage: sum(a.stage == stage and a.kind in WEIGHTS for a in computations)
                for stage in self.stages
            },
            # Microbatches with an I action have their W later.
            split=frozenset(
                (a.stage, a.microbatch) for a in computations if a.kind is Kind.BACKWARD_INPUT
            ),
            reduced=frozenset(a.stage for a in row if a.kind is Kind.REDUCE_GRAD),
        )
        current = row[0]
        position.passes += 1
        try:
            for action in row:
                for current in action.flat:
                    position.action = current
                    self._perform(current, step, schedule)
            self.mailbox.wait_for_sends()
            for stage in {a.stage for a in row if a.kind is Kind.UNSHARD}:
                drop_gathered(self.stages[stage])  # the copies would be stale after the update
            position.action = None
        except Exception as error:
            # No peer will complete the pending messages.
            self.mailbox.discard()
            explained = explain(error, current, self.groups)
            if explained is error:
                raise
            raise explained from error
        return [step.results[index] for index in sorted(step.results)]

    def _perform(self, action: Action, step: Step, schedule: Schedule) -> None:
        stage, microbatch = action.stage, action.microbatch
        key = (stage, microbatch)
        # Consecutive sends and receives are posted as one batch before the next computation.
        if action.kind not in SENDS | RECEIVES:
            self.mailbox.flush()
        match action.kind:
            case Kind.FORWARD:
                self._forward(key, step, schedule)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(key, step, schedule)
            case Kind.BACKWARD_WEIGHT:
                last = self._count_backward(stage, step)
                with self.recorder or UNTIMED:
                    step.deferred.pop(key).flush()
                    self._after_weight_gradients(key, last, step)
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
                after_weight_gradients(self.stages[stage], True, summed=step.on_gradients is None)
            case Kind.WAIT_REDUCE_GRAD:
                pass  # REDUCE_GRAD has ordered its reduction before anything that follows
            case _:
                raise AssertionError(f"{action} is not a single action")

    def _send(self, key: Key, forward: bool, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        # Both directions name a boundary by the stage before it.
        if forward:
            peer_stage, boundary, tensor = stage + 1, key, step.outputs.pop(key)
        else:
            peer_stage, boundary, tensor = (
                stage - 1,
                (stage - 1, microbatch),
                step.gradients.pop(key),
            )
        name = (*key, "F" if forward else "B")
        self.mailbox.send(name, tensor, schedule.placement[peer_stage], self._shape(step, boundary))

    def _receive(self, key: Key, forward: bool, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        sender, boundary = (stage - 1, (stage - 1, microbatch)) if forward else (stage + 1, key)
        name = (*key, "F" if forward else "B")
        self.mailbox.receive(name, schedule.placement[sender], self._shape(step, boundary))

    def _after_weight_gradients(self, key: Key, last: bool, step: Step) -> None:
        """Finish a stage's backward after deferred weight gradients."""
        stage, summed = self.stages[key[0]], step.on_gradients is None
        after_weight_gradients(stage, last, self.sharding, summed=summed)
        if step.on_gradients is not None:
            step.on_gradients(*key, True)

    def _count_backward(self, stage: int, step: Step) -> bool:
        """Count a completed weight gradient; return whether this backward reduces the gradients.

        True for the stage's last one, unless the table has a REDUCE_GRAD for the stage.
        """
        step.gradients_left[stage] -= 1
        return step.gradients_left[stage] == 0 and stage not in step.reduced

    def _shape(self, step: Step, boundary: Key) -> tuple[int, ...]:
        """Key of a message's shape: the stage before the boundary and the microbatch's shape."""
        stage, microbatch = boundary
        return (stage, *step.microbatches[microbatch]["tokens"].shape)

    def _forward(self, key: Key, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        batch = step.microbatches[microbatch]
        if stage == 0:
            stage_input = batch["tokens"]
        elif schedule.placement[stage - 1] == schedule.placement[stage]:
            stage_input = step.outputs.pop((stage - 1, microbatch))
        else:
            stage_input = self.mailbox.take((*key, "F"))
        if stage > 0 and torch.is_grad_enabled():
            # A leaf of the graph, so that its gradient can be sent to the previous stage.
            stage_input = step.inputs[key] = stage_input.detach().requires_grad_()
        if key in step.split:
            step.deferred[key] = DeferredWeightGrads()
        row_split, media = step.row_splits[microbatch], media_of(batch)
        experts = batch.get("routed_experts")
        with (
            self.recorder or UNTIMED,
            defer_weight_grads(step.deferred[key]) if key in step.split else UNTIMED,
            offloading(self.stages[stage]) if self.offload else UNTIMED,
            UNTIMED if experts is None else replay_experts(self.stages[stage], experts, row_split),
        ):
            hidden = self.calls[stage](
                stage_input,
                positions=batch.get("positions"),
                documents=batch.get("documents"),
                cache=step.caches.get(stage),
                **({} if row_split is None else {"row_split": row_split}),
                **({} if media is None else {"media": media}),
            )
            if stage + 1 == schedule.stages:
                hidden = step.finish(microbatch, hidden)
        if hidden.requires_grad:
            # The edge keeps the graph alive, while the output can be freed once it is sent.
            step.roots[key] = get_gradient_edge(hidden)
        if stage + 1 == schedule.stages:
            step.results[microbatch] = hidden.detach()
        else:
            step.outputs[key] = hidden.detach()

    def _backward(self, key: Key, step: Step, schedule: Schedule) -> None:
        stage, microbatch = key
        gradient: Tensor | None = None
        if stage + 1 < schedule.stages:
            # A neighboring stage on this rank hands over its gradient without a message.
            same_rank = schedule.placement[stage + 1] == schedule.placement[stage]
            next_key = (stage + 1, microbatch)
            gradient = step.gradients.pop(next_key) if same_rank else self.mailbox.take((*key, "B"))
        split = key in step.split
        # With deferred weight gradients, `_after_weight_gradients` reduces over the data axis.
        last = not split and self._count_backward(stage, step)
        summed = step.on_gradients is None
        set_last_backward(
            self.stages[stage], last, self.sharding, complete=not split, summed=summed
        )
        # Recomputed blocks run their forward again, which must defer weight gradients too.
        recomputation = defer_weight_grads(step.deferred[key]) if split else UNTIMED
        with self.recorder or UNTIMED, recomputation:
            torch.autograd.backward(step.roots.pop(key), gradient)
            if step.on_gradients is not None:
                step.on_gradients(stage, microbatch, not split)
        if stage > 0:
            stage_input = step.inputs.pop(key)
            assert stage_input.grad is not None
            step.gradients[key] = stage_input.grad
