"""The harness's own command line, with our models in it, since it has no hook for others' models.

python -m loopformer.lm_eval --model loopformer --model_args path=runs/mine,budget=4 --tasks arc_easy --limit 50

Model arguments: path, and budget or trajectory (as 4-2-1-1), device, dtype, batch_tokens.
"""

import sys

from loopformer.errors import LoopformerError


def main() -> None:
    """Register `loopformer`, then do what `lm_eval` does."""
    try:
        import loopformer.evaluation.harness  # noqa: F401  registers the model, or says that lm_eval is missing
    except LoopformerError as error:
        _end(error)
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except LoopformerError as error:
        _end(error)


def _end(error: LoopformerError) -> None:
    print(f"loopformer: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


if __name__ == "__main__":
    main()
