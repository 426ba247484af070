"""Names of numba's types for the signatures of kernels.

Arrays are row-major: `in2` also takes arrays that are not writeable (a mapped file), `out2` does not; likewise `ints2`
and `out_ints2` (i32), `longs2` (i64), `doubles2` (f64) and `bytes2` (u8), each with its number of axes.
"""

from numba import types

i32, i64, u64, f32, f64 = types.int32, types.int64, types.uint64, types.float32, types.float64
boolean, void, Tuple, UniTuple = types.boolean, types.void, types.Tuple, types.UniTuple


def array(dtype, num_axes, layout="C", readonly=False):
    return types.Array(dtype, num_axes, layout, readonly=readonly)


in1, in2, in3, in4 = (array(f32, num_axes, readonly=True) for num_axes in (1, 2, 3, 4))
out1, out2, out3, out4 = (array(f32, num_axes) for num_axes in (1, 2, 3, 4))
any_in2, any_in3 = (array(f32, num_axes, "A", readonly=True) for num_axes in (2, 3))
any_out2 = array(f32, 2, "A")
ints1, ints2 = array(i32, 1, readonly=True), array(i32, 2, readonly=True)
out_ints1, out_ints2 = array(i32, 1), array(i32, 2)
longs2, out_longs1, out_longs2 = array(i64, 2, readonly=True), array(i64, 1), array(i64, 2)
doubles1, doubles2 = array(f64, 1, readonly=True), array(f64, 2, readonly=True)
out_doubles2 = array(f64, 2)
bytes1, bytes2, bytes3, bytes4 = (
    array(types.uint8, num_axes, readonly=True) for num_axes in (1, 2, 3, 4)
)
out_bytes1, out_bytes2 = array(types.uint8, 1), array(types.uint8, 2)
# of attention: positions and sequences of queries and keys; scale, window and cap
positions4, score_rule = UniTuple(ints2, 4), Tuple((f32, i64, f32))
# types of vectors by name, such as f32x16; the modules of simd/ add theirs
vector_types = dict[str, object]()
