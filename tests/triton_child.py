"""python -m tests.triton_child values|compile OP...: kernels in Triton without a GPU.

values   run by Triton's interpreter (TRITON_INTERPRET=1) beside the specification, in a memory apart
compile  of samples, for an H100 (sm_90): what the interpreter lets pass, the compiler may refuse
fault    values, where gated activations write nothing

Prints a line for each op, and ends with 1 at the first that fails.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import packtrain as pt
import packtrain.engine.optim
from packtrain.devtools.check.check_cases import check_values
from packtrain.devtools.check.op_samples import samples_of_op, typed_samples
from packtrain.dtypes import READABLE
from packtrain.engine import ops
from packtrain.engine.backends import triton as gpu
from packtrain.engine.backends.torch_backend import TorchDevice
from packtrain.engine.backends.torch_temporaries import kernel_footprint
from packtrain.engine.tensor import OPS, Call
from tests import checks

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip
MAX_SHARED_NBYTES = 232_448  # bytes of shared memory that a program of an H100 can have


def values(name: str) -> str:
    checks.assert_passed(check_values(name, (TorchDevice("far", "cpu", fused=True),)))
    return "as specified"


def values_of_fault(name: str) -> str:
    """The values where a kernel writes nothing."""
    gated = import_module(f"{gpu.__name__}.elementwise")
    vars(gated)["launch"] = lambda *args, **constants: None
    return values(name)


def compile_kernels(name: str) -> str:
    """Each kernel once for all switches that it is asked for, and for wide heads."""
    shared_nbytes = dict[Any, int]()

    def launch(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        options = {k: constants.pop(k) for k in OPTIONS & constants.keys()}
        named = dict(zip(kernel.arg_names, args, strict=False)) | constants
        fixed = {p.name: named[p.name] for p in kernel.params if p.is_constexpr}
        switches = tuple((k, v) for k, v in fixed.items() if isinstance(v, bool))
        key = kernel.__name__, switches, max(fixed.get("D", 0), 64), fixed.get("UNPACK")
        if key not in shared_nbytes:
            kinds = {
                k: "constexpr" if k in fixed else triton_type(named[k]) for k in kernel.arg_names
            }
            source = ASTSource(kernel, kinds, fixed)
            shared_nbytes[key] = triton.compile(
                source, target=TARGET, options=options
            ).metadata.shared

    for module in iter_modules(gpu.__path__):
        vars(import_module(f"{gpu.__name__}.{module.name}"))["launch"] = launch
    extra_checks = {"cast": unpackings, "get_rows_back": sums_of_rows, "matmul": splittings}
    extra_checks.get(name, tuple)()
    for call in (
        *samples_of_op(name),
        *(case.call for case in typed_samples(name)),
        *wide_calls(name),
    ):
        if "cuda" in call.op.kernels:
            kernel_footprint(call.op, call.inputs, call.attrs, "cuda")
    assert max(shared_nbytes.values(), default=0) <= MAX_SHARED_NBYTES, (name, shared_nbytes)
    return f"{len(shared_nbytes)} kernels"


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def unpackings() -> None:
    """Of all block types: what kernels of PyTorch call in Triton is not reached without values."""
    for dtype in (t for t in READABLE if t.quantized):
        raw = empty(70, dtype.block_nbytes, dtype=torch.uint8)
        gpu.lazy_kernel("unpack", "unpack_blocks")(
            empty(70, dtype.block), raw, dtype.code["unpack"]
        )


def sums_of_rows() -> None:
    gpu.lazy_kernel("rows", "add_rows")(
        empty(300, 768), empty(2500, 768), empty(2500, dtype=torch.int32)
    )


def splittings() -> None:
    gpu.lazy_kernel("elementwise", "split_bf16")(empty(300, 70))


def wide_calls(name: str) -> Iterator[Call]:
    """Calls with heads as wide as those of models; samples have small ones."""
    for width in (64, 128, 256):
        q, k = pt.input("q", (1, 64, 4, width)), pt.input("k", (1, 64, 2, width))
        pos, seq = pt.input("pos", (1, 64), pt.i32), pt.input("seq", (1, 64), pt.i32)
        y, lse = ops.attention(q, k, k, pos, pos, seq, seq, scale=0.1)
        gradients = ops.attention_back(q, y, lse, q, k, k, pos, pos, seq, seq, scale=0.1)
        yield from (t.call for t in (y, gradients[0]) if t.call and t.call.op.name == name)


def triton_type(value: Any) -> str:
    """Triton's name of an argument's type."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


if __name__ == "__main__":
    assert set(OPS) > set(sys.argv[2:])
    for one in sys.argv[2:]:
        print(
            one,
            {"values": values, "compile": compile_kernels, "fault": values_of_fault}[sys.argv[1]](
                one
            ),
            flush=True,
        )
