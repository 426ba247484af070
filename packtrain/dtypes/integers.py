"""Integers: ids, masks and counts; never trained."""

from packtrain.dtypes.element_type import scalar

i8, i16 = scalar("i8", 24, "int8"), scalar("i16", 25, "int16")
i32, i64 = scalar("i32", 26, "int32"), scalar("i64", 27, "int64")
u8 = scalar("u8", None, "uint8")
