"""The command line `megatron-lightning`. Nothing is imported before a command is chosen."""
