"""Saving and loading through `torch.distributed.checkpoint`.

Empty on purpose: `verify` must be importable without torch, so nothing here imports its siblings.
"""
