"""Run the tasks of a region on threads: `run_region` opens a region, `serve` is the life of each thread but the first.

Each thread has a share of the tasks, and then takes those that others have not begun: nobody waits for a late thread.
After a region threads spin for a moment, then sleep. A region within a region, or beside one, has one thread.
"""

import platform

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels.runtime.environment import has_large_l2
from packtrain.kernels.runtime.kernel_types import i32, i64, void
from packtrain.kernels.runtime.thread_pool import (
    BED, END, INSIDE, IS_ASLEEP, IS_BUSY, MAIN_SEMAPHORE, NEXT, NUM_STARTED, NUMBER, OPEN, REGION_THREADS, REST, SIZE,
    TASK, TASK_ARGS, THREAD_WORDS, TIME, USED, WAITING, WORDS_ADDRESS,
)  # fmt: skip

llvmlite.binding.initialize_native_asmparser()
I64 = ir.IntType(64)
# Threads spin longer than the serial work between two products of a token: waking a thread takes as long as a 768 x 768
# product. Threads that only spin, as libgomp's can, stop a step for time slices where another program has a core.
SPIN_NANOSECONDS = 100_000
# bytes of stack that each thread touches first, so that they are measured with the kernels
STACK = 3 << 19 if has_large_l2() else 1 << 20

llvmlite.binding.add_symbol("packtrain_pool", WORDS_ADDRESS)
sem_wait = types.ExternalFunction("sem_wait", i32(i64))
sem_post = types.ExternalFunction("sem_post", i32(i64))
clock_gettime = types.ExternalFunction("clock_gettime", i32(i32, i64))


def shared_word(builder, word_index):
    """Emit the pointer to word `word_index` of the words that threads share."""
    symbol = "packtrain_pool"
    first = builder.module.globals.get(symbol) or ir.GlobalVariable(builder.module, I64, symbol)
    return builder.gep(first, [word_index])


def atomic_intrinsic(emit, has_value):
    """Return an intrinsic (word_index[, value]) of emit(builder, pointer[, value]), in one order for all threads."""

    def codegen(context, builder, sig, args):
        return emit(builder, shared_word(builder, args[0]), *args[1:])

    if has_value:
        return intrinsic(lambda typingctx, word_index, value: (i64(i64, i64), codegen))
    return intrinsic(lambda typingctx, word_index: (i64(i64), codegen))


load_word = atomic_intrinsic(lambda builder, p: builder.load_atomic(p, "seq_cst", 8), 0)
swap_word = atomic_intrinsic(lambda builder, p, v: builder.atomic_rmw("xchg", p, v, "seq_cst"), 1)
add_word = atomic_intrinsic(lambda builder, p, v: builder.atomic_rmw("add", p, v, "seq_cst"), 1)
word_address = atomic_intrinsic(lambda builder, p: builder.ptrtoint(p, I64), 0)


@intrinsic
def spin_pause(typingctx):
    """Pause the core for some nanoseconds."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.asm(function_type, "\n".join([REST[platform.machine()]] * 4), "", [], True)
        return context.get_dummy_value()

    return void(), codegen


@intrinsic
def call_task(typingctx, task, task_args, task_index):
    """Call the function at address `task`, which `jit.emit_task` wrote, with its arguments and a task number."""

    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return void(i64, i64, i64), codegen


@intrinsic
def touch_stack(typingctx):
    """Write to the part of the stack that a thread may need, so that its memory is in use."""

    def codegen(context, builder, sig, args):
        room = builder.alloca(ir.ArrayType(ir.IntType(8), STACK))
        kinds = [room.type, ir.IntType(8), I64, ir.IntType(1)]
        function_type = ir.FunctionType(ir.VoidType(), kinds)
        memset = cgutils.get_or_insert_function(builder.module, function_type, "llvm.memset.p0.i64")
        builder.call(memset, [room, kinds[1](0), I64(STACK), kinds[3](1)])  # 1: not to be left out
        return context.get_dummy_value()

    return void(), codegen


INLINE_OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy", "forceinline": True}


@njit(i64(), **INLINE_OPTIONS)
def threads():
    """Return the number of threads that a region uses."""
    return load_word(USED)


@njit(i64(i64), **INLINE_OPTIONS)
def nanoseconds(thread_slot):
    clock_gettime(i32(1), word_address(thread_slot + TIME))
    return load_word(thread_slot + TIME) * 1_000_000_000 + load_word(thread_slot + TIME + 1)


@njit(void(i64, i64), **INLINE_OPTIONS)
def run_tasks(first_thread, num_threads):
    """Run the open region's tasks left to thread `first_thread`, this one, then those that others have not begun."""
    for thread_step in range(num_threads):
        thread_slot = THREAD_WORDS + (first_thread + thread_step) % num_threads * SIZE
        while load_word(thread_slot + NEXT) < load_word(thread_slot + END):
            task_index = add_word(thread_slot + NEXT, 1)
            if task_index < load_word(thread_slot + END):
                call_task(load_word(TASK), load_word(TASK_ARGS), task_index)


