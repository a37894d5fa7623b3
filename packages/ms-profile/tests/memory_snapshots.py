"""Memory snapshots as `torch.cuda.memory._dump_snapshot` writes them, from a simulated allocator.

The allocator rounds, caches, splits and merges blocks like torch's CUDACachingAllocator, and the
training loop allocates like a small transformer: weights, activations, gradients on threads without
Python frames, and AdamW's moments. Its own counters are the truth for the tests.
"""

import pickle
from pathlib import Path
from typing import Any

from attrs import define, field

__all__ = ["CachingAllocator", "Snapshot", "train"]

MIB = 1 << 20
SITE = "/usr/lib/python3.12/site-packages/torch"


def frame(name: str, file: str, line: int) -> dict[str, Any]:
    """A frame of a snapshot."""
    return {"name": name, "filename": file, "line": line}


SCRIPT = frame("main", "/home/user/train.py", 40)
CALL = frame("_call_impl", f"{SITE}/nn/modules/module.py", 1790)
WEIGHTS = [
    frame("__init__", f"{SITE}/nn/modules/linear.py", 112),
    frame("__init__", "/home/user/model.py", 12), SCRIPT,
]  # fmt: skip
MLP = [
    frame("forward", f"{SITE}/nn/modules/linear.py", 134), CALL,
    frame("MLP.forward", "/home/user/model.py", 22), CALL,
    frame("Block.forward", "/home/user/model.py", 31), CALL, SCRIPT,
]  # fmt: skip
SCORES = [frame("Attention.forward", "/home/user/model.py", 18), CALL,
          frame("Block.forward", "/home/user/model.py", 30), CALL, SCRIPT]  # fmt: skip
BATCH = [frame("main", "/home/user/train.py", 38)]
MOMENTS = [frame("_init_group", f"{SITE}/optim/adamw.py", 120),
           frame("step", f"{SITE}/optim/adamw.py", 214), SCRIPT]  # fmt: skip
UPDATE = [frame("_multi_tensor_adamw", f"{SITE}/optim/adamw.py", 630),
          frame("step", f"{SITE}/optim/adamw.py", 214), SCRIPT]  # fmt: skip
BACKWARD: list[Any] = []


@define
class Block:
    """A block of a segment."""

    address: int
    size: int
    requested: int = 0
    in_use: bool = False
    frames: list[Any] = field(factory=list)


@define
class CachingAllocator:
    """Blocks in segments of 2 MiB, 20 MiB, or the size of a large allocation."""

    entries: list[dict[str, Any]] = field(factory=list)
    segments: list[list[Block]] = field(factory=list)
    recording: bool = True
    allocated: int = 0
    peak: int = 0
    clock_us: int = 1_800_000_000_000_000
    _next_address: int = 0x7F0000000000

    def record(self, action: str, address: int, size: int, frames: list[Any]) -> None:
        """Append an entry of the trace."""
        self.clock_us += 7
        if self.recording:
            self.entries.append(
                {"action": action, "addr": address, "size": size, "stream": 0,
                 "time_us": self.clock_us, "compile_context": "N/A", "user_metadata": "",
                 "pool_id": (0, 0), "frames": frames}
            )  # fmt: skip

    def allocate(self, requested: int, frames: list[Any]) -> int:
        """Allocate the smallest free block that fits, or a new segment; return the address."""
        size = -(-requested // 512) * 512
        small = size <= MIB
        fitting = [
            (block.size, block.address, blocks, index)
            for blocks in self.segments
            if (sum(block.size for block in blocks) <= 2 * MIB) == small
            for index, block in enumerate(blocks)
            if not block.in_use and block.size >= size
        ]
        if fitting:
            _, _, blocks, index = min(fitting, key=lambda item: item[:2])
        else:
            large = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            total = 2 * MIB if small else large
            blocks, index = [Block(self._next_address, total)], 0
            self.segments.append(blocks)
            self._next_address += total
            self.record("segment_alloc", blocks[0].address, total, frames)
        block = blocks[index]
        if block.size - size >= (512 if small else MIB):
            blocks.insert(index + 1, Block(block.address + size, block.size - size))
            block.size = size
        block.in_use, block.requested, block.frames = True, requested, frames
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        self.record("alloc", block.address, block.size, frames)
        return block.address

    def free(self, address: int) -> None:
        """Free a block and merge it with free neighbors."""
        for blocks in self.segments:
            for index, block in enumerate(blocks):
                if block.address != address or not block.in_use:
                    continue
                block.in_use = False
                self.allocated -= block.size
                self.record("free_requested", address, block.size, [])
                self.record("free_completed", address, block.size, [])
                for start in (index, index - 1):
                    if 0 <= start < len(blocks) - 1 and not (
                        blocks[start].in_use or blocks[start + 1].in_use
                    ):
                        blocks[start].size += blocks.pop(start + 1).size
                return

    def snapshot(self) -> dict[str, Any]:
        """Return the structure of `torch.cuda.memory._snapshot`."""
        segments = []
        for blocks in self.segments:
            total = sum(block.size for block in blocks)
            in_use = sum(block.size for block in blocks if block.in_use)
            segments.append(
                {"device": 0, "address": blocks[0].address, "total_size": total,
                 "allocated_size": in_use, "active_size": in_use, "requested_size": in_use,
                 "stream": 0, "segment_type": "small" if total == 2 * MIB else "large",
                 "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
                 "blocks": [
                     {"address": block.address, "size": block.size,
                      "requested_size": block.requested,
                      "state": "active_allocated" if block.in_use else "inactive",
                      "frames": block.frames if block.in_use else []}
                     for block in blocks
                 ]}
            )  # fmt: skip
        return {
            "segments": segments, "device_traces": [self.entries],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""}, "external_annotations": [],
        }  # fmt: skip


