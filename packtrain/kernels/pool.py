"""Threads that run the tasks of a region: `share_out` opens one, `serve` is the life of each thread but the first.

Each thread has a share of the tasks, and then takes those that others have not begun: who comes late is not waited for.
After a region threads wait actively for a moment, then sleep. A region within a region, or beside one, has one thread.
"""

import platform

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels import crew
from packtrain.kernels.runtime import roomy

llvmlite.binding.initialize_native_asmparser()
I64 = ir.IntType(64)
i32, i64, void = types.int32, types.int64, types.void
BUSY, OPEN, INSIDE, WAITING, USED = crew.BUSY, crew.OPEN, crew.INSIDE, crew.WAITING, crew.USED
TASK, GIVEN, THREADS, NUMBER, CREW = crew.TASK, crew.GIVEN, crew.THREADS, crew.NUMBER, crew.CREW
OWN, NEXT, END, TIME, ASLEEP = crew.OWN, crew.NEXT, crew.END, crew.TIME, crew.ASLEEP
BED, GATE, SIZE = crew.BED, crew.GATE, crew.SIZE
PATIENCE = 100_000  # nanoseconds of waiting actively: longer than the steps of a token that have one thread
# bytes of its stack that a thread touches first, to be measured with the kernels
STACK = 3 << 19 if roomy() else 1 << 20

llvmlite.binding.add_symbol("packtrain_pool", crew.ADDRESS)
sem_wait = types.ExternalFunction("sem_wait", i32(i64))
sem_post = types.ExternalFunction("sem_post", i32(i64))
clock_gettime = types.ExternalFunction("clock_gettime", i32(i32, i64))


def word(builder, index):
    """The pointer to a shared word."""
    name = "packtrain_pool"
    first = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, I64, name)
    return builder.gep(first, [index])


def of_word(emit, has_value):
    """An intrinsic (index, …): emit(builder, pointer, …) on a shared word, in one order for all threads."""

    def codegen(context, builder, sig, args):
        return emit(builder, word(builder, args[0]), *args[1:])

    if has_value:
        return intrinsic(lambda typingctx, index, value: (i64(i64, i64), codegen))
    return intrinsic(lambda typingctx, index: (i64(i64), codegen))


get = of_word(lambda builder, p: builder.load_atomic(p, "seq_cst", 8), 0)
swap = of_word(lambda builder, p, v: builder.atomic_rmw("xchg", p, v, "seq_cst"), 1)
add = of_word(lambda builder, p, v: builder.atomic_rmw("add", p, v, "seq_cst"), 1)
place = of_word(lambda builder, p: builder.ptrtoint(p, I64), 0)


@intrinsic
def rest(typingctx):
    """Wait for some nanoseconds."""

    def codegen(context, builder, sig, args):
        form = ir.FunctionType(ir.VoidType(), [])
        builder.asm(form, "\n".join([crew.REST[platform.machine()]] * 4), "", [], True)
        return context.get_dummy_value()

    return void(), codegen


@intrinsic
def call_task(typingctx, task, given, number):
    """Call a function that `call.task_code` wrote."""

    def codegen(context, builder, sig, args):
        form = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], form.as_pointer()), args[1:])
        return context.get_dummy_value()

    return void(i64, i64, i64), codegen


@intrinsic
def touch_stack(typingctx):
    """Use the part of its stack that a thread may need."""

    def codegen(context, builder, sig, args):
        room = builder.alloca(ir.ArrayType(ir.IntType(8), STACK))
        kinds = [room.type, ir.IntType(8), I64, ir.IntType(1)]
        form = ir.FunctionType(ir.VoidType(), kinds)
        fill = cgutils.get_or_insert_function(builder.module, form, "llvm.memset.p0.i64")
        builder.call(fill, [room, kinds[1](0), I64(STACK), kinds[3](1)])  # 1: not to be left out
        return context.get_dummy_value()

    return void(), codegen


inlined = {"cache": True, "nogil": True, "error_model": "numpy", "forceinline": True}


@njit(i64(), **inlined)
def threads():
    """How many threads a region uses."""
    return get(USED)


@njit(i64(i64), **inlined)
def nanoseconds(own):
    clock_gettime(i32(1), place(own + TIME))
    return get(own + TIME) * 1_000_000_000 + get(own + TIME + 1)


@njit(void(i64, i64), **inlined)
def work(first, threads):
    """Run the tasks of this thread, then what others have not begun."""
    for step in range(threads):
        slot = OWN + (first + step) % threads * SIZE
        while get(slot + NEXT) < get(slot + END):
            number = add(slot + NEXT, 1)
            if number < get(slot + END):
                call_task(get(TASK), get(GIVEN), number)


@njit(i64(i64, i64), **inlined)
def called(thread, seen):
    """The number of the open region if this thread has work there and has not seen it, or 0."""
    region = get(OPEN)
    return region if region != seen and thread < get(THREADS) else 0


@njit(void(i64, i64), **inlined)
def await_region(thread, seen):
    slot = OWN + thread * SIZE
    end = nanoseconds(slot) + PATIENCE
    while called(thread, seen) == 0:
        rest()
        if nanoseconds(slot) > end:
            swap(slot + ASLEEP, 1)
            if called(thread, seen) == 0 or swap(slot + ASLEEP, 0) == 0:
                sem_wait(place(slot + BED))


@njit(void(), **inlined)
def await_others():
    """Until no thread is in the region."""
    end = nanoseconds(OWN) + PATIENCE
    while get(INSIDE) > 0:
        rest()
        if nanoseconds(OWN) > end:
            swap(WAITING, 1)
            if get(INSIDE) > 0 or swap(WAITING, 0) == 0:
                sem_wait(place(GATE))


def serve(thread):
    """Never returns."""
    touch_stack()
    seen = i64(0)
    while True:
        await_region(thread, seen)
        add(INSIDE, 1)
        region = called(thread, seen)
        if region != 0:
            work(thread, get(THREADS))
            seen = region
        if add(INSIDE, -1) == 1 and swap(WAITING, 0) == 1:
            sem_post(place(GATE))


def share_out(task, task_args, count):
    """Run tasks 0 … count - 1."""
    workers = min(threads(), get(CREW) + 1, count)
    if workers <= 1 or swap(BUSY, 1) == 1:
        for number in range(count):
            call_task(task, task_args, number)
        return
    swap(TASK, task)
    swap(GIVEN, task_args)
    swap(THREADS, workers)
    for thread in range(workers):
        swap(OWN + thread * SIZE + NEXT, thread * count // workers)
        swap(OWN + thread * SIZE + END, (thread + 1) * count // workers)
    swap(OPEN, add(NUMBER, 1) + 1)
    for thread in range(1, workers):
        if get(OWN + thread * SIZE + ASLEEP) == 1 and swap(OWN + thread * SIZE + ASLEEP, 0) == 1:
            sem_post(place(OWN + thread * SIZE + BED))
    work(0, workers)
    swap(OPEN, 0)
    await_others()
    swap(BUSY, 0)
