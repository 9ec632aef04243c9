"""The command `loopformer`, also as `python -m loopformer`. Ctrl-C during the slow import is one sentence, too."""

import sys


def main() -> None:
    try:
        from loopformer.cli import main as run
    except KeyboardInterrupt:
        print("loopformer: stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
