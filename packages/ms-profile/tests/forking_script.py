"""A training script that forks: before torch is imported, in a traced window, and by a pool."""
# ruff: noqa: T201 - a script prints

import multiprocessing
import os
import sys


def train(steps: int) -> None:
    """Train a small network."""
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps == 12 and step == 4:
            profile_in_a_child(model)


def profile_in_a_child(model: object) -> None:
    """Fork in the middle of training; the child uses torch's profiler."""
    import torch

    child = os.fork()
    if child:
        print("inside", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return
    with torch.profiler.profile() as profiler:
        model(torch.ones(4, 8)).sum().backward()  # type: ignore[operator]
    os._exit(0 if len(profiler.key_averages()) > 5 else 9)


if __name__ == "__main__":
    first = os.fork()
    train(6 if first == 0 else 12)
    if first == 0:
        sys.exit(3)
    print("before", os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    worker = multiprocessing.get_context("fork").Process(target=train, args=(6,))
    worker.start()
    worker.join()
    print("after", worker.exitcode)
