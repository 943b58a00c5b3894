"""Tests: unit (one process), distributed (gloo ranks), parity (recorded data), gpu."""
