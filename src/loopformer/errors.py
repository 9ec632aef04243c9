"""What a user can get wrong. The command line prints the sentence and exits with `exit_code`."""


class LoopformerError(ValueError):
    """Wrong input: text, an option, a setting. The message is one sentence: what is wrong, what to do."""

    exit_code = 2


class RunFailed(LoopformerError):
    """Work that was asked for rightly and could not be done: not enough memory, a loss that is not finite."""

    exit_code = 1


class FileProblem(LoopformerError):
    """A file or folder that is missing, damaged or not what it should be."""

    exit_code = 1
