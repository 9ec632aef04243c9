"""`python -m loopformer` is the same command as `loopformer`."""

from loopformer.cli import main

main()
