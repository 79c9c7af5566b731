"""Counts the memory of tensors; beyond a limit it raises the out-of-memory error of CUDA."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocator(TorchDispatchMode):
    """Counts the bytes of live tensors made inside it, and raises an error beyond ``limit``."""

    def __init__(self, limit=float("inf")):
        super().__init__()
        self.limit = limit
        self.live = {}
        self.used = self.peak = 0
        self.refusals = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in given - self.live.keys():
                self._count(tensor)
        return out

    def _count(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.live:
            if self.used + size > self.limit:
                self.refusals += 1
                raise torch.OutOfMemoryError("Tried to allocate more than the limit.")
            self.live[key] = 0
            self.used += size
            self.peak = max(self.peak, self.used)
        self.live[key] += 1
        weakref.finalize(tensor, self._forget, key, size).atexit = False

    def _forget(self, key, size):
        self.live[key] -= 1
        if not self.live[key]:
            del self.live[key]
            self.used -= size


class Largest(TorchDispatchMode):
    """Records how many numbers the largest tensor has that any operation inside it makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if not function._schema.name.startswith("aten::expand"):  # which holds no memory
                held = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.numel = max(self.numel, held)
        return out


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
