"""Script of test_adapter_layouts, run in each process of a layout: SFT of adapters.

    python adapter_layout_run.py MODEL OUT SETTINGS

SETTINGS is JSON with `layout`, `lora`, and optionally `options` of the engine. The run is stopped
after two updates, and its state continues in a new engine.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ms_align.engines.assembly import start_engine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import EngineOptions
from ms_align.losses.sft import SFTLoss
from ms_align.run.saving import write_result


def train(engine: Any, batches: list[torch.Tensor]) -> list[list[float]]:
    """Take a step on this rank's rows of each batch; return losses and gradient norms."""
    reports = []
    for tokens in batches:
        rows = tokens.chunk(engine.data_ranks)[engine.data_rank]
        report = engine.step({"tokens": rows, "targets": rows.roll(-1, 1)}, SFTLoss())
        reports.append([report.loss, report.grad_norm])
    return reports


def main() -> None:
    """Train four steps, resuming after two, and write losses, adapter and merged model."""
    torch.set_num_threads(1)
    model, out, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])

    def start() -> Any:
        return start_engine(
            model,
            layout=settings["layout"],
            lora=settings["lora"],
            optimizer=OptimizerOptions(learning_rate=1e-2),
            microbatch_size=1,
            options=EngineOptions(**settings.get("options", {})),
        )

    tokens = torch.randint(0, 250, (4, 4, 16), generator=torch.Generator().manual_seed(0))
    engine = start()
    reports = train(engine, list(tokens[:2]))
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    continued = train(engine, list(tokens[2:]))
    resumed = start()
    resumed.load_state_dict(state)
    assert train(resumed, list(tokens[2:])) == continued
    write_result(resumed, out, None)
    sys.stdout.write(json.dumps(reports + continued) + "\n")


if __name__ == "__main__":
    main()
