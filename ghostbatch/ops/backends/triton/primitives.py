"""What the Triton kernels of ghost norm share: tickets, groups of tiles, and their addresses.

See `kernels` for how they work together, and for the shapes.
"""

import triton
import triton.language as tl

# ------------------------------------------------------------------------------ tickets and groups


@triton.jit
def draw(counters_ptr, draws):
    """The next ticket, and how often this kernel has run before with these counters.

    They are never reset: each run makes as many ``draws``, and counts every counter up by as much.
    """
    drawn = tl.atomic_add(counters_ptr, 1, sem="relaxed")
    before = drawn // draws
    return (drawn - before * draws).to(tl.int32), before


@triton.jit
def locate(ticket, ghosts, tiles, last_tiles, blocks):
    """The group of a ticket, the number of its tile within the group, and the group's tiles."""
    before = (ghosts - 1) * blocks
    late = ticket >= before * tiles
    count = tl.where(late, last_tiles, tiles)
    index = tl.where(late, ticket - before * tiles, ticket)
    return index // count + tl.where(late, before, 0), index % count, count


@triton.jit
def count_in(counter_ptr):
    """Publish what this program has stored; return how many programs had come before."""
    tl.debug_barrier()  # every thread's stores come before the one thread's increment
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def wait_for(counter_ptr, count):
    """Return once ``count`` programs have counted in; what they stored can then be read."""
    seen = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    while seen < count:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def add_up(first_ptr, second_ptr, count, stride, channel_C, live_C, R: tl.constexpr):
    """Two sums over ``count`` rows of tables that other programs wrote, in a fixed order."""
    row_R = tl.arange(0, R)
    one_RC = tl.zeros((R, channel_C.shape[0]), tl.float32)
    two_RC = tl.zeros((R, channel_C.shape[0]), tl.float32)
    for start in range(0, count, R):
        at_RC = (start + row_R)[:, None] * stride + channel_C[None, :]
        keep_RC = (start + row_R < count)[:, None] & live_C[None, :]
        # ".cg": from the L2 cache, where other multiprocessors' stores are seen.
        one_RC += tl.load(first_ptr + at_RC, keep_RC, other=0.0, cache_modifier=".cg")
        two_RC += tl.load(second_ptr + at_RC, keep_RC, other=0.0, cache_modifier=".cg")
    return tl.sum(one_RC, 0), tl.sum(two_RC, 0)


@triton.jit
def rows_to_add(count, FAN: tl.constexpr, TREE: tl.constexpr):
    """How many sums are left for the last program of a group with ``count`` tiles."""
    return tl.cdiv(count, FAN) if TREE else count


