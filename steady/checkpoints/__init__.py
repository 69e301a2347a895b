"""Checkpoints are valid or absent: writing, verifying, finding, backups; run directories."""
