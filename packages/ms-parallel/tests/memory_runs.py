"""What blocks keep for their backward; called by `run_processes` and by tests themselves."""

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from runs import OPTIMIZER, build, global_batch, local_rows, tiny
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ms_parallel import DistributedTrainer
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.models.experts.router import Router
from ms_parallel.pipeline.runtime import Key, Runtime, Step
from ms_parallel.planner.free_memory import status_bytes
from ms_parallel.planner.memory import predict_memory
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.memory.block_costs import storages
from ms_parallel.split.memory.recompute import recomputed_blocks
from ms_parallel.split.part import gather_full_tensor, local_part


class Alive(TorchDispatchMode):
    """The memory that operators have taken while it lasts, and that is not given back yet."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note the memory that is new in what it makes."""
        before = storages([args, kwargs])
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, tuple | list) else [made]:
            if isinstance(part, Tensor) and type(part) is Tensor:
                memory = part.untyped_storage()
                if memory._cdata not in before:
                    kept = StorageWeakRef(memory), memory.nbytes(), part.device.type
                    self.made[memory._cdata] = kept
        return made

    @property
    def size_bytes(self) -> int:
        """Bytes that are alive."""
        return sum(size for memory, size, _ in self.made.values() if not memory.expired())

    def on_bytes(self, device: str) -> int:
        """Bytes that are alive on devices of a type."""
        return sum(
            size for memory, size, at in self.made.values() if at == device and not memory.expired()
        )


def states(jobs: list[dict[str, Any]], steps: int = 2) -> list[dict[str, Any]]:
    """Whether losses and weights of each kind are those of `none`, for each layout and model.

    A job gives `layout`, `settings`, `kinds`, and `options` of the engine.
    """
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        known: dict[str, Tensor] = {}
        same: dict[str, Any] = {}
        for kind in ("none", *job["kinds"]):
            options = {**job.get("options", {}), "recompute": kind}
            engine = build(job["settings"], groups, **options)
            for step in range(steps):
                batch = local_rows(global_batch(step, rows=8), groups)
                engine.step(batch, NextTokenLoss())
            state = {name: local_part(each).detach() for name, each in engine.parameters.items()}
            known = known or {name: part.clone() for name, part in state.items()}
            same[kind] = all(torch.equal(part, known[name]) for name, part in state.items())
            if engine.runner.budget is not None:
                same[f"{kind} kept"] = engine.runner.budget.peak_bytes
        found.append(same)
    return found


def kept_by_blocks(engine: Engine, batch: Mapping[str, Tensor]) -> list[int]:
    """Bytes that each block's forward leaves alive, its output apart."""
    found: list[int] = []
    handles = []
    for stage in engine.stages.values():
        plan = engine.plan
        for name, block in stage.named_modules():
            if not plan.is_block(name):
                continue
            alive = Alive()

            def enter(*_: Any, alive: Alive = alive) -> None:
                alive.__enter__()

            def leave(module: nn.Module, args: Any, made: Tensor, alive: Alive = alive) -> None:
                alive.__exit__(None, None, None)
                # The next block, or the head, has its input counted.
                found.append(alive.size_bytes - made.untyped_storage().nbytes())
                found[-1] += args[0].untyped_storage().nbytes()

            handles += [
                block.register_forward_pre_hook(enter, prepend=True),
                block.register_forward_hook(leave),
            ]
    try:
        for stage in engine.stages.values():
            context = {name: batch[name] for name in ("positions", "documents")}
            stage(batch["tokens"], logits=False, **context).sum().backward()  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    assert found
    return found


def kinds_of(engine: Engine) -> list[str]:
    """How each block of this process is recomputed."""
    stages: Any = engine.stages.values()
    return [block.mode for stage in stages for block in recomputed_blocks(stage)]


weightless = nn.Parameter(torch.empty(0))
"""In place of a weight that was not gathered yet: it has no gradient."""


