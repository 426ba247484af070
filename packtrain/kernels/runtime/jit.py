"""Compile kernels, let them call each other, and run tasks on threads.

A kernel is compiled once, for one signature, and called by symbol name: otherwise numba would compile all that a
function calls into it again, which took 95 of 140 s of processor time. A `part` is small and compiled into its callers;
a function that is `parallel` becomes a kernel that runs it on the threads.
"""

import copy
from inspect import signature as parameters_of

import llvmlite.binding
from llvmlite import ir
from numba import njit, prange
from numba.core import cgutils
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from packtrain.kernels.runtime import kernel_types, machine_code, thread_pool, work_stealing
from packtrain.kernels.runtime.cache_locator import InFolder
from packtrain.kernels.runtime.kernel_types import i64, void
from packtrain.kernels.runtime.work_stealing import call_task

I64 = ir.IntType(64)
COMMON_OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def part(signature, **options):
    """Return a decorator that compiles a function for one signature, into each kernel that calls it.

    If the module's code is in the cache, the part is loaded from there once something new calls it.
    """
    options = COMMON_OPTIONS | {"forceinline": True} | options

    def compile_part(function):
        arg_types = signature_of(signature, function)
        if InFolder.complete:
            return compile_on_use(njit(**options)(function), arg_types)
        return njit(arg_types, **options)(function)

    return compile_part


def signature_of(signature, function):
    """Return numba's signature of a text such as "f32(i64, in1)", or "out1, in1" for no result.

    Names are those of kernel_types and of the function's module.
    """
    if not isinstance(signature, str):
        return signature
    names = function.__globals__ | vars(kernel_types) | kernel_types.vector_types
    arg_types = eval(f"({signature},)", names)
    return arg_types[0] if isinstance(arg_types[0], Signature) else void(*arg_types)


def compile_on_use(dispatcher, signature):
    """Have a dispatcher compiled, or loaded, when numba first asks for its type."""

    def call_template(args, kwargs):
        ensure_compiled(dispatcher)
        return dispatcher.get_call_template(args, kwargs)

    dispatcher.awaited, dispatcher.get_call_template = signature, call_template
    return dispatcher


def ensure_compiled(dispatcher):
    """Compile or load a dispatcher that `compile_on_use` has put off."""
    if hasattr(dispatcher, "awaited"):
        signature = dispatcher.awaited
        del dispatcher.awaited, dispatcher.get_call_template
        dispatcher.compile(signature)
        dispatcher.disable_compile()


def emit_part(context, builder, dispatcher, signature, args):
    """Emit a call of a part, numba's dispatcher, which raises nothing, with LLVM values; returns its value."""
    ensure_compiled(dispatcher)
    (overload,) = dispatcher.overloads.values()
    context.add_linking_libs((overload.library,))
    function = context.declare_function(builder.module, overload.fndesc)
    _, value = context.call_conv.call_function(
        builder, function, signature.return_type, signature.args, args
    )
    return value


def kernel(signature, **options):
    """Return a decorator that compiles a function for one signature at once, called by symbol, without the GIL."""

    def compile_kernel(function):
        compile_function = njit(signature_of(signature, function), **COMMON_OPTIONS, **options)
        return with_symbol(compile_function(function))

    return compile_kernel


def with_symbol(dispatcher):
    """Let other kernels call a compiled kernel by its symbol instead of linking it into themselves."""
    (overload,) = dispatcher.overloads.values()
    external_desc = copy.copy(overload.fndesc)
    external_desc.mangled_name = f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__name__}"
    code_address = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
    llvmlite.binding.add_symbol(external_desc.mangled_name, code_address)
    del dispatcher.targetctx._defns[overload.entry_point]
    dispatcher.targetctx.insert_user_function(overload.entry_point, external_desc)
    dispatcher.outside = external_desc
    machine_code.compiled_dispatchers.append(dispatcher)
    return dispatcher


