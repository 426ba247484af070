"""Integers: ids, masks and counts; never trained."""

from packtrain.dtypes.element_type import scalar_dtype

i8, i16 = scalar_dtype("i8", 24, "int8"), scalar_dtype("i16", 25, "int16")
i32, i64 = scalar_dtype("i32", 26, "int32"), scalar_dtype("i64", 27, "int64")
u8 = scalar_dtype("u8", None, "uint8")
