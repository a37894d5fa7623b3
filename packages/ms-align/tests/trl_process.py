"""Train a small model with TRL's GRPOTrainer and a reward of ms-align, and compare its logs."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ms_align.rewards.trl import to_trl

WORDS = [f"w{n}" for n in range(30)]


def main() -> None:
    """Three GRPO steps."""
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<eos>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    means = []

    def wanted_word(samples: list) -> list[float]:
        """Fraction of the words that are the answer."""
        scores = [float(sample.answer in sample.response.split()) for sample in samples]
        assert all(sample.extra["level"] == 2 for sample in samples)
        means.append(sum(scores) / len(scores))
        return scores

    rows = [{"prompt": WORDS[n], "answer": WORDS[n % 3], "level": 2} for n in range(12)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=to_trl(wanted_word),
        args=GRPOConfig(
            output_dir="out",
            max_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            bf16=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 3, logged
    assert all(abs(a - b) < 1e-6 for a, b in zip(logged, means, strict=True)), (logged, means)
    sys.stdout.write("equal rewards in 3 steps\n")


if __name__ == "__main__":
    main()