def call(context, builder, function, args):
    """Emit a call of a kernel, numba's dispatcher, with LLVM values; its result and exceptions are lost."""
    outside = function.outside
    callee = context.declare_function(builder.module, outside)
    context.call_conv.call_function(builder, callee, outside.restype, outside.argtypes, args)


def in_parallel(task, task_args, num_tasks):
    if num_tasks == 1:  # a parallel region costs more
        call_task(task, task_args, 0)
        return
    for task_index in prange(num_tasks):
        call_task(task, task_args, task_index)


if thread_pool.HAS_THREAD_POOL:
    run_on_threads = kernel(void(i64, i64, i64))(work_stealing.run_region)
    serve = kernel(void(i64))(work_stealing.serve)
    thread_pool.start_threads(serve)
else:
    run_on_threads = kernel(void(i64, i64, i64), parallel=True)(in_parallel)
threads = work_stealing.threads  # how many threads run_on_threads uses
DONE_BY_EARLIER_CALL = 1  # instead of an entry: an earlier call does the work of this call, too


@intrinsic
def call_entry(typingctx, entry_address, args_address):
    """Call a kernel by its entry (an address; see machine_code.entry_code, arg_words); returns 0 if all is well."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(I64, [I64])
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [args[1]])

    return i64(i64, i64), codegen


@kernel("i64(longs2, i64, i64)")
def run_all(rows, at, num_calls):
    """Run calls at … num_calls - 1, up to the first without an entry, or that fails; returns the next call's number.

    rows  of each call its entry (0: none), or DONE_BY_EARLIER_CALL, and the address of its arguments
    """
    while at < num_calls and rows[at, 0] != 0:
        if rows[at, 0] != DONE_BY_EARLIER_CALL and call_entry(rows[at, 0], rows[at, 1]) != 0:
            break
        at += 1
    return at


@part("i64(longs2, i64)")
def tasks_of(every, step):
    """Return how many tasks of `step` columns joined products have; the rows of `every`: see packed.products."""
    num_tasks = i64(0)
    for i in range(len(every)):
        num_tasks += -(-every[i, 1] // step)
    return num_tasks


@part("UniTuple(i64, 2)(longs2, i64, i64)")
def part_of(every, step, task):
    """Return (row of `every`, first column) of the product that task number `task` computes, of those of tasks_of."""
    product_index = i64(0)
    while task >= -(-every[product_index, 1] // step):
        task -= -(-every[product_index, 1] // step)
        product_index += 1
    return product_index, task * step


def emit_task(context, builder, function, arg_types, args_type, extra_args):
    """Emit a function (address of arguments, task number) that calls a kernel; returns the function's address.

    extra_args(builder, task_values, task_index) -> the kernel's arguments after the given ones
    """
    function_type = ir.FunctionType(ir.VoidType(), [I64, I64])
    task = ir.Function(builder.module, function_type, builder.module.get_unique_name("task"))
    task.linkage = "internal"
    inner = ir.IRBuilder(task.append_basic_block())
    args_address, task_index = task.args
    task_values = inner.load(inner.inttoptr(args_address, args_type.as_pointer()))
    values = cgutils.unpack_tuple(inner, inner.extract_value(task_values, 0))
    values = [
        context.cast(inner, value, kind, arg_type)
        for value, kind, arg_type in zip(values, arg_types, function.outside.argtypes, strict=False)
    ]
    call(context, inner, function, values + extra_args(inner, task_values, task_index))
    inner.ret_void()
    return builder.ptrtoint(task, I64)


def launch_codegen(extra_args):
    """Return the code of an intrinsic (kernel, args, num_tasks, …) that runs tasks 0 … num_tasks - 1 on the threads."""

    def codegen(context, builder, sig, args):
        task_values = cgutils.pack_struct(builder, [args[1], *args[3:]])
        args_buffer = cgutils.alloca_once_value(builder, task_values)
        function, arg_types = sig.args[0].dispatcher, sig.args[1]
        task = emit_task(context, builder, function, arg_types, task_values.type, extra_args)
        call(context, builder, run_on_threads, [task, builder.ptrtoint(args_buffer, I64), args[2]])
        return context.get_dummy_value()

    return codegen


def index_args(builder, task_values, task_index):
    return [task_index]


def span_args(builder, task_values, task_index):
    size, span_length = builder.extract_value(task_values, 1), builder.extract_value(task_values, 2)
    span_start = builder.mul(task_index, span_length)
    span_stop = builder.add(span_start, span_length)
    return [span_start, builder.select(builder.icmp_signed("<", span_stop, size), span_stop, size)]


@intrinsic
def each(typingctx, function, task_args, num_tasks):
    """Call function(*task_args, number), a kernel, on the threads for each number below num_tasks; results are lost."""
    return void(function, task_args, i64), launch_codegen(index_args)


@intrinsic
def span_tasks(typingctx, function, task_args, num_tasks, num_values, span_length):
    return void(function, task_args, i64, i64, i64), launch_codegen(span_args)


@njit(inline="always")
def spans(function, task_args, num_values, max_span_length):
    """Call function(*task_args, start, stop) on the threads, for spans of `num_values` of at most `max_span_length`."""
    span_length = max(1, max_span_length)
    span_tasks(function, task_args, -(-num_values // span_length), num_values, span_length)


@njit(inline="always")
def each_if_large(is_large, function, task_args, num_tasks):
    """Call function(*task_args, number) for each number below `num_tasks`, on the threads if it pays."""
    if is_large:
        each(function, task_args, num_tasks)
    else:
        for task_index in range(num_tasks):
            function(*task_args, task_index)


# ---- kernels that run their function on the threads ----------------------------------------------------------------

BLOCK = 1 << 13  # values of a span
SPANS = """
def {name}({parameters}):
    count, size = work({work_parameters})
    spans(task, ({parameters},), count, span_length(count, size, serial, block))
