"""Sums over ranks by pushing: a rank writes what it has into the memory of the others, and each adds up.

Nothing is read over a link and nothing is changed there atomically: writes are posted, so they cost no round
trip, and PCIe, which has no atomics between GPUs, carries them as well as NVLink. A flag behind the data
says that it is there; a flag counts the sums of its program, so nobody has to clear it. Parts are added in
the order of the ranks, in float32, so all ranks get the same bytes.
"""

import os

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent
from sgl_kernel.norm.kernels import normed_row

_SIGNAL = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 t;
    .reg .u64 a;
    mov.u32 t, %tid.x;
    setp.lt.u32 p, t, $5;
    setp.ne.and.u32 p, t, $4, p;
    mad.wide.u32 a, t, 8, $1;
    @p ld.global.u64 a, [a];
    add.u64 a, a, $2;
    @p st.release.sys.global.u32 [a], $3;
    mov.u32 $0, 0;
}""")

_AWAIT = tl.constexpr("""{
    .reg .pred p;
    .reg .pred q;
    .reg .u32 t;
    .reg .u32 v;
    .reg .u64 a;
    mov.u32 t, %tid.x;
    setp.lt.u32 p, t, $5;
    setp.ne.and.u32 p, t, $4, p;
    mad.wide.u32 a, t, $2, $1;
    @!p bra arrived;
again:
    ld.acquire.sys.global.u32 v, [a];
    sub.s32 v, v, $3;
    setp.lt.s32 q, v, 0;
    @q bra again;
arrived:
    mov.u32 $0, 0;
}""")


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def signal(peers, place, number, RANK: tl.constexpr, SIZE: tl.constexpr):
        """The interpreter has no threads; its ranks run one after the other, again until all is there."""
        for i in tl.static_range(1, SIZE):
            flag = (tl.load(peers + (RANK + i) % SIZE) + place).to(tl.pointer_type(tl.int32))
            tl.store(flag, number)

    @triton.jit
    def wait(flags, stride, number, RANK: tl.constexpr, SIZE: tl.constexpr):
        """Nothing: see ``signal``."""

else:

    @triton.jit
    def signal(peers, place, number, RANK: tl.constexpr, SIZE: tl.constexpr):
        """Thread t tells rank t that all that this program has stored so far is there.

        place: of the flag, in bytes, the same in every rank's block.
        """
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            _SIGNAL, "=r,l,l,r,r,r", [peers.to(tl.int64), place, number, RANK, SIZE],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def wait(flags, stride, number, RANK: tl.constexpr, SIZE: tl.constexpr):
        """Until the flags of all peers, ``stride`` bytes apart, have come to ``number``. They wrap around."""
        tl.inline_asm_elementwise(
            _AWAIT, "=r,l,r,r,r,r", [flags, stride, number, RANK, SIZE], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()


@triton.jit
def block_of(peers, rank, DTYPE: tl.constexpr):
    """A rank's block of memory, as this one sees it."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(DTYPE)), 4096)


