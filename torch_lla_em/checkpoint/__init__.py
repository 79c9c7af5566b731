"""What survives a kill: the state after the last EM step."""

from torch_lla_em.checkpoint.folder import FORMAT, Folder

__all__ = ["FORMAT", "Folder"]
