"""Parts on their way among the ranks of an axis, by messages or by writing to the peers' memory."""
