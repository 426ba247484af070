"""Compiling kernels, calling them from each other, and running tasks on threads.

A kernel is compiled once, for one signature, and called by symbol name: otherwise numba would compile all that a
function calls into it again. A `part` is small, has no symbol, and is compiled into its callers.
"""

import copy

import llvmlite.binding
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels import crew, machine, pool
from packtrain.kernels.locator import InFolder
from packtrain.kernels.pool import call_task

I64 = ir.IntType(64)
i64, void = types.int64, types.void


ALWAYS = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def part(signature, **options):
    """Compile for exactly that signature; it is compiled into each kernel that calls it.

    If all that could call it is in the cache, it is loaded from there once something new does.
    """
    options = ALWAYS | {"forceinline": True} | options
    if InFolder.complete:
        return lambda function: late(njit(**options)(function), signature)
    return njit(signature, **options)


def late(dispatcher, signature):
    """Have it compiled, or loaded, when its type is first asked for."""

    def template(args, kws):
        settle(dispatcher)
        return dispatcher.get_call_template(args, kws)

    dispatcher.awaited, dispatcher.get_call_template = signature, template
    return dispatcher


def settle(dispatcher):
    """Load it if it is late."""
    if hasattr(dispatcher, "awaited"):
        signature = dispatcher.awaited
        del dispatcher.awaited, dispatcher.get_call_template
        dispatcher.compile(signature)
        dispatcher.disable_compile()


def kernel(signature, **options):
    """The same, but called by its symbol, and there at once; runs without the GIL."""
    compiled = njit(signature, **ALWAYS, **options)
    return lambda function: with_symbol(compiled(function))


def with_symbol(dispatcher):
    """Let other kernels call this one by its symbol instead of linking it into themselves."""
    (overload,) = dispatcher.overloads.values()
    outside = copy.copy(overload.fndesc)
    outside.mangled_name = f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__name__}"
    code = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
    llvmlite.binding.add_symbol(outside.mangled_name, code)
    del dispatcher.targetctx._defns[overload.entry_point]
    dispatcher.targetctx.insert_user_function(overload.entry_point, outside)
    dispatcher.outside = outside
    machine.made.append(dispatcher)
    return dispatcher


def call(context, builder, function, args):
    """Call a kernel from LLVM IR; exceptions are lost."""
    outside = function.outside
    callee = context.declare_function(builder.module, outside)
    context.call_conv.call_function(builder, callee, outside.restype, outside.argtypes, args)


def in_parallel(task, task_args, count):
    if count == 1:  # a parallel region costs more
        call_task(task, task_args, 0)
        return
    for number in prange(count):
        call_task(task, task_args, number)


if crew.AVAILABLE:
    on_threads = kernel(void(i64, i64, i64))(pool.share_out)
    serve = kernel(void(i64))(pool.serve)
    crew.start(serve)
else:
    on_threads = kernel(void(i64, i64, i64), parallel=True)(in_parallel)
threads = pool.threads  # how many on_threads uses
MADE = 1  # instead of an entry: a call before does this one, too
words2 = types.Array(i64, 2, "C", readonly=True)


@intrinsic
def enter(typingctx, entry, given):
    """Call a kernel by what `machine.entries` wrote; 0 if all is well."""

    def codegen(context, builder, sig, args):
        form = ir.FunctionType(I64, [I64])
        return builder.call(builder.inttoptr(args[0], form.as_pointer()), [args[1]])

    return i64(i64, i64), codegen


@kernel(i64(words2, i64, i64))
def run_all(rows, at, end):
    """Run calls at … end - 1, up to the first without an entry, or one that fails; the number of the next.

    rows  of each call its entry, 0 or MADE, and the address of its arguments
    """
    while at < end and rows[at, 0] != 0:
        if rows[at, 0] != MADE and enter(rows[at, 0], rows[at, 1]) != 0:
            break
        at += 1
    return at


@part(i64(words2, i64))
def tasks_of(every, step):
    """Tasks of products that are one call, `step` columns each; a row of `products` has its N in second place."""
    count = i64(0)
    for i in range(len(every)):
        count += -(-every[i, 1] // step)
    return count


@part(types.UniTuple(i64, 2)(words2, i64, i64))
def part_of(every, step, task):
    """Which of them a task has, and the column where it begins."""
    i = i64(0)
    while task >= -(-every[i, 1] // step):
        task -= -(-every[i, 1] // step)
        i += 1
    return i, task * step


def task_code(context, builder, function, kinds, given_type, places):
    """A function of (address of the given values, number) that calls a kernel on them; its address.

    places(builder, given, number) -> the arguments after the given ones
    """
    form = ir.FunctionType(ir.VoidType(), [I64, I64])
    task = ir.Function(builder.module, form, builder.module.get_unique_name("task"))
    task.linkage = "internal"
    inner = ir.IRBuilder(task.append_basic_block())
    room, number = task.args
    given_values = inner.load(inner.inttoptr(room, given_type.as_pointer()))
    values = cgutils.unpack_tuple(inner, inner.extract_value(given_values, 0))
    values = [
        context.cast(inner, value, kind, arg_type)
        for value, kind, arg_type in zip(values, kinds, function.outside.argtypes, strict=False)
    ]
    call(context, inner, function, values + places(inner, given_values, number))
    inner.ret_void()
    return builder.ptrtoint(task, I64)


def launch(places):
    """The code of an intrinsic on (kernel, given values, count, …): it runs tasks 0 … count - 1 on the threads."""

    def codegen(context, builder, sig, args):
        task_values = cgutils.pack_struct(builder, [args[1], *args[3:]])
        room = cgutils.alloca_once_value(builder, task_values)
        function, kinds = sig.args[0].dispatcher, sig.args[1]
        task = task_code(context, builder, function, kinds, task_values.type, places)
        call(context, builder, on_threads, [task, builder.ptrtoint(room, I64), args[2]])
        return context.get_dummy_value()

    return codegen


def one_number(builder, task_values, number):
    return [number]


def span_of(builder, task_values, number):
    size, step = builder.extract_value(task_values, 1), builder.extract_value(task_values, 2)
    start = builder.mul(number, step)
    stop = builder.add(start, step)
    return [start, builder.select(builder.icmp_signed("<", stop, size), stop, size)]


@intrinsic
def each(typingctx, function, given, count):
    """function(*given, number) for each number below `count`, on the threads."""
    return void(function, given, i64), launch(one_number)


@intrinsic
def span_tasks(typingctx, function, given, count, size, step):
    return void(function, given, i64, i64, i64), launch(span_of)


@njit(inline="always")
def spans(function, given, size, step):
    """function(*given, start, stop) for each span of `step`, at least 1, of `size`; several on the threads."""
    length = max(1, step)
    span_tasks(function, given, -(-size // length), size, length)