@define
class Snapshot:
    """A simulated training: its allocator, and the true bytes by category at the peak."""

    allocator: CachingAllocator
    at_peak: dict[str, int]

    def write(self, path: Path, protocol: int = 4) -> Path:
        """Write the file."""
        path.write_bytes(pickle.dumps(self.allocator.snapshot(), protocol))
        return path


def train(
    *, blocks: int = 4, steps: int = 3, width: int = 1 << 20, record_from: int = 0
) -> Snapshot:
    """Simulate a training of some blocks with weights of `width` floats each.

    Args:
        blocks: transformer blocks.
        steps: training steps.
        width: number of parameters of each block.
        record_from: step at which recording starts; 0: before the model is created.
    """
    allocator = CachingAllocator(recording=record_from == 0)
    owned: dict[str, dict[int, int]] = {name: {} for name in
                                        ("weights", "gradients", "moments", "activations",
                                         "buffers", "other")}  # fmt: skip
    best, at_peak = 0, dict[str, int]()

    def take(category: str, size: int, frames: list[Any]) -> int:
        nonlocal best, at_peak
        before = allocator.allocated
        address = allocator.allocate(size, frames)
        owned[category][address] = allocator.allocated - before
        if allocator.allocated > best:
            best = allocator.allocated
            at_peak = {name: sum(sizes.values()) for name, sizes in owned.items()}
        return address

    def drop(category: str, address: int) -> None:
        del owned[category][address]
        allocator.free(address)

    for _ in range(blocks):
        take("weights", width * 4, WEIGHTS)
    for step in range(steps):
        allocator.recording = step >= record_from
        batch = take("other", 300_000, BATCH)
        activations = []
        for _ in range(blocks):
            scores = take("buffers", width * 3, SCORES)
            activations.append(take("activations", width * 10 + 100, MLP))
            drop("buffers", scores)
        gradients = []
        for address in reversed(activations):
            scratch = take("buffers", width * 2, BACKWARD)
            gradients.append(take("gradients", width * 4, BACKWARD))
            drop("buffers", scratch)
            drop("activations", address)
        if not owned["moments"]:
            for _ in range(2 * blocks):
                take("moments", width * 4, MOMENTS)
        scratch = take("buffers", width * 4 * blocks, UPDATE)
        drop("buffers", scratch)
        for address in gradients:
            drop("gradients", address)
        drop("other", batch)
    return Snapshot(allocator, at_peak)
