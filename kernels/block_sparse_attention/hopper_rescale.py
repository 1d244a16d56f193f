"""Bringing the accumulator of the Hopper path to another running maximum, which most steps need not.

Exponentials and sums may refer to any number near the maximum. One that is kept until the maximum is 2^8 beyond it
leaves every rounding what it was relative to its value, and P within the range of fp16. Then only the first steps of a
list change it, and the 64 multiplications a thread that the others skip are a fifth of their instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(8.0)
"""Powers of two by which logits may pass the running maximum."""

HELD = gl.constexpr(64)
"""Numbers of the accumulator [64, 128] that a thread holds: of two rows, two columns of each in turn."""


def _assembly(held: int) -> str:
    """Multiply operands 0 to `held` by those from 2 `held` on, unless all those of the warp are 1."""
    products = "\n".join(f"mul.f32 ${i}, ${i}, ${2 * held + i};" for i in range(held))
    return f"""{{
        .reg .pred changed;
        setp.neu.f32 changed, ${2 * held}, 0f3F800000;
        setp.neu.or.f32 changed, ${2 * held + 2}, 0f3F800000, changed;
        vote.sync.any.pred changed, changed, 0xffffffff;
        @!changed bra UNCHANGED;
        {products}
        UNCHANGED:
    }}"""


# in assembly, because a branch of the language takes one answer of all warps, and barriers to find it
ASSEMBLY = gl.constexpr(_assembly(HELD.value))
OPERANDS = gl.constexpr(",".join(["=f"] * HELD.value + [str(i) for i in range(HELD.value)] + ["f"] * HELD.value))


@gluon.jit
def running_maximum(m, highest):
    """`highest` [64] of a step where it is too far beyond m [64], else m."""
    return gl.where(highest > m + SLACK, highest, m)


@gluon.jit
def rescale(acc, alpha):
    """acc [64, 128] times the factors of its rows [64]."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return gl.inline_asm_elementwise(ASSEMBLY, OPERANDS, [acc, alpha], dtype=gl.float32, is_pure=True, pack=HELD)
