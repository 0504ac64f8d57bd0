"""Pieces that kernels of several families share."""

import os

import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def begin_dependent(PDL: tl.constexpr):
        """Nothing: the interpreter runs launches one after the other."""

    @triton.jit
    def begin_in_order(PDL: tl.constexpr):
        """Nothing."""

else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def begin_dependent(PDL: tl.constexpr):
        """With programmatic launch: let the next kernel start, then wait until the one ahead is done.

        Every program must call this before it reads or writes anything that another kernel of the
        step touches, and before it returns: a grid whose programs all skip the wait would let its
        successor overtake its predecessor. Only constants (weights) may be read ahead of it.
        """
        if PDL:
            gdc_launch_dependents()
            gdc_wait()

    @triton.jit
    def begin_in_order(PDL: tl.constexpr):
        """As ``begin_dependent``, but the next kernel starts when the one ahead is done.

        So the next one may read, before its own wait, what was there before this one.
        """
        if PDL:
            gdc_wait()
            gdc_launch_dependents()


@triton.jit
def arrive(counter, expected):
    """True for the program that comes last; it finds the stores of the others done.

    The counter starts at zero and is left so, for the next launch. What the others stored must be loaded
    with ``cache_modifier=".cg"``: a line in this program's L1 may be older.
    """
    tl.debug_barrier()  # all threads of this program have stored before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last