@triton.jit
def add_up_group(
    parts_ptr, count, most_tiles, column_C, live_C, FAN: tl.constexpr, TREE: tl.constexpr
):
    """The two sums over a group, from those of its tiles or of bundles of them."""
    width: tl.constexpr = 2 * column_C.shape[0]
    if TREE:
        parts_ptr += most_tiles * width
    rest = rows_to_add(count, FAN, TREE)
    return add_up(parts_ptr, parts_ptr + width // 2, rest, width, column_C, live_C, FAN)


@triton.jit
def arrive(
    parts_ptr,  # of the group: the sums of its tiles, then those of bundles of FAN tiles
    counters_ptr,  # of the group: its own, then one for each bundle
    tile,
    count,
    most_tiles,
    one_C,
    two_C,
    column_C,
    before,
    FAN: tl.constexpr,
    TREE: tl.constexpr,
):
    """Leave the sums of a tile; say whether this program is the last of its group.

    Who waits for the group waits for the last program to add up, so many sums are added in two
    steps: the last program of each bundle does the first.
    """
    width: tl.constexpr = 2 * column_C.shape[0]
    place = parts_ptr + tile * width + column_C
    tl.store(place, one_C)
    tl.store(place + width // 2, two_C)
    if TREE:
        bundle = tile // FAN
        size = tl.minimum(count - bundle * FAN, FAN)
        last = count_in(counters_ptr + 1 + bundle) == before * size + size - 1
        if last:
            parts = parts_ptr + bundle * (FAN * width)
            every_C = column_C >= 0
            one_C, two_C = add_up(parts, parts + width // 2, size, width, column_C, every_C, FAN)
            place = parts_ptr + (most_tiles + bundle) * width + column_C
            tl.store(place, one_C)
            tl.store(place + width // 2, two_C)
            rest = tl.cdiv(count, FAN)
            last = count_in(counters_ptr) == before * (rest + 1) + rest - 1
    else:
        last = count_in(counters_ptr) == before * (count + 1) + count - 1
    return last


# ------------------------------------------------------------------------------------------- tiles


@triton.jit
def base_of(ghost, first, channel, ghost_rows, C, S: tl.constexpr, PLANES: tl.constexpr):
    """Where row ``first`` of a ghost begins, in 64 bits: a batch may hold over 2**31 values."""
    start = ghost.to(tl.int64) * ghost_rows * C
    if PLANES:
        return start + (first // S).to(tl.int64) * C * S + channel * S
    else:
        return start + first.to(tl.int64) * C + channel


@triton.jit
def offsets(row_R1U, first, channel_C, C, S: tl.constexpr, PLANES: tl.constexpr):
    """How far values lie from where row ``first`` begins, in 32 bits."""
    if PLANES:
        at_R1U = (row_R1U // S - first // S) * (C * S) + row_R1U % S
        return at_R1U + channel_C[None, :, None] * S
    else:
        return (row_R1U - first) * C + channel_C[None, :, None]


@triton.jit
def span(U: tl.constexpr, R: tl.constexpr):
    """The rows of a sub-tile: the threads lie along R and C, so sums over U need no exchange."""
    return tl.arange(0, R)[:, None, None] + tl.arange(0, U)[None, None, :] * R


@triton.jit
def fetch(ptr, at, keep, EVEN: tl.constexpr, AGAIN: tl.constexpr, STREAM: tl.constexpr):
    """Values as they are; ``STREAM`` tells the cache whether they are soon read ``AGAIN``."""
    soon: tl.constexpr = "evict_last" if STREAM > 1 else ""
    never: tl.constexpr = "evict_first" if STREAM > 0 else ""
    policy: tl.constexpr = soon if AGAIN else never
    if EVEN:
        return tl.load(ptr + at, eviction_policy=policy)
    else:
        return tl.load(ptr + at, keep, other=0.0, eviction_policy=policy)


@triton.jit
def load(ptr, at, keep, EVEN: tl.constexpr, AGAIN: tl.constexpr, STREAM: tl.constexpr):
    """Values in fp32."""
    return fetch(ptr, at, keep, EVEN, AGAIN, STREAM).to(tl.float32)


@triton.jit
def store(ptr, at, values, keep, EVEN: tl.constexpr, STREAM: tl.constexpr):
    """Store in the dtype of the tensor; ``STREAM`` marks values as not soon read again."""
    policy: tl.constexpr = "evict_first" if STREAM > 0 else ""
    if EVEN:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty), eviction_policy=policy)
    else:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty), keep, eviction_policy=policy)


@triton.jit
def parameter(ptr, channel_C, live_C, default: tl.constexpr, GIVEN: tl.constexpr):
    """A weight or a bias in fp32, or what stands for a missing one."""
    if GIVEN:
        return tl.load(ptr + channel_C, live_C, other=0.0).to(tl.float32)
    else:
        return tl.full(channel_C.shape, default, tl.float32)


@triton.jit
def masked(
    dy_RCU,
    centred_RCU,
    y_ptr,
    at,
    keep,
    slope_C,
    bias_C,
    EVEN: tl.constexpr,
    AGAIN: tl.constexpr,
    STREAM: tl.constexpr,
    RELU: tl.constexpr,
    SAVED: tl.constexpr,
):
    """The gradient where ReLU let it pass: told by its result, or by what it must have been."""
    if RELU:
        if SAVED:
            result = load(y_ptr, at, keep, EVEN, AGAIN, STREAM)
        else:
            result = centred_RCU * slope_C[None, :, None] + bias_C[None, :, None]
        dy_RCU = tl.where(result <= 0.0, 0.0, dy_RCU)
    return dy_RCU