class CountingRuntime(Runtime):
    """A runtime that counts what its stages keep for their backward, and what FSDP gathers."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.stages, runtime.groups, runtime.calls, runtime.sharding)
        self.mailbox = runtime.mailbox
        self.kept: dict[Key, int] = {}
        self.activations = self.buffers = self.whole = 0
        states: list[Any] = [
            module._get_fsdp_state()
            for stage in self.stages.values()
            for module in stage.modules()
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        ]
        self.gathers = [state._fsdp_param_group for state in states]
        self.sharded = [each for group in self.gathers for each in group.fsdp_params]

    def _perform(self, action: Action, step: Step, schedule: Schedule) -> None:
        super()._perform(action, step, schedule)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            del self.kept[action.stage, action.microbatch]
        self._look_at_gradients()

    def _after_weight_gradients(self, key: Key, last: bool, step: Step) -> None:
        self._look_at_gradients()
        stage: Any = self.stages[key[0]]
        state = stage._get_fsdp_state() if isinstance(stage, FSDPModule) else None
        if state is not None:
            summing = state._root_post_backward_final_callback

            def look_and_sum() -> None:
                self._look_at_gradients()
                summing()

            state._root_post_backward_final_callback = look_and_sum
        super()._after_weight_gradients(key, last, step)
        if state is not None:
            del state._root_post_backward_final_callback

    def _look_at_gradients(self) -> None:
        whole = [each.unsharded_accumulated_grad for each in self.sharded]
        whole += [getattr(each, "_unsharded_param", weightless).grad for each in self.sharded]
        slopes = sum(storages([each for each in whole if each is not None]).values())
        # A share of them is there before it is summed: that counts as gradients.
        share = sum(each._sharded_param_data.numel() * 4 for each in self.sharded)
        self.whole = max(0, slopes - share)
        self._look()

    def _look(self) -> None:
        held = [getattr(each, "_unsharded_param", None) for each in self.sharded]
        late = [each.comm_ctx.all_gather_state for each in self.gathers]
        results = [each._all_gather_result for each in self.gathers]
        results += [each.all_gather_result for each in late if each is not None]
        held += [each.all_gather_output for each in results if each is not None]
        weights = sum(storages([each for each in held if each is not None]).values())
        self.buffers = max(self.buffers, weights + self.whole)

    def _forward(self, key: Key, step: Step, schedule: Schedule) -> None:
        kept: dict[int, int] = {}

        def keep(saved: Tensor) -> Tensor:
            kept.update(storages([saved]))
            self._look()
            return saved.detach()

        def look(saved: Tensor) -> Tensor:
            self._look()
            return saved

        def share(_: nn.Module, args: Any, kwargs: Any) -> None:
            kept.update(storages([kwargs]))  # for a block that is computed again

        blocks = recomputed_blocks(self.stages[key[0]])
        hooks = [
            each.block.register_forward_pre_hook(share, with_kwargs=True)
            for each in blocks
            if each.mode != "none"
        ]
        with saved_tensors_hooks(keep, look):
            super()._forward(key, step, schedule)
        kept |= storages([step.inputs[key]] if key[0] else [])  # tokens are the batch's
        for hook in hooks:
            hook.remove()
        for block in blocks:
            kept |= storages(block.saved_results)
        gathered = [getattr(each, "_unsharded_param", None) for each in self.sharded]
        weights = [*self.stages[key[0]].parameters(), *(g for g in gathered if g is not None)]
        for place in storages(weights):
            kept.pop(place, None)
        self.kept[key] = sum(kept.values())
        self.activations = max(self.activations, sum(self.kept.values()))


def _evenly(self: Router, scores: Tensor, shares: Tensor, stats: Any) -> Tensor:
    """Choose experts in turn, as predictions assume."""
    tokens, count = scores.shape[0] * scores.shape[1], self.choice.num_experts_per_tok
    experts = torch.arange(tokens * count) % self.choice.num_experts
    return experts.view(*scores.shape[:2], count)


def packed(rows: int, length: int, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Documents and positions of rows that are all cut alike; by default one document a row."""
    sizes = torch.tensor(lengths or [length])
    documents = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    starts = (sizes.cumsum(0) - sizes)[documents]
    return documents.int().repeat(rows, 1), (torch.arange(length) - starts).repeat(rows, 1)


@contextmanager
def sums_over_copies() -> Iterator[list[int]]:
    """Bytes of the messages in which gradients are summed over copies."""
    sent: list[int] = []
    send = Groups.all_reduce

    def note(self: Groups, tensor: Tensor, axis: str | None = None, **more: Any) -> Tensor:
        if axis == "replicas":
            sent.append(tensor.untyped_storage().nbytes())
        return send(self, tensor, axis, **more)

    Groups.all_reduce = note  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Groups.all_reduce = send  # type: ignore[method-assign]


