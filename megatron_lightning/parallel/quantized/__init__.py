"""Linear layers in low precision: which ones, their products, and borders under parallelism."""
