"""Types of three values or fewer."""

from packtrain.types.room import packed

tq1_0, tq2_0 = packed("tq1_0", 34, 256, 54), packed("tq2_0", 35, 256, 66)
q1_0, q2_0 = packed("q1_0", 41, 128, 18), packed("q2_0", 42, 64, 18)