"""
TASKS = """
def {name}({parameters}):
    each(task, ({parameters},), work({work_parameters}))
"""
LARGE_TASKS = """
def {name}({parameters}):
    count, size = work({work_parameters})
    each_if_large(count * size > serial, task, ({parameters},), count)
"""


@part("i64(i64, i64, i64, i64)")
def span_length(count, size, serial, values_per_span):
    """Return how many of `count` items of `size` values make a span: all of them up to `serial` values."""
    return count if count * size <= serial else values_per_span // max(size, 1)


def parallel(signature, work, *, serial=-1, block=BLOCK, form=SPANS):
    """Return a decorator for f(*args, start, stop): makes a kernel of its name with the arguments `args`.

    The kernel calls f on the threads, for spans of about `block` values.

    signature  types of args
    work       function of some of args, by name: number of items, and of values of each
    serial     up to this many values a region of several threads does not pay
    """

    def compile_parallel(function):
        *parameters, _ = parameters_of(function).parameters
        parameters = parameters[: -1 if form is SPANS else None]
        name, arg_types = function.__name__, signature_of(signature, function).args
        function.__name__ = function.__qualname__ = f"{name}_task"
        names = {
            "__name__": function.__module__,
            "each": each, "each_if_large": each_if_large, "spans": spans, "span_length": span_length,
            "serial": serial, "block": block, "work": njit(forceinline=True)(work),
            "task": kernel(void(*arg_types, *[i64] * (2 if form is SPANS else 1)))(function),
        }  # fmt: skip
        source = form.format(
            name=name,
            parameters=", ".join(parameters),
            work_parameters=", ".join(parameters_of(work).parameters),
        )
        exec(compile(source, function.__code__.co_filename, "exec"), names)
        return kernel(void(*arg_types))(names[name])

    return compile_parallel


def each_task(signature, work, *, serial=None):
    """Return a decorator like `parallel` for f(*args, index), which is called for each item.

    work  number of items; with `serial` and the number of operations of each
    """
    return parallel(signature, work, serial=serial, form=TASKS if serial is None else LARGE_TASKS)