@njit(i64(i64, i64), **INLINE_OPTIONS)
def called(thread_index, last_region):
    """Return the number of the open region if this thread has work there and has not seen it, or 0."""
    region = load_word(OPEN)
    return region if region != last_region and thread_index < load_word(REGION_THREADS) else 0


@njit(void(i64, i64), **INLINE_OPTIONS)
def await_region(thread_index, last_region):
    """Wait until a region other than `last_region` is open for this thread: spin, then sleep."""
    thread_slot = THREAD_WORDS + thread_index * SIZE
    deadline = nanoseconds(thread_slot) + SPIN_NANOSECONDS
    while called(thread_index, last_region) == 0:
        spin_pause()
        if nanoseconds(thread_slot) > deadline:
            swap_word(thread_slot + IS_ASLEEP, 1)
            if called(thread_index, last_region) == 0 or swap_word(thread_slot + IS_ASLEEP, 0) == 0:
                sem_wait(word_address(thread_slot + BED))


@njit(void(), **INLINE_OPTIONS)
def await_region_end():
    """Wait until no thread is in the region."""
    deadline = nanoseconds(THREAD_WORDS) + SPIN_NANOSECONDS
    while load_word(INSIDE) > 0:
        spin_pause()
        if nanoseconds(THREAD_WORDS) > deadline:
            swap_word(WAITING, 1)
            if load_word(INSIDE) > 0 or swap_word(WAITING, 0) == 0:
                sem_wait(word_address(MAIN_SEMAPHORE))


def serve(thread_index):
    """Run tasks of one region after the other, forever."""
    touch_stack()
    last_region = i64(0)
    while True:
        await_region(thread_index, last_region)
        add_word(INSIDE, 1)
        region = called(thread_index, last_region)
        if region != 0:
            run_tasks(thread_index, load_word(REGION_THREADS))
            last_region = region
        if add_word(INSIDE, -1) == 1 and swap_word(WAITING, 0) == 1:
            sem_post(word_address(MAIN_SEMAPHORE))


def run_region(task, task_args, num_tasks):
    """Run tasks 0 … num_tasks - 1 on the threads; here alone if the pool is busy or one thread suffices.

    task       address of a function (task_args, number) that jit.emit_task made
    task_args  address of what this function passes on
    """
    num_workers = min(threads(), load_word(NUM_STARTED) + 1, num_tasks)
    if num_workers <= 1 or swap_word(IS_BUSY, 1) == 1:
        for task_index in range(num_tasks):
            call_task(task, task_args, task_index)
        return
    swap_word(TASK, task)
    swap_word(TASK_ARGS, task_args)
    swap_word(REGION_THREADS, num_workers)
    for thread in range(num_workers):
        swap_word(THREAD_WORDS + thread * SIZE + NEXT, thread * num_tasks // num_workers)
        swap_word(THREAD_WORDS + thread * SIZE + END, (thread + 1) * num_tasks // num_workers)
    swap_word(OPEN, add_word(NUMBER, 1) + 1)
    for thread in range(1, num_workers):
        thread_slot = THREAD_WORDS + thread * SIZE
        if load_word(thread_slot + IS_ASLEEP) == 1 and swap_word(thread_slot + IS_ASLEEP, 0) == 1:
            sem_post(word_address(thread_slot + BED))
    run_tasks(0, num_workers)
    swap_word(OPEN, 0)
    await_region_end()
    swap_word(IS_BUSY, 0)
