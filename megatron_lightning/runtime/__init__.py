"""What turns a LightningModule into this rank's part of it, and runs its steps."""
