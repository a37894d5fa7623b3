"""Runs of `test_memory.py`: saved bytes, predicted and counted memory, offload and compilation."""

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
from ms_parallel.memory.block_costs import storages
from ms_parallel.memory.recompute import recomputed_blocks
from ms_parallel.models.experts.router import Router
from ms_parallel.pipeline.runtime import Key, Runtime, Step
from ms_parallel.planner.free_memory import status_bytes
from ms_parallel.planner.memory import predict_memory
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.part import gather_full_tensor, local_part


class Alive(TorchDispatchMode):
    """Storages that operators allocate inside the context and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record the storages that its outputs add."""
        before = storages([args, kwargs])
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else [result]:
            if isinstance(output, Tensor) and type(output) is Tensor:
                storage = output.untyped_storage()
                if storage._cdata not in before:
                    entry = StorageWeakRef(storage), storage.nbytes(), output.device.type
                    self.allocated[storage._cdata] = entry
        return result

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages that are alive."""
        return sum(size for ref, size, _ in self.allocated.values() if not ref.expired())

    def on_bytes(self, device: str) -> int:
        """Bytes of the storages that are alive on devices of one type."""
        return sum(
            size for ref, size, at in self.allocated.values() if at == device and not ref.expired()
        )


def states(jobs: list[dict[str, Any]], steps: int = 2) -> list[dict[str, Any]]:
    """Compare the parameters of each recompute mode with "none", bit for bit.

    A job has `layout`, `settings`, `modes`, and optionally `options` of the engine. The result maps
    each mode to its equality, and "MODE peak" to the peak bytes of a budget.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        baseline: dict[str, Tensor] = {}
        equal: dict[str, Any] = {}
        for mode in ("none", *job["modes"]):
            options = {**job.get("options", {}), "recompute": mode}
            engine = build(job["settings"], groups, **options)
            for step in range(steps):
                batch = local_rows(global_batch(step, rows=8), groups)
                engine.step(batch, NextTokenLoss())
            state = {name: local_part(param).detach() for name, param in engine.parameters.items()}
            baseline = baseline or {name: part.clone() for name, part in state.items()}
            equal[mode] = all(torch.equal(part, baseline[name]) for name, part in state.items())
            if engine.runner.budget is not None:
                equal[f"{mode} peak"] = engine.runner.budget.peak_bytes
        results.append(equal)
    return results


def saved_bytes_by_block(engine: Engine, batch: Mapping[str, Tensor]) -> list[int]:
    """Bytes that each block's forward leaves alive, including its input but not its output."""
    sizes: list[int] = []
    handles = []
    for stage in engine.stages.values():
        plan = engine.plan
        for name, block in stage.named_modules():
            if not plan.is_block(name):
                continue
            alive = Alive()

            def enter(*_: Any, alive: Alive = alive) -> None:
                alive.__enter__()

            def leave(module: nn.Module, args: Any, output: Tensor, alive: Alive = alive) -> None:
                alive.__exit__(None, None, None)
                # The next block, or the head, has its input counted.
                sizes.append(alive.size_bytes - output.untyped_storage().nbytes())
                sizes[-1] += args[0].untyped_storage().nbytes()

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
    assert sizes
    return sizes


def block_modes(engine: Engine) -> list[str]:
    """Recompute mode of each block of this process."""
    stages: Any = engine.stages.values()
    return [block.mode for stage in stages for block in recomputed_blocks(stage)]


weightless = nn.Parameter(torch.empty(0))
"""Placeholder for a weight that is not gathered yet and has no gradient."""


