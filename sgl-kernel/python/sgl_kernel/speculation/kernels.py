"""Accept, state update, and the move of an accepted path's KV."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def _at(values, node, wanted):
    """The element of a vector held in registers."""
    return tl.sum(tl.where(node == wanted, values, 0), 0)


@triton.jit
def accept_kernel(
    tokens,  # [R, NODES] int64
    parents,  # [R, NODES] int64 if TREE
    choice,  # [R, NODES] int64
    faulty,  # [R, NODES] bool
    slots,  # [R]
    root,  # [R] position of the root
    caps,  # [slots] int64 most drafts taken
    query_lens,  # [R] int64 nodes that were verified if RAGGED; else all
    seq_len,  # [slots] int32, written
    next_token,  # [slots] int64, written
    packed,  # [R, COLUMNS + 2] int64, written
    counts,  # [R] int64, written
    path,  # [R, COLUMNS] int64, written
    pad_slot,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    TREE: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PADDED)
    inside = node < NODES
    at = row * NODES + node
    own = tl.load(tokens + at, mask=inside, other=-1)
    chosen = tl.load(choice + at, mask=inside, other=-2)
    broken = tl.load(faulty + at, mask=inside, other=0).to(tl.int32)
    parent = node.to(tl.int64) - 1  # a chain
    if TREE:
        parent = tl.load(parents + at, mask=inside, other=-2)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(root + row).to(tl.int64)
    cap = tl.load(caps + slot)
    if RAGGED:
        cap = tl.minimum(cap, tl.load(query_lens + row) - 1)
    real = slot != pad_slot
    here = tl.zeros([], tl.int32)  # where the walk stands
    alive = real
    last = _at(chosen, node, here)
    count = real.to(tl.int64)
    valid_alive = real & (_at(broken, node, here) == 0)
    valid = valid_alive.to(tl.int64)
    tl.store(path + row * COLUMNS, 0)
    tl.store(packed + row * (COLUMNS + 2), last)
    for column in range(1, COLUMNS):
        child = (parent == here) & (own == last) & inside
        found = tl.min(tl.where(child, node, PADDED), 0)
        alive = alive & (found < PADDED) & (column <= cap)
        here = tl.where(alive, found, here)
        at_column = tl.where(alive, found, column)
        token = _at(chosen, node, at_column)
        last = tl.where(alive, token, last)
        count += alive.to(tl.int64)
        valid_alive = valid_alive & alive & (_at(broken, node, at_column) == 0)
        valid += valid_alive.to(tl.int64)
        tl.store(path + row * COLUMNS + column, at_column.to(tl.int64))
        tl.store(packed + row * (COLUMNS + 2) + column, token)
    tl.store(packed + row * (COLUMNS + 2) + COLUMNS, count)
    tl.store(packed + row * (COLUMNS + 2) + COLUMNS + 1, valid)
    tl.store(counts + row, count)
    tl.store(seq_len + slot, (start + count).to(tl.int32), mask=real)
    tl.store(next_token + slot, last, mask=real)


@triton.jit
def begin_rows_kernel(
    slots,  # [R]
    seq_len,  # [slots] int32
    next_token,  # [slots] int64
    root,  # [R] int64, written
    tokens,  # [R, …] int64, first column written
    token_stride,
    NUM_ROWS,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < NUM_ROWS
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    tl.store(root + row, tl.load(seq_len + slot, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(tokens + row * token_stride, tl.load(next_token + slot, mask=inside, other=0), mask=inside)


@triton.jit
def _places(page_table, table_stride, slot, position, wanted, PAGE_SIZE: tl.constexpr):
    page = tl.load(page_table + slot * table_stride + position // PAGE_SIZE, mask=wanted, other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def move_path_kernel(
    kv,  # [layers, places, SIZE]
    path,  # [R, COLUMNS] int64
    counts,  # [R] int64
    slots,  # [R]
    root,  # [R]
    page_table,  # [slots, max_pages] int32
    layer_stride,
    table_stride,
    pad_slot,
    SIZE: tl.constexpr,  # elements of a place
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(root + row).to(tl.int64)
    wanted = (column < tl.load(counts + row)) & (column < COLUMNS) & (slot != pad_slot)
    node = tl.load(path + row * COLUMNS + column, mask=wanted, other=0)
    wanted = wanted & (node != column)
    source = _places(page_table, table_stride, slot, start + node, wanted, PAGE_SIZE)
    target = _places(page_table, table_stride, slot, start + column, wanted, PAGE_SIZE)
    inside = wanted[:, None] & (element < SIZE)[None, :]
    layer_kv = kv + layer * layer_stride + element[None, :]
    moved = tl.load(layer_kv + source[:, None] * SIZE, mask=inside)
    # A place may be a source of one column and the target of another: all are read before one is written.
    # Programs share no elements, so the threads of this one are all that must wait.
    tl.debug_barrier()
    tl.store(layer_kv + target[:, None] * SIZE, moved, mask=inside)
