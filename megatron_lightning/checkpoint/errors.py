"""The error of a checkpoint that cannot be written, found or trusted."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file, tensor or rank
    concerned.
    """