def counted(jobs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What each process of a layout holds at its peak in the second update, by category.

    A job gives `layout`, `settings`, `rows` of a microbatch, `length`, `microbatches`, `options`,
    and may give the `lengths` of the documents of a row.
    """
    torch.set_num_threads(1)
    Router._select = _evenly  # type: ignore[method-assign]
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"optimizer": OPTIMIZER, **job["options"], "microbatch_size": job["rows"]}
        engine = Engine(tiny(**job["settings"]), groups=groups, **options)
        rows = job["rows"] * job["microbatches"] * groups.layout.data_ranks
        batch = global_batch(0, rows=rows, length=job["length"])
        batch["documents"], batch["positions"] = packed(rows, job["length"], job.get("lengths"))
        del batch["weights"]
        mine = local_rows(batch, groups)
        engine.step(mine, NextTokenLoss())
        runtime = engine.runner.runtime = CountingRuntime(engine.runner.runtime)
        microbatches = [
            {name: each.clone() for name, each in batch.items()}  # memory of its own
            for batch in engine.runner.microbatches(mine)
        ]
        engine.runner.forward_backward(microbatches, NextTokenLoss(), 1.0, engine.reduction)
        with sums_over_copies() as sent:
            engine.reduction.gradients()
        weights = [local_part(each) for each in engine.parameters.values()]
        gradients = [local_part(each.grad) for each in engine.parameters.values()]  # type: ignore[arg-type]
        moments = [*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values()]
        found.append(
            {
                "pipeline": groups.place.pipeline,
                "weights": sum(each.nbytes for each in weights),
                "gradients": sum(each.nbytes for each in gradients),
                "moments": sum(each.nbytes for moment in moments for each in moment.values()),
                "activations": runtime.activations,
                "buffers": max(runtime.buffers, max(sent, default=0) - runtime.activations),
            }
        )
    return found


def predicted(jobs: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
    """The same by prediction, for each pipeline rank of each job."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        ranks = predict_memory(
            tiny(**job["settings"]),
            Layout.parse(job["layout"]),
            rows=job["rows"],
            sequence_length=job["length"],
            microbatches=job["microbatches"],
            documents=packed(job["rows"], job["length"], job["lengths"])[0]
            if job.get("lengths")
            else None,
            **{"optimizer": OPTIMIZER, "device": "cpu", **job["options"]},
        )
        found.append([msgspec.structs.asdict(each) for each in ranks])
    return found


def offloaded(jobs: list[dict[str, Any]], device: str | None = None) -> list[dict[str, Any]]:
    """Losses and weights after two updates, and what a forward leaves on the device."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device=device, timeout_s=120)
        engine = build(job["settings"], groups, **job["options"])
        losses = [
            engine.step(local_rows(global_batch(step), groups), NextTokenLoss()).loss
            for step in range(2)
        ]
        state = {
            name: gather_full_tensor(part.detach()).cpu()
            for name, part in engine.parameters.items()
        }
        alive = Alive()
        on_device: list[int] = []
        runtime = engine.runner.runtime
        perform = runtime._perform

        def watched(*given: Any, perform: Any = perform, alive: Any = alive) -> None:
            if given[0].kind is Kind.FORWARD:
                with alive:
                    perform(*given)
                on_device.append(alive.on_bytes(str(groups.device.type)))  # noqa: B023
            else:
                perform(*given)

        runtime._perform = watched  # type: ignore[method-assign]
        batch = local_rows(global_batch(3), groups)
        engine.runner.forward_backward(
            engine.runner.microbatches(batch), NextTokenLoss(), 1.0, engine.reduction
        )
        sums = {name: part.double().sum().item() for name, part in state.items()}
        found.append({"losses": losses, "sums": sums, "on_device": max(on_device)})
    return found


def compiled(jobs: list[dict[str, Any]], backend: str | None = None) -> list[list[list[float]]]:
    """Losses of three updates of each job, as it is and compiled."""
    torch.set_num_threads(1)
    if backend is not None:  # without a compiler of C++, which takes most of the time
        compile_with = torch.compile
        torch.compile = lambda model: compile_with(model, backend=backend)  # type: ignore[assignment]
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=300)
        both = []
        for chosen in (False, True):
            engine = build(job.get("settings", {}), groups, compile=chosen, **job["options"])
            if chosen and job["options"].get("mixed_precision") and groups.layout.world_size == 1:
                assert engine.module is not None  # plain weights
                assert {each.dtype for each in engine.module.parameters()} == {torch.float32}
            both.append(
                [
                    engine.step(local_rows(global_batch(step), groups), NextTokenLoss()).loss
                    for step in range(3)
                ]
            )
        found.append(both)
    return found


class Room:
    """Lets the last rank take so many more bytes and the others any number, by `ulimit -d`.

    With `every` no rank may take more.
    """

    def __init__(self, more_bytes: int, *, every: bool = False) -> None:
        self.last = every or int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.more_bytes = more_bytes

    def __enter__(self) -> None:
        if self.last:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            limit = status_bytes("VmData") + self.more_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))

    def __exit__(self, *_: object) -> None:
        if self.last:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def trained_in(room_bytes: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in as much more memory; rows of a microbatch, the loss, or that memory ran out."""
    torch.set_num_threads(1)
    rows: list[int] = []

    def listen(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "microbatch":
            rows.append(int(fields["rows"]))

    layout = Layout.parse(settings.pop("layout"))
    trainer = DistributedTrainer(
        **settings, output_dir=Path(folder) / "out", parallel_config=layout, on_event=listen
    )
    connect(layout, device="cpu", timeout_s=60)
    with Room(room_bytes):
        try:
            loss = trainer.train(f"{folder}/shards", steps=2).loss
        except (MemoryError, RuntimeError) as error:
            return {"failed": str(error)}
    return {"rows": rows, "loss": loss}
