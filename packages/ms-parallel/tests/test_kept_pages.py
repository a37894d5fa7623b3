"""The CPU allocator keeps freed pages, and a memory limit does not break this."""

import json
import subprocess
import sys
from typing import Any

from launching import environment

STEPS = """
import json, resource, torch
from ms_parallel import Engine, NextTokenLoss
torch.set_num_threads(1)
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 8192}
heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
from ms_parallel.models.registry import architecture
engine = Engine(architecture("llama", sizes | heads), device="cpu", microbatch_size=1)
rows = torch.ones(4, 128, dtype=torch.int64)
faults = []
for _ in range(8):
    began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    engine.step({"tokens": rows, "targets": rows}, NextTokenLoss())
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began)
print(json.dumps(faults))
"""


LIMITED = """
import json, resource, torch
from ms_parallel.cluster.device import LEARNED_BYTES, keep_freed_pages
from ms_parallel.planner.free_memory import status_bytes
left = status_bytes("VmData") + LEARNED_BYTES // 2
resource.setrlimit(resource.RLIMIT_DATA, (left, left))
try:
    torch.empty(LEARNED_BYTES, dtype=torch.uint8)
    refused = ""
except RuntimeError as error:
    refused = str(error)
keep_freed_pages(torch.device("cpu"))
print(json.dumps(refused))
"""


def run(program: str) -> Any:
    """Output of a new process, in which no memory was freed before."""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_steps_of_a_small_model_cause_few_page_faults() -> None:
    """If the heap were trimmed, every step would have about 13,000 page faults."""
    faults = sorted(run(STEPS)[3:])
    assert faults[len(faults) // 2] < 3000


def test_a_memory_limit_is_no_error() -> None:
    """Untouched memory counts against `ulimit -d`; a refused allocation is ignored."""
    assert "allocate memory" in run(LIMITED)
