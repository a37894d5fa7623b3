"""How do I run PPO with a reward of my own?

    python examples/align/ppo_own_reward.py --steps 80

A reward is any callable that maps samples to numbers. Here it favors characters that are valid in a
Python name; the prompts are names of standard library modules. `held_out` prompts are only for
evaluation, and the KL measures the distance from the initial policy. The reward rises from about
0.3 within seconds.
"""

import argparse
import sys
from pathlib import Path

from ms_align import PPOTrainer, Sample
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize


def identifier_share(samples: list[Sample]) -> list[float]:
    """Fraction of each response that is valid in a Python name: letters, digits, underscores."""
    return [
        sum(("a" + letter).isidentifier() for letter in sample.response) / len(sample.response)
        if sample.response
        else 0.0
        for sample in samples
    ]


def main(arguments: list[str] | None = None) -> None:
    """Train a small byte-level policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("ppo-own-reward"))
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args(arguments)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 258}
    policy = build_model(architecture("llama", sizes))  # or a folder, or a transformers model
    initialize(policy, seed=0)
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    result = PPOTrainer(
        policy_model=policy,
        reward_model=identifier_share,
        tokenizer="bytes",
        kl_coeff=0.02,
        learning_rate=5e-3,
        steps=options.steps,
        batch_size=32,
        max_new_tokens=8,
        output_dir=options.folder,
        held_out=names[:16],
        log_every=20,
    ).optimize(names[16:])
    print(f"reward of held-out prompts {result.first['reward']:.3f} -> {result.last['reward']:.3f}")
    assert result.last["reward"] > result.first["reward"]


if __name__ == "__main__":
    main()
