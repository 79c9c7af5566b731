"""A stand-in for a small card: tensors beyond a limit are refused as CUDA refuses them."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocator(TorchDispatchMode):
    """Counts the bytes of live tensors made inside it, and refuses more than ``limit``."""

    def __init__(self, limit=float("inf")):
        super().__init__()
        self.limit = limit
        self.live = {}
        self.peak = 0
        self.refusals = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.bytes()
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in given - self.live.keys():
                self._count(tensor)
        return out

    def _count(self, tensor):
        storage, used = tensor.untyped_storage(), self.bytes()  # which forgets addresses set free
        key = storage._cdata
        if key in self.live:
            self.live[key][1].append(weakref.ref(tensor))
            return
        if used + storage.nbytes() > self.limit:
            self.refusals += 1
            raise torch.OutOfMemoryError("Tried to allocate more than there is.")
        self.live[key] = (storage.nbytes(), [weakref.ref(tensor)])
        self.peak = max(self.peak, self.bytes())

    def bytes(self):
        for key, (_, tensors) in list(self.live.items()):
            if all(tensor() is None for tensor in tensors):
                del self.live[key]
        return sum(size for size, _ in self.live.values())


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