class CountingRuntime(Runtime):
    """Runtime that counts the bytes saved for backward passes and gathered by FSDP."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.stages, runtime.groups, runtime.calls, runtime.sharding)
        self.mailbox = runtime.mailbox
        self.saved_bytes: dict[Key, int] = {}
        self.activations = self.buffers = self.unsharded_grads = 0
        states: list[Any] = [
            module._get_fsdp_state()
            for stage in self.stages.values()
            for module in stage.modules()
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        ]
        self.gathers = [state._fsdp_param_group for state in states]
        self.sharded = [param for group in self.gathers for param in group.fsdp_params]

    def _perform(self, action: Action, step: Step, schedule: Schedule) -> None:
        super()._perform(action, step, schedule)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            del self.saved_bytes[action.stage, action.microbatch]
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
        grads = [param.unsharded_accumulated_grad for param in self.sharded]
        grads += [getattr(param, "_unsharded_param", weightless).grad for param in self.sharded]
        grad_bytes = sum(storages([grad for grad in grads if grad is not None]).values())
        # The local shard is counted as "gradients", also before the reduction.
        shard_bytes = sum(param._sharded_param_data.numel() * 4 for param in self.sharded)
        self.unsharded_grads = max(0, grad_bytes - shard_bytes)
        self._look()

    def _look(self) -> None:
        tensors = [getattr(param, "_unsharded_param", None) for param in self.sharded]
        pending = [group.comm_ctx.all_gather_state for group in self.gathers]
        results = [group._all_gather_result for group in self.gathers]
        results += [state.all_gather_result for state in pending if state is not None]
        tensors += [result.all_gather_output for result in results if result is not None]
        weights = sum(storages([tensor for tensor in tensors if tensor is not None]).values())
        self.buffers = max(self.buffers, weights + self.unsharded_grads)

    def _forward(self, key: Key, step: Step, schedule: Schedule) -> None:
        saved_storages: dict[int, int] = {}

        def pack(saved: Tensor) -> Tensor:
            saved_storages.update(storages([saved]))
            self._look()
            return saved.detach()

        def unpack(saved: Tensor) -> Tensor:
            self._look()
            return saved

        def count_kwargs(_: nn.Module, args: Any, kwargs: Any) -> None:
            saved_storages.update(storages([kwargs]))  # inputs of a recomputed block

        blocks = recomputed_blocks(self.stages[key[0]])
        hooks = [
            block.block.register_forward_pre_hook(count_kwargs, with_kwargs=True)
            for block in blocks
            if block.mode != "none"
        ]
        with saved_tensors_hooks(pack, unpack):
            super()._forward(key, step, schedule)
        # The inputs of stage 0 are tokens, which belong to the batch.
        saved_storages |= storages([step.inputs[key]] if key[0] else [])
        for hook in hooks:
            hook.remove()
        for block in blocks:
            saved_storages |= storages(block.saved_results)
        gathered = [getattr(param, "_unsharded_param", None) for param in self.sharded]
        weights = [*self.stages[key[0]].parameters(), *(g for g in gathered if g is not None)]
        for storage in storages(weights):
            saved_storages.pop(storage, None)
        self.saved_bytes[key] = sum(saved_storages.values())
        self.activations = max(self.activations, sum(self.saved_bytes.values()))


def _select_round_robin(self: Router, scores: Tensor, shares: Tensor, stats: Any) -> Tensor:
    """Choose experts round-robin, as predictions assume."""
    tokens, count = scores.shape[0] * scores.shape[1], self.choice.num_experts_per_tok
    experts = torch.arange(tokens * count) % self.choice.num_experts
    return experts.view(*scores.shape[:2], count)


def packed_documents(
    rows: int, length: int, lengths: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Documents and positions of rows cut at the same places; one document per row by default."""
    sizes = torch.tensor(lengths or [length])
    documents = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    starts = (sizes.cumsum(0) - sizes)[documents]
    return documents.int().repeat(rows, 1), (torch.arange(length) - starts).repeat(rows, 1)


@contextmanager
def sums_over_copies() -> Iterator[list[int]]:
    """Record the bytes of each gradient all-reduce over replicas."""
    sent: list[int] = []
    all_reduce = Groups.all_reduce

    def recorded(self: Groups, tensor: Tensor, axis: str | None = None, **options: Any) -> Tensor:
        if axis == "replicas":
            sent.append(tensor.untyped_storage().nbytes())
        return all_reduce(self, tensor, axis, **options)

    Groups.all_reduce = recorded  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Groups.all_reduce = all_reduce  # type: ignore[method-assign]


