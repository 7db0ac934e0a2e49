"""Backends: each computes the same attention on some hardware. `base` says what each can do."""
