"""Compiled kernels as machine code, kept beside numba's cache: code runs without numba.

To import numba and unpickle its cache took half a second and 30 MiB per command; LLVM links objects in milliseconds.
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

from packtrain.kernels.runtime.environment import package_folder
from packtrain.kernels.runtime.thread_pool import WORDS_ADDRESS

CODE_FILE = "code"
HELPER_MODULES = {"numba._helperlib": "numba_", "numba.core.runtime._nrt_python": "NRT_"}
compiled_dispatchers: list[Any] = []  # numba's dispatchers of kernels, in order of compilation
functions: dict[str, Any] = {}  # this process's kernels by symbol
entered: dict[Any, tuple[int, "CompiledKernel"]] = {}  # address of the entry by function
live_objects: list[Any] = []  # objects that compiled code points to
ENTRY = "enter "
STRUCT_FORMATS = {"<i8": "<q", "<i4": "<i", "<f8": "<d", "<f4": "<f", "|b1": "?"}


class ArrayArgType(NamedTuple):
    """The type of an array argument."""

    dtype: str
    ndim: int
    layout: str
    is_written: bool

    def accepts(self, array: Any) -> bool:
        flags = array.flags
        return bool(
            array.dtype.str == self.dtype
            and array.ndim == self.ndim
            and (self.layout != "C" or flags.c_contiguous)
            and (flags.writeable or not self.is_written)
        )


class CompiledKernel(NamedTuple):
    """A kernel's object code, and the names in it."""

    symbol: str  # by which other kernels call it
    function_symbol: str
    wrapper_symbol: str
    environment_symbol: str
    arg_types: tuple[ArrayArgType | str | None, ...]  # a number by its dtype; None: anything else
    code: bytes


class DamagedCacheError(Exception):
    """A file of the cache is not what was written."""


def save(module: ModuleType, compiled: Sequence[Any], folder: Path) -> str:
    """Write a module's kernels (dispatchers), which of them are attributes, and constants; returns the checksum."""
    symbols = {
        id(dispatcher): dispatcher.outside.mangled_name for dispatcher in compiled_dispatchers
    }
    attributes = vars(module).items()
    shown = {name: symbols[id(value)] for name, value in attributes if id(value) in symbols}
    constants = {
        name: value for name, value in attributes if name.isupper() and is_plain_constant(value)
    }
    content = [tuple(kernel_of(one)) for one in compiled], entry_code(compiled), shown, constants
    pickled = pickle.dumps(content)
    (folder / CODE_FILE).write_bytes(pickled)
    return sha256(pickled).hexdigest()


def is_plain_constant(value: Any) -> bool:
    """Return whether a value is a number, a text, or a dictionary of these."""
    if isinstance(value, dict):
        return all(map(is_plain_constant, (*value, *value.values())))
    return isinstance(value, (int, float, str))


def kernel_of(dispatcher: Any) -> CompiledKernel:
    (overload,) = dispatcher.overloads.values()
    _, _, (code, _) = overload.library.serialize_using_object_code()
    function_desc = overload.fndesc
    arg_types = tuple(map(arg_type_of, overload.signature.args))
    return CompiledKernel(
        dispatcher.outside.mangled_name, function_desc.llvm_func_name, function_desc.llvm_cpython_wrapper_name,
        function_desc.env_name, arg_types, code,
    )  # fmt: skip


def arg_type_of(kind: Any) -> ArrayArgType | str | None:
    """Return the type of an argument of numba's type: an ArrayArgType, a number's dtype, or None."""
    as_dtype = sys.modules["numba"].np.numpy_support.as_dtype
    if hasattr(kind, "ndim"):
        return ArrayArgType(as_dtype(kind.dtype).str, kind.ndim, kind.layout, kind.mutable)
    return str(as_dtype(kind).str) if hasattr(kind, "bitwidth") or kind.name == "bool" else None


def has_entry(arg_types: Sequence[Any]) -> bool:
    """Return whether a kernel has an entry: it takes arrays, and otherwise only numbers."""
    return None not in arg_types and ArrayArgType in map(type, arg_types)


def entry_code(compiled: Sequence[Any]) -> bytes:
    """Compile the entries of kernels: functions of the address of argument words that return 0 if all is well.

    A kernel that returns a number is well if the number is negative.
    """
    import llvmlite.binding as llvm
    from llvmlite import ir
    from numba.core.registry import cpu_target

    context, word_type, module = cpu_target.target_context, ir.IntType(64), ir.Module("entries")
    for dispatcher in compiled:
        (overload,) = dispatcher.overloads.values()
        if not has_entry([*map(arg_type_of, overload.signature.args)]):
            continue
        callee = context.declare_function(module, dispatcher.outside)
        entry = ir.Function(module, ir.FunctionType(word_type, [word_type]), ENTRY + callee.name)
        builder = ir.IRBuilder(entry.append_basic_block())
        out = [builder.alloca(arg.type.pointee) for arg in callee.args[:2]]
        call_args = list[Any]()
        for i, arg in enumerate(callee.args[2:]):
            word_address = builder.add(entry.args[0], word_type(8 * i))
            call_args.append(builder.load(builder.inttoptr(word_address, arg.type.as_pointer())))
        status = builder.call(callee, [*out, *call_args])
        bad = builder.icmp_signed("!=", status, status.type(0))
        if out[0].type.pointee == word_type:
            bad = builder.or_(bad, builder.icmp_signed(">=", builder.load(out[0]), word_type(0)))
        builder.ret(builder.zext(bad, word_type))
    llvm.initialize_native_asmprinter()
    target_machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return bytes(target_machine.emit_object(llvm.parse_assembly(str(module))))


