"""Checkpoints: the state after the last EM step, from which a killed fit resumes."""

from torch_lla_em.checkpoint.folder import FORMAT, Folder

__all__ = ["FORMAT", "Folder"]
