"""A run of four updates with an environment: `python episode_run.py FOLDER`."""

import sys
from pathlib import Path

from plain_tools import KillsTheTrainer
from small_models import decoder
from tool_models import STOP, chat_tokenizer

from ms_align import GRPOTrainer, ToolLimits

if __name__ == "__main__":
    GRPOTrainer(
        policy_model=decoder(vocab_size=260),
        tokenizer=chat_tokenizer(),
        reward_model={
            "environment": "environment",
            "length": lambda s: [len(x.messages) for x in s],
        },
        environment=KillsTheTrainer,
        # Most tokens of this untrained policy end its turn.
        stop_token_ids=[*range(200), STOP],
        steps=4,
        batch_size=8,
        num_generations=4,
        max_new_tokens=6,
        max_episode_tokens=400,
        # A step that takes longer would end its episode, on a busy machine too.
        tool_limits=ToolLimits(timeout_s=600.0),
        checkpoint_every=1,
        learning_rate=1e-3,
        output_dir=Path(sys.argv[1]),
        progress=False,
    ).optimize([{"prompt": "count", "answer": 3}, {"prompt": "go", "answer": 2}])