def count_bytes(jobs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Count the bytes that a process holds at its peak in the second update, by category.

    A job has `layout`, `settings`, `rows` of a microbatch, `length`, `microbatches`, `options`, and
    optionally the `lengths` of the documents of a row.
    """
    torch.set_num_threads(1)
    Router._select = _select_round_robin  # type: ignore[method-assign]
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"optimizer": OPTIMIZER, **job["options"], "microbatch_size": job["rows"]}
        engine = Engine(tiny(**job["settings"]), groups=groups, **options)
        rows = job["rows"] * job["microbatches"] * groups.layout.data_ranks
        batch = global_batch(0, rows=rows, length=job["length"])
        batch["documents"], batch["positions"] = packed_documents(
            rows, job["length"], job.get("lengths")
        )
        del batch["weights"]
        local = local_rows(batch, groups)
        engine.step(local, NextTokenLoss())
        runtime = engine.runner.runtime = CountingRuntime(engine.runner.runtime)
        microbatches = [
            {
                name: tensor.clone() for name, tensor in batch.items()
            }  # own storage for each microbatch
            for batch in engine.runner.microbatches(local)
        ]
        engine.runner.forward_backward(microbatches, NextTokenLoss(), 1.0, engine.reduction)
        with sums_over_copies() as sent:
            engine.reduction.gradients()
        weights = [local_part(param) for param in engine.parameters.values()]
        gradients = [local_part(param.grad) for param in engine.parameters.values()]  # type: ignore[arg-type]
        moments = [*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values()]
        results.append(
            {
                "pipeline": groups.place.pipeline,
                "weights": sum(tensor.nbytes for tensor in weights),
                "gradients": sum(tensor.nbytes for tensor in gradients),
                "moments": sum(tensor.nbytes for moment in moments for tensor in moment.values()),
                "activations": runtime.activations,
                "buffers": max(runtime.buffers, max(sent, default=0) - runtime.activations),
            }
        )
    return results


def predict_bytes(jobs: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
    """Predict the same for each pipeline rank of each job."""
    torch.set_num_threads(1)
    predictions = []
    for job in jobs:
        ranks = predict_memory(
            tiny(**job["settings"]),
            Layout.parse(job["layout"]),
            rows=job["rows"],
            sequence_length=job["length"],
            microbatches=job["microbatches"],
            documents=packed_documents(job["rows"], job["length"], job["lengths"])[0]
            if job.get("lengths")
            else None,
            **{"optimizer": OPTIMIZER, "device": "cpu", **job["options"]},
        )
        predictions.append([msgspec.structs.asdict(rank) for rank in ranks])
    return predictions


def train_offloaded(jobs: list[dict[str, Any]], device: str | None = None) -> list[dict[str, Any]]:
    """Losses and weight sums after two updates, and the peak bytes on the device in a forward."""
    torch.set_num_threads(1)
    results = []
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

        def measured(*args: Any, perform: Any = perform, alive: Any = alive) -> None:
            if args[0].kind is Kind.FORWARD:
                with alive:
                    perform(*args)
                on_device.append(alive.on_bytes(str(groups.device.type)))  # noqa: B023
            else:
                perform(*args)

        runtime._perform = measured  # type: ignore[method-assign]
        batch = local_rows(global_batch(3), groups)
        engine.runner.forward_backward(
            engine.runner.microbatches(batch), NextTokenLoss(), 1.0, engine.reduction
        )
        sums = {name: part.double().sum().item() for name, part in state.items()}
        results.append({"losses": losses, "sums": sums, "on_device": max(on_device)})
    return results


def train_compiled(
    jobs: list[dict[str, Any]], backend: str | None = None
) -> list[list[list[float]]]:
    """Losses of three updates of each job, eager and compiled."""
    torch.set_num_threads(1)
    if backend is not None:  # skip the C++ compiler, which takes most of the time
        compile_with = torch.compile
        torch.compile = lambda model: compile_with(model, backend=backend)  # type: ignore[assignment]
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=300)
        losses = []
        for is_compiled in (False, True):
            engine = build(job.get("settings", {}), groups, compile=is_compiled, **job["options"])
            if (
                is_compiled
                and job["options"].get("mixed_precision")
                and groups.layout.world_size == 1
            ):
                assert engine.module is not None  # plain weights
                assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
            losses.append(
                [
                    engine.step(local_rows(global_batch(step), groups), NextTokenLoss()).loss
                    for step in range(3)
                ]
            )
        results.append(losses)
    return results


class MemoryLimit:
    """Limit on the memory that the last rank may allocate, or all ranks, by `ulimit -d`."""

    def __init__(self, extra_bytes: int, *, every: bool = False) -> None:
        self.limited = every or int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.extra_bytes = extra_bytes

    def __enter__(self) -> None:
        if self.limited:
            _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
            limit = status_bytes("VmData") + self.extra_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))

    def __exit__(self, *_: object) -> None:
        if self.limited:
            _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))


def trained_in(room_bytes: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in limited memory; return the microbatch rows and the loss, or that memory ran out."""
    torch.set_num_threads(1)
    rows: list[int] = []

    def on_event(event: str, fields: Mapping[str, Any]) -> None:
        if event == "microbatch":
            rows.append(int(fields["rows"]))

    layout = Layout.parse(settings.pop("layout"))
    trainer = DistributedTrainer(
        **settings, output_dir=Path(folder) / "out", parallel_config=layout, on_event=on_event
    )
    connect(layout, device="cpu", timeout_s=60)
    with MemoryLimit(room_bytes):
        try:
            loss = trainer.train(f"{folder}/shards", steps=2).loss
        except (MemoryError, RuntimeError) as error:
            return {"failed": str(error)}
    return {"rows": rows, "loss": loss}
