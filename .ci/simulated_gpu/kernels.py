"""Replacements for all CUDA kernels: they check the devices of their arguments and run on the
CPU."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor

CPU = torch.device("cpu")

# These use sizes only, or what the simulated runtime can do.
NATIVE = """empty.memory_format empty_strided as_strided view view_as_real view_as_complex unfold
    _reshape_alias resize_ set_ set_.source_Storage set_.source_Storage_storage_offset
    set_.source_Tensor is_set_to record_stream _local_scalar_dense _efficientzerotensor
    _fused_sdp_choice _nested_view_from_buffer""".split()

# The host waits for sizes, for a result, or for an error code of linear algebra.
WAITING = """nonzero nonzero.out masked_select masked_select.out _unique _unique2 unique_dim
    unique_consecutive unique_dim_consecutive repeat_interleave.Tensor bincount equal _linalg_eigh
    _linalg_eigh.eigenvalues _linalg_svd _linalg_svd.U linalg_eig linalg_eig.out linalg_lstsq.out
    _ctc_loss""".split()

# cuBLAS has no products of integers.
PRODUCTS = "mm bmm addmm baddbmm addmv addr dot vdot".split()

_kept: list[object] = []


def install() -> None:
    """Replace the kernels registered under the dispatch key CUDA."""
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    between = torch.library.get_kernel(torch.ops.aten.copy_.default, "CUDA")
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    lenient = _lenient()
    for name in (n.removeprefix("aten::") for n in names if n.startswith("aten::")):
        if name in (*NATIVE, "copy_"):
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, Kernel(name, op, name in lenient), "CUDA", allow_override=True)
    within = Kernel("copy_", torch.ops.aten.copy_.default, True)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy on the GPU; torch's own code copies to and from it, and may have to wait."""
        if self.is_cuda and src.is_cuda:
            return within(self, src, non_blocking)
        between.call_boxed(keys, self, src, non_blocking)
        return self

    library.impl("copy_", copy_, "CUDA", allow_override=True)


def _lenient() -> set[str]:
    """Return the operations that accept a number on the CPU among tensors on a GPU."""
    text = (
        Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    ).read_text()
    entries = re.split(r"^- func: ", text, flags=re.MULTILINE)
    return {e.partition("(")[0] for e in entries if re.search(r"^  device_check: NoCheck", e, re.M)}


class Kernel:
    """The replacement of one operation."""

    def __init__(self, name: str, op: Any, lenient: bool):
        self.name, self.lenient = name, lenient
        self.run = REPLACEMENTS.get(name, op)
        self.arguments = op._schema.arguments
        self.tensors = {a.name for a in self.arguments if "Tensor" in str(a.type)}
        self.written = {a.name for a in self.arguments if a.alias_info and a.alias_info.is_write}
        places = {a.name: i for i, a in enumerate(self.arguments)}
        self.generator = places.get("generator")
        self.draws = torch.Tag.nondeterministic_seeded in op.tags or self.generator is not None
        self.indexes = name.startswith(("index.", "index_put", "_index_put_impl_", "_unsafe_index"))
        self.is_product = name.partition(".")[0].rstrip("_") in PRODUCTS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            call = Call(self)
            given = [
                call.inward(value, a.name) for value, a in zip(args, self.arguments, strict=False)
            ]
            named = {key: call.inward(value, key) for key, value in kwargs.items()}
            call.check(named)
            if "device" in named:
                named["device"] = CPU
            run = self._drawn if self.draws else self._run
            return call.outward(run(given, named))

    def _run(self, args: list, kwargs: dict) -> Any:
        return self.run(*args, **kwargs)

    def _drawn(self, args: list, kwargs: dict) -> Any:
        """Run with numbers that follow from the GPU's generator, and advance it."""
        place = self.generator
        given = kwargs.get("generator")
        if place is not None and place < len(args):
            given = args[place]
        source = given or torch.cuda.default_generators[0]
        mark = f"{source.initial_seed()} {source.get_offset()}".encode()
        source.set_offset(source.get_offset() + 4)
        seed = int.from_bytes(hashlib.sha256(mark).digest()[:8], "little") >> 1
        if given is None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return self.run(*args, **kwargs)
        own = torch.Generator("cpu").manual_seed(seed)
        if "generator" in kwargs:
            return self.run(*args, **{**kwargs, "generator": own})
        return self.run(*args[:place], own, *args[place + 1 :], **kwargs)