# ---- without numba ---------------------------------------------------------------------------------------------


@cache
def numba_module(name: str) -> Any:
    """Load a module of numba's C code, without those around it."""
    if name not in sys.modules:
        folder = package_folder("numba").joinpath(*name.split(".")[1:-1])
        spec = FileFinder(str(folder), (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec(name)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@cache
def object_loader() -> Any:
    """Return LLVM's loader of objects, which knows the functions that wrappers call."""
    import llvmlite.binding as llvm

    for module, symbol_prefix in HELPER_MODULES.items():
        for name, helper_address in numba_module(module).c_helpers.items():
            llvm.add_symbol(name if name.startswith("_") else symbol_prefix + name, helper_address)
    llvm.add_symbol("packtrain_pool", WORDS_ADDRESS)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target_machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine)


def load(name: str, folder: Path, checksum: str, load_with_numba: Callable[[str], Any]) -> Any:
    """Load the module that `save` wrote; other attributes come from `load_with_numba(name)`, the module with numba.

    Raises DamagedCacheError if the file is not what was written, which LLVM would not survive.
    """
    pickled = (folder / CODE_FILE).read_bytes()
    if sha256(pickled).hexdigest() != checksum:
        raise DamagedCacheError

    def other_attribute(attribute_name: str) -> Any:
        if attribute_name.startswith("_"):
            raise AttributeError(f"{name} has no attribute {attribute_name}")
        return getattr(load_with_numba(name), attribute_name)

    kernels, entries_code, shown, constants = pickle.loads(pickled)
    module = ModuleType(name)
    for kernel in kernels:
        functions[kernel[0]] = bind_kernel(module, CompiledKernel(*kernel))
    load_entries(entries_code, [CompiledKernel(*kernel) for kernel in kernels])
    vars(module).update(constants, __getattr__=other_attribute)
    vars(module).update({attribute: functions[symbol] for attribute, symbol in shown.items()})
    return module


def bind_kernel(module: ModuleType, kernel: CompiledKernel) -> Callable[..., Any]:
    """Return a kernel as a Python function, and let other kernels find it by symbol."""
    import llvmlite.binding as llvm

    code_loader, dynfunc = object_loader(), numba_module("numba._dynfunc")
    code_loader.add_object_file(llvm.ObjectFileRef.from_data(kernel.code))
    llvm.add_symbol(kernel.symbol, code_loader.get_function_address(kernel.function_symbol))
    environment = dynfunc.Environment({})
    environment_address = code_loader.get_global_value_address(kernel.environment_symbol)
    ctypes.c_void_p.from_address(environment_address).value = id(environment)
    live_objects.append(environment)
    wrapper_address = code_loader.get_function_address(kernel.wrapper_symbol)
    name = kernel.symbol.rpartition(".")[2]
    function = dynfunc.make_function(module, name, kernel.symbol, wrapper_address, environment, ())
    is_checking = "calls" in os.environ.get("PACKTRAIN_DEBUG", "").split(",")
    return with_arg_checks(function, kernel) if is_checking else function


def load_entries(object_code: bytes, kernels: Sequence[CompiledKernel]) -> None:
    import llvmlite.binding as llvm

    object_loader().add_object_file(llvm.ObjectFileRef.from_data(object_code))
    for kernel in kernels:
        if has_entry(kernel.arg_types):
            entry_address = object_loader().get_function_address(ENTRY + kernel.symbol)
            entered[functions[kernel.symbol]] = entry_address, kernel


def arg_words(kernel: CompiledKernel, args: Sequence[Any]) -> list[int]:
    """Return the 64-bit words that an entry reads as arguments: of arrays size, item size, address, shape, strides."""
    entry_words = list[int]()
    for arg_type, value in zip(kernel.arg_types, args, strict=True):
        if isinstance(arg_type, ArrayArgType):
            # not __array_interface__, see ops.arrays.start_with
            entry_words += 0, 0, value.size, value.itemsize, value.ctypes.data
            entry_words += (*value.shape, *value.strides)
        else:
            raw_bytes = struct.pack(STRUCT_FORMATS[str(arg_type)], value).ljust(8, b"\0")
            entry_words.append(int.from_bytes(raw_bytes, "little", signed=True))
    return entry_words


def with_arg_checks(function: Callable[..., Any], kernel: CompiledKernel) -> Callable[..., Any]:
    """Return a function that refuses arrays of undeclared types and calls the kernel."""

    def checked_call(*args: Any) -> Any:
        for arg_index, (arg, expected_type) in enumerate(zip(args, kernel.arg_types, strict=True)):
            if isinstance(expected_type, ArrayArgType) and not expected_type.accepts(arg):
                raise TypeError(
                    f"{kernel.symbol}: argument {arg_index} must be {expected_type}: {arg.dtype} {arg.shape}"
                )
        return function(*args)

    return checked_call
