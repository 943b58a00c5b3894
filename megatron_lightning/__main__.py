"""`python -m megatron_lightning COMMAND`, as the command `megatron-lightning`."""

from megatron_lightning.cli.main import main

if __name__ == "__main__":
    main()