class Call:
    """The tensors of one call: those on the GPU, and CPU tensors over the same memory."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.empty: list[tuple[Tensor, Tensor]] = []
        self.numbers, self.stray, self.waits = 0, False, kernel.name in WAITING
        self.dtype: torch.dtype | None = None

    def inward(self, value: Any, name: str) -> Any:
        """Return an argument as the CPU kernel takes it."""
        if isinstance(value, (list, tuple)):
            return [self.inward(v, name) for v in value]
        if isinstance(value, torch.Generator) and value.device.type != "cuda":
            raise RuntimeError(
                f"Expected a 'cuda' device type for generator but found '{value.device.type}'"
            )
        if isinstance(value, (int, float)) and name in self.kernel.tensors:
            return self._number(value)
        if not isinstance(value, Tensor):
            return value
        picks = self.kernel.indexes and name == "indices"
        written = name in self.kernel.written
        if not value.is_cuda:
            if picks:  # copied to the GPU, by a copy that waits
                self.waits |= bool(value.numel())
            elif value.dim() or written or not self.kernel.lenient:
                self.stray = True
            else:
                self.numbers += 1
            return value
        if value.layout != torch.strided:
            raise NotImplementedError(f"The simulated GPU has no {value.layout} tensors.")
        self.waits |= picks and value.dtype in (torch.bool, torch.uint8)
        self.dtype = self.dtype or value.dtype
        if written and not value.numel():
            host = torch.empty(value.shape, dtype=value.dtype, device=CPU)
            self.empty.append((value, host))
        else:
            host = seen_by_cpu(value)
        self.pairs.append((value, host))
        return host

    def _number(self, value: float) -> Tensor:
        """Return a number as a tensor again, of the dtype that type promotion gives."""
        dtype = self.dtype
        whole = dtype is None or not (dtype.is_floating_point or dtype.is_complex)
        if whole and isinstance(value, float):
            dtype = torch.get_default_dtype()
        elif dtype in (None, torch.bool):
            dtype = torch.int64
        return torch.tensor(value, dtype=dtype, device=CPU)

    def check(self, named: dict[str, Any]) -> None:
        """Raise the errors of the real kernel, and synchronise where it does."""
        name = self.kernel.name
        if (self.stray and self.pairs) or (self.numbers > 1 and not name.startswith("where")):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (when checking arguments of {name})"
            )
        if self.kernel.is_product and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise NotImplementedError(f'"{name}_cuda" not implemented for {self.dtype}')
        if self.waits or named.get("check_errors"):
            torch.cuda.current_stream().synchronize()

    def outward(self, value: Any) -> Any:
        """Return the results on the GPU."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.outward(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        for gpu, host in self.empty:
            if value is host:
                gpu.resize_(host.shape)
                seen_by_cpu(gpu).copy_(host)
                return gpu
        memory = value.untyped_storage().data_ptr()
        for gpu, host in self.pairs:
            own = memory and memory == host.untyped_storage().data_ptr()
            if value is host or (own and value.dtype == gpu.dtype):
                if value is host:
                    return gpu
                shape = value.shape, value.stride(), value.storage_offset()
                return torch.ops.aten.as_strided(gpu, *shape)
        value = value.contiguous() if 0 in value.stride() else value
        gpu = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        if value.numel():
            seen_by_cpu(gpu).copy_(value)
        return gpu


def seen_by_cpu(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of one on the GPU."""
    own = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), CPU, own.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


# operations that the CPU has under another name


def convolution(x, weight, padding, stride, dilation, groups, *flags):
    return torch.ops.aten.convolution(
        x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups
    )


REPLACEMENTS = {"cudnn_convolution": convolution}
