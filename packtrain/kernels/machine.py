"""Compiled kernels as machine code, kept beside numba's cache: it runs without numba, which takes longest to import.

`save` writes the objects that numba compiled, in order: each refers to earlier ones by symbol. `load` makes functions
of them, with the wrappers that numba compiled, too; they need numba's C code and none of its Python. Arguments must be
of the declared types: PACKTRAIN_DEBUG=calls checks it. Kernels with arrays have entries, too, which take the arguments
from words of memory, so that compiled code can call one after the other.
"""

import ctypes
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from packtrain.kernels.crew import ADDRESS
from packtrain.kernels.runtime import folder_of

FILE = "code"
HELPERS = {"numba._helperlib": "numba_", "numba.core.runtime._nrt_python": "NRT_"}
made: list[Any] = []  # numba's dispatchers of kernels, in the order in which they were compiled
functions: dict[str, Any] = {}  # by symbol, of the kernels in this process
entered: dict[Any, tuple[int, "Kernel"]] = {}  # by function, the address of its entry
lasting: list[Any] = []  # what compiled code points to
ENTRY = "enter "
NUMBERS = {"<i8": "<q", "<i4": "<i", "<f8": "<d", "<f4": "<f", "|b1": "?"}


class Array(NamedTuple):
    """The type of an array argument."""

    dtype: str
    ndim: int
    layout: str
    written: bool

    def fits(self, array: Any) -> bool:
        flags = array.flags
        return bool(
            array.dtype.str == self.dtype
            and array.ndim == self.ndim
            and (self.layout != "C" or flags.c_contiguous)
            and (flags.writeable or not self.written)
        )


class Kernel(NamedTuple):
    """The object of a kernel, and its names there."""

    symbol: str  # by which other kernels call it
    function: str
    wrapper: str
    environment: str
    given: tuple[
        Array | str | None, ...
    ]  # its arguments: a number by its dtype, None is anything else
    code: bytes


class Damaged(Exception):
    """A file is not what was written."""


def save(module: ModuleType, compiled: Sequence[Any], folder: Path) -> str:
    """Write the kernels compiled for a module, which of them are its attributes, and its constants; the checksum."""
    symbols = {id(dispatcher): dispatcher.outside.mangled_name for dispatcher in made}
    attributes = vars(module).items()
    shown = {name: symbols[id(value)] for name, value in attributes if id(value) in symbols}
    constants = {name: value for name, value in attributes if name.isupper() and plain(value)}
    content = [tuple(kernel_of(one)) for one in compiled], entries(compiled), shown, constants
    written = pickle.dumps(content)
    (folder / FILE).write_bytes(written)
    return sha256(written).hexdigest()


def plain(value: Any) -> bool:
    """Whether it is a number, a text, or a dictionary of these."""
    if isinstance(value, dict):
        return all(map(plain, (*value, *value.values())))
    return isinstance(value, (int, float, str))


def kernel_of(dispatcher: Any) -> Kernel:
    (overload,) = dispatcher.overloads.values()
    _, _, (code, _) = overload.library.serialize_using_object_code()
    about = overload.fndesc
    arg_types = tuple(map(given_of, overload.signature.args))
    return Kernel(
        dispatcher.outside.mangled_name,
        about.llvm_func_name,
        about.llvm_cpython_wrapper_name,
        about.env_name,
        arg_types,
        code,
    )


def given_of(kind: Any) -> Array | str | None:
    """An argument, given numba's type."""
    as_dtype = sys.modules["numba"].np.numpy_support.as_dtype
    if hasattr(kind, "ndim"):
        return Array(as_dtype(kind.dtype).str, kind.ndim, kind.layout, kind.mutable)
    return str(as_dtype(kind).str) if hasattr(kind, "bitwidth") or kind.name == "bool" else None


def has_entry(arg_types: Sequence[Any]) -> bool:
    return None not in arg_types and any(isinstance(kind, Array) for kind in arg_types)


def entries(compiled: Sequence[Any]) -> bytes:
    """Object code with the entries of kernels: functions of the address of words, 0 if all is well.

    A kernel that returns a number returns a negative one then.
    """
    import llvmlite.binding as llvm
    from llvmlite import ir
    from numba.core.registry import cpu_target

    context, word, module = cpu_target.target_context, ir.IntType(64), ir.Module("entries")
    for dispatcher in compiled:
        (overload,) = dispatcher.overloads.values()
        if not has_entry([*map(given_of, overload.signature.args)]):
            continue
        callee = context.declare_function(module, dispatcher.outside)
        entry = ir.Function(module, ir.FunctionType(word, [word]), ENTRY + callee.name)
        builder = ir.IRBuilder(entry.append_basic_block())
        out = [builder.alloca(arg.type.pointee) for arg in callee.args[:2]]
        call_args = list[Any]()
        for i, arg in enumerate(callee.args[2:]):
            place = builder.add(entry.args[0], word(8 * i))
            call_args.append(builder.load(builder.inttoptr(place, arg.type.as_pointer())))
        status = builder.call(callee, [*out, *call_args])
        bad = builder.icmp_signed("!=", status, status.type(0))
        if out[0].type.pointee == word:
            bad = builder.or_(bad, builder.icmp_signed(">=", builder.load(out[0]), word(0)))
        builder.ret(builder.zext(bad, word))
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return bytes(target.emit_object(llvm.parse_assembly(str(module))))


