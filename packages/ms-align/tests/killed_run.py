"""Script of test_kill_and_resume: a training run that kills itself or its server.

    python killed_run.py FOLDER TRAINER [KILL_AT [VICTIM]]

Every reward call and every event is a kill point. At kill point number KILL_AT, the process sends
itself SIGKILL. With VICTIM, a file that contains a process id, that process is killed instead at
every multiple of KILL_AT, up to 20 times. If FAKE_VLLM_URL or FAKE_VLLM_PYTHON is set,
GRPOTrainer-ahead generates on a server.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from small_models import decoder, vowels

import ms_align
from ms_align import Sample
from ms_align.events import JsonLines
from ms_align.tokenizer import ByteTokenizer

kill_points = kills = 0


def kill_point() -> None:
    """Count a kill point, and kill a process if it is a selected one."""
    global kill_points, kills
    kill_points += 1
    if len(sys.argv) == 4 and kill_points == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    if len(sys.argv) == 5 and kill_points % int(sys.argv[3]) == 0 and kills < 20:
        with suppress(ProcessLookupError):  # already killed and not restarted yet
            os.kill(int(Path(sys.argv[4]).read_text()), signal.SIGKILL)
            kills += 1


def reward(samples: Sequence[Sample]) -> list[float]:
    """Return the fraction of vowels; this is a kill point during a rollout."""
    kill_point()
    return vowels(samples)


def main() -> None:
    """Train for eight updates with three rollouts."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    lines = JsonLines(folder / "events.jsonl")

    def on_event(kind: str, fields: Any) -> None:
        lines(kind, fields)
        kill_point()

    settings: dict[str, Any] = {}
    if sys.argv[2] == "PPOTrainer":
        settings = {"epochs": 2, "kl_target": 0.5, "kl_horizon": 50}
    if sys.argv[2] == "PPOTrainer-own-value":
        settings = {"epochs": 2, "value_model": "copy"}
    if sys.argv[2] in ("GRPOTrainer", "RLOOTrainer-groups"):
        settings = {"num_generations": 4, "epochs": 2}
    policy = decoder()
    if sys.argv[2] == "GRPOTrainer-experts":
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        policy = decoder("qwen3_moe", **sizes)
        lora = {"rank": 2, "quantize_base": "nf4", "init_lora_weights": "pissa"}
        lora["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        settings = {"num_generations": 4, "lora": lora}
    if sys.argv[2] == "GRPOTrainer-ahead":
        settings = {"num_generations": 4, "max_staleness": 2, "steps": 60}
        addresses = {
            name: os.environ[f"FAKE_VLLM_{name.upper()}"]
            for name in ("url", "python")
            if f"FAKE_VLLM_{name.upper()}" in os.environ
        }
        if addresses:
            settings |= {"generator": "vllm", "vllm": {**addresses, "retry_wait_s": 0.05}}
            if "python" in addresses:
                settings["vllm"]["max_restarts"] = 20
    getattr(ms_align, sys.argv[2].partition("-")[0])(
        policy_model=policy,
        reward_model=reward,
        tokenizer=ByteTokenizer(),
        kl_coeff=0.1,
        batch_size=16,
        minibatch_size=8,
        microbatch_size=4,
        max_new_tokens=6,
        learning_rate=1e-3,
        checkpoint_every=1,
        output_dir=folder,
        on_event=on_event,
        progress=False,
        **{"steps": 8, **settings},
    ).optimize(["hello", "a", "what is", "xyz", "to be"])
    Path(folder, "kills").write_text(str(kills))


if __name__ == "__main__":
    main()