@triton.jit
def give_and_add(
    mine,  # [BLOCK]
    inside,  # [BLOCK]
    place,  # [BLOCK]: of what rank 0 gives, in elements from the begin of a block
    peers,  # [SIZE] int64: addresses of the ranks' blocks
    flag,  # bytes from the begin of a block, of the flag that rank 0 sets
    number,  # of the sum, for this program
    FLAG_ROW: tl.constexpr,  # flags of one rank
    ROOM: tl.constexpr,  # bytes of one message's place
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Push ``mine`` to all others, wait for theirs -> [BLOCK] float32, added in the order of the ranks."""
    ROOM_OF: tl.constexpr = ROOM // (DTYPE.primitive_bitwidth // 8)
    for i in tl.static_range(1, SIZE):  # each begins with its neighbour, so all links are used at a time
        block = block_of(peers, (RANK + i) % SIZE, DTYPE)
        tl.store(block + RANK * ROOM_OF + place, mine, mask=inside)
    signal(peers, (flag + 4 * RANK * FLAG_ROW).to(tl.int64), number, RANK, SIZE)
    block = block_of(peers, RANK, DTYPE)
    wait(block.to(tl.int64) + flag, 4 * FLAG_ROW, number, RANK, SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += mine.to(tl.float32)
        else:
            given = tl.load(block + rank * ROOM_OF + place, mask=inside, cache_modifier=".cg")
            total += given.to(tl.float32)
    return total


@triton.jit
def push_once_kernel(
    x,  # [numel]
    residual,  # [numel] or None: the sum is added to it
    out,  # [numel]; may be x or residual
    peers,  # [SIZE] int64: addresses of the ranks' blocks
    counters,  # [programs] int32: sums that each program has made
    numel,
    FLAGS: tl.constexpr,  # bytes, from the begin of a block
    FLAG_ROW: tl.constexpr,  # flags of one rank
    DATA: tl.constexpr,
    ROOM: tl.constexpr,  # bytes of one message's place
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth // 8
    program = tl.program_id(0)
    column = program * BLOCK + tl.arange(0, BLOCK)
    inside = column < numel
    number = tl.load(counters + program) + 1
    place = DATA // WIDTH + (number & 1) * (SIZE * ROOM // WIDTH) + column
    mine = tl.load(x + column, mask=inside)
    flag = FLAGS + 4 * program
    total = give_and_add(
        mine, inside, place, peers, flag, number, FLAG_ROW, ROOM, RANK, SIZE, BLOCK, DTYPE
    )  # fmt: skip
    if residual is not None:
        total += tl.load(residual + column, mask=inside).to(tl.float32)
    tl.store(out + column, total.to(DTYPE), mask=inside)
    tl.store(counters + program, number)


@triton.jit
def push_rows_kernel(
    x,  # [rows, COLUMNS]
    residual,  # [rows, COLUMNS], the sum is added to it, and is put here
    normed,  # [rows, COLUMNS]: the RMS norm of that
    weight,  # [COLUMNS]
    peers,  # [SIZE] int64
    counters,  # [programs] int32
    eps,
    FLAGS: tl.constexpr,
    FLAG_ROW: tl.constexpr,
    DATA: tl.constexpr,
    ROOM: tl.constexpr,
    PLACE: tl.constexpr,  # bytes of one row's
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth // 8
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    # No kernel writes weights: they may be read while the kernel ahead still runs.
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    number = tl.load(counters + row) + 1
    place = DATA // WIDTH + (number & 1) * (SIZE * ROOM // WIDTH) + row * (PLACE // WIDTH) + column
    mine = tl.load(x + row * COLUMNS + column, mask=inside, other=0.0)
    flag = FLAGS + 4 * row
    total = give_and_add(
        mine, inside, place, peers, flag, number, FLAG_ROW, ROOM, RANK, SIZE, BLOCK, DTYPE
    )  # fmt: skip
    total += tl.load(residual + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    summed = total.to(DTYPE)
    tl.store(residual + row * COLUMNS + column, summed, mask=inside)
    wide = tl.where(inside, summed.to(tl.float32), 0.0)
    tl.store(normed + row * COLUMNS + column, normed_row(wide, w, eps, COLUMNS, DTYPE), mask=inside)
    tl.store(counters + row, number)


@triton.jit
def push_twice_kernel(
    x,  # [numel]
    residual,  # [numel] or None: the sum is added to it
    out,  # [numel]; may be x or residual
    peers,  # [SIZE] int64
    counters,  # [programs] int32
    numel,
    part,  # elements that each rank adds up, the last one fewer
    PART_FLAGS: tl.constexpr,
    SUM_FLAGS: tl.constexpr,
    FLAG_ROW: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    ROOM: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth // 8
    program = tl.program_id(0)
    column = program * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(counters + program) + 1
    turn = (number & 1) * (SIZE * ROOM // WIDTH)
    for i in tl.static_range(1, SIZE):
        begin = ((RANK + i) % SIZE) * part
        inside = (column < part) & (begin + column < numel)
        block = block_of(peers, (RANK + i) % SIZE, DTYPE)
        given = tl.load(x + begin + column, mask=inside)
        tl.store(block + PARTS // WIDTH + turn + RANK * (ROOM // WIDTH) + column, given, mask=inside)
    signal(peers, PART_FLAGS + 4 * (RANK * FLAG_ROW + program).to(tl.int64), number, RANK, SIZE)
    block = block_of(peers, RANK, DTYPE)
    own = block.to(tl.int64)
    wait(own + PART_FLAGS + 4 * program, 4 * FLAG_ROW, number, RANK, SIZE)
    inside = (column < part) & (RANK * part + column < numel)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(x + RANK * part + column, mask=inside).to(tl.float32)
        else:
            place = block + PARTS // WIDTH + turn + rank * (ROOM // WIDTH) + column
            total += tl.load(place, mask=inside, cache_modifier=".cg").to(tl.float32)
    mine = total.to(DTYPE)
    for i in tl.static_range(1, SIZE):
        there = block_of(peers, (RANK + i) % SIZE, DTYPE)
        tl.store(there + SUMS // WIDTH + turn + RANK * (ROOM // WIDTH) + column, mine, mask=inside)
    signal(peers, SUM_FLAGS + 4 * (RANK * FLAG_ROW + program).to(tl.int64), number, RANK, SIZE)
    wait(own + SUM_FLAGS + 4 * program, 4 * FLAG_ROW, number, RANK, SIZE)
    for rank in tl.static_range(SIZE):
        inside = (column < part) & (rank * part + column < numel)
        if rank == RANK:
            summed = mine.to(tl.float32)
        else:
            place = block + SUMS // WIDTH + turn + rank * (ROOM // WIDTH) + column
            summed = tl.load(place, mask=inside, cache_modifier=".cg").to(tl.float32)
        if residual is not None:
            summed += tl.load(residual + rank * part + column, mask=inside).to(tl.float32)
        tl.store(out + rank * part + column, summed.to(DTYPE), mask=inside)
    tl.store(counters + program, number)