# ---- without numba ---------------------------------------------------------------------------------------------


@cache
def numbas(name: str) -> Any:
    """A module of numba's C code, loaded without those around it."""
    if name not in sys.modules:
        folder = folder_of("numba").joinpath(*name.split(".")[1:-1])
        spec = FileFinder(str(folder), (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec(name)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@cache
def engine() -> Any:
    """LLVM's loader of objects, which knows the functions that wrappers call."""
    import llvmlite.binding as llvm

    for module, prefix in HELPERS.items():
        for name, address in numbas(module).c_helpers.items():
            llvm.add_symbol(name if name.startswith("_") else prefix + name, address)
    llvm.add_symbol("packtrain_pool", ADDRESS)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)


def load(name: str, folder: Path, checksum: str, itself: Callable[[str], Any]) -> Any:
    """A module of what `save` wrote; it has any other attribute from `itself(name)`, the module with numba.

    Raises Damaged if it is not what was written, which LLVM does not survive.
    """
    written = (folder / FILE).read_bytes()
    if sha256(written).hexdigest() != checksum:
        raise Damaged

    def other(attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"{name} has no attribute {attribute}")
        return getattr(itself(name), attribute)

    kernels, code, shown, constants = pickle.loads(written)
    module = ModuleType(name)
    for kernel in kernels:
        functions[kernel[0]] = bound(module, Kernel(*kernel))
    with_entries(code, [Kernel(*kernel) for kernel in kernels])
    vars(module).update(constants, __getattr__=other)
    vars(module).update({attribute: functions[symbol] for attribute, symbol in shown.items()})
    return module


def bound(module: ModuleType, kernel: Kernel) -> Callable[..., Any]:
    """The kernel as a function, and known to others by its symbol."""
    import llvmlite.binding as llvm

    loader, dynamic = engine(), numbas("numba._dynfunc")
    loader.add_object_file(llvm.ObjectFileRef.from_data(kernel.code))
    llvm.add_symbol(kernel.symbol, loader.get_function_address(kernel.function))
    environment = dynamic.Environment({})
    place = loader.get_global_value_address(kernel.environment)
    ctypes.c_void_p.from_address(place).value = id(environment)
    lasting.append(environment)
    address = loader.get_function_address(kernel.wrapper)
    name = kernel.symbol.rpartition(".")[2]
    function = dynamic.make_function(module, name, kernel.symbol, address, environment, ())
    checking = "calls" in os.environ.get("PACKTRAIN_DEBUG", "").split(",")
    return checked(function, kernel) if checking else function


def with_entries(code: bytes, kernels: Sequence[Kernel]) -> None:
    import llvmlite.binding as llvm

    engine().add_object_file(llvm.ObjectFileRef.from_data(code))
    for kernel in kernels:
        if has_entry(kernel.given):
            address = engine().get_function_address(ENTRY + kernel.symbol)
            entered[functions[kernel.symbol]] = address, kernel


def words_of(kernel: Kernel, args: Sequence[Any]) -> list[int]:
    """Arguments as an entry takes them."""
    words = list[int]()
    for kind, value in zip(kernel.given, args, strict=True):
        if isinstance(kind, Array):
            # not __array_interface__, see ops.arrays.start_with
            words += 0, 0, value.size, value.itemsize, value.ctypes.data
            words += (*value.shape, *value.strides)
        else:
            raw = struct.pack(NUMBERS[str(kind)], value).ljust(8, b"\0")
            words.append(int.from_bytes(raw, "little", signed=True))
    return words


def checked(function: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    """The function, which then refuses arrays of other types."""

    def call(*args: Any) -> Any:
        for number, (value, expected_type) in enumerate(zip(args, kernel.given, strict=True)):
            if isinstance(expected_type, Array) and not expected_type.fits(value):
                raise TypeError(
                    f"{kernel.symbol}: argument {number} must be {expected_type}: {value.dtype} {value.shape}"
                )
        return function(*args)

    return call
