"""`ms-parallel generate`: continue a text with a trained model."""

from argparse import Namespace

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import CommandParser, path_argument

HELP = "continue a text with a trained model"
EXAMPLE = 'ms-parallel generate runs/train/model --prompt "def main("'


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model", type=path_argument, metavar="FOLDER", help="model with its tokenizer.json"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="maximum tokens to generate (default 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 is greedy decoding (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from the k most likely tokens (default 50)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: the accelerator)")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the prompt and its continuation up to the end of the document."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.model_name import missing_model

    if (problem := missing_model(str(options.model))) is not None:
        raise ConfigError(f"MODEL must be a local folder: {problem}")
    from ms_parallel.engine.engine import Engine
    from ms_parallel.training.optional import data_package

    if options.max_new_tokens < 1:
        raise ConfigError(
            f"--max-new-tokens must be at least 1, got {options.max_new_tokens}; use a number"
            " such as 128"
        )
    tokenizer = data_package().Tokenizer.load(options.model)
    tokens = tokenizer.encode(options.prompt)
    if not tokens:
        raise ConfigError("--prompt must not be empty; pass a text to continue")
    engine = Engine(options.model, device=options.device)
    (generated,) = engine.generate(
        [tokens],
        max_new_tokens=options.max_new_tokens,
        stop_token=tokenizer.end_of_text,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    # An embedding may have more rows than the tokenizer has tokens.
    text = tokenizer.decode([token for token in generated if token < tokenizer.vocabulary_size])
    ended = bool(generated) and generated[-1] == tokenizer.end_of_text
    if options.json:
        return print_json({"text": text, "tokens": len(generated), "end_of_text": ended})
    print(options.prompt + text)
    return 0
