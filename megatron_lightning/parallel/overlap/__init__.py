"""Layers of a split sequence as one operation with their collectives, hidden or not."""
