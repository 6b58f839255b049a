"""What the Triton kernels of ghost norm share: tickets, groups of tiles, and their addresses.

See `kernels` for how they work together, and for the shapes.
"""

import triton
import triton.language as tl


@triton.jit
def next_ticket(counters_ptr, tickets_per_run):
    """Return the next ticket, and how often this kernel has run before with these counters.

    Counters are never reset: each run takes ``tickets_per_run`` tickets, and increments every
    counter by a known number.
    """
    taken = tl.atomic_add(counters_ptr, 1, sem="relaxed")
    runs_before = taken // tickets_per_run
    return (taken - runs_before * tickets_per_run).to(tl.int32), runs_before


@triton.jit
def locate(ticket, ghosts, tiles, last_tiles, blocks, ghost_rows, last_rows, BC: tl.constexpr):
    """Return where the tile of a ticket lies.

    These are its group, ghost, first channel, the rows of the ghost, the number of the tile within
    the group, and the number of tiles in the group.
    """
    before = (ghosts - 1) * blocks
    late = ticket >= before * tiles
    count = tl.where(late, last_tiles, tiles)
    index = tl.where(late, ticket - before * tiles, ticket)
    group, tile = index // count + tl.where(late, before, 0), index % count
    ghost, channel = group // blocks, (group % blocks) * BC
    rows = tl.where(ghost == ghosts - 1, last_rows, ghost_rows)
    return group, ghost, channel, rows, tile, count


@triton.jit
def count_in(counter_ptr):
    """Publish what this program has stored; return how many programs had counted in before."""
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
    """Return two sums over ``count`` rows of tables that other programs wrote, in a fixed order."""
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
    """Return how many sums are left for the last program of a group with ``count`` tiles."""
    return tl.cdiv(count, FAN) if TREE else count


@triton.jit
def add_up_group(
    partial_sums_ptr, count, most_tiles, column_C, live_C, FAN: tl.constexpr, TREE: tl.constexpr
):
    """Return the two sums over a group, from those of its tiles or of bundles of tiles."""
    width: tl.constexpr = 2 * column_C.shape[0]
    if TREE:
        partial_sums_ptr += most_tiles * width
    rest = rows_to_add(count, FAN, TREE)
    return add_up(
        partial_sums_ptr, partial_sums_ptr + width // 2, rest, width, column_C, live_C, FAN
    )


@triton.jit
def publish_sums(
    partial_sums_ptr,  # of the group: the sums of its tiles, then those of bundles of FAN tiles
    counters_ptr,  # of the group: its own, then one for each bundle
    tile,  # number of the tile within its group
    count,  # tiles of the group
    most_tiles,  # tiles of the largest group
    one_C,  # the two sums over the tile
    two_C,
    column_C,  # channels within the block
    runs_before,
    FAN: tl.constexpr,
    TREE: tl.constexpr,
):
    """Store the sums of a tile; return whether this program is the last of its group.

    Programs that wait for the group wait for the last one to add up, so many sums are added in two
    steps: the last program of each bundle does the first.
    """
    width: tl.constexpr = 2 * column_C.shape[0]
    place = partial_sums_ptr + tile * width + column_C
    tl.store(place, one_C)
    tl.store(place + width // 2, two_C)
    if TREE:
        bundle = tile // FAN
        size = tl.minimum(count - bundle * FAN, FAN)
        last = count_in(counters_ptr + 1 + bundle) == runs_before * size + size - 1
        if last:
            parts = partial_sums_ptr + bundle * (FAN * width)
            every_C = column_C >= 0
            one_C, two_C = add_up(parts, parts + width // 2, size, width, column_C, every_C, FAN)
            place = partial_sums_ptr + (most_tiles + bundle) * width + column_C
            tl.store(place, one_C)
            tl.store(place + width // 2, two_C)
            rest = tl.cdiv(count, FAN)
            last = count_in(counters_ptr) == runs_before * (rest + 1) + rest - 1
    else:
        last = count_in(counters_ptr) == runs_before * (count + 1) + count - 1
    return last


@triton.jit
def write_statistics(place_C, stride, n, sum_C, square_C, shift_C, eps, live_C):
    """Store the statistics of a group of ``n`` rows, from sums of x - shift and its square."""
    about_C = sum_C / n
    variance_C = square_C / n - about_C * about_C
    variance_C = tl.where(variance_C < 0.0, 0.0, variance_C)  # NaN stays NaN, unlike in tl.maximum
    tl.store(place_C, shift_C + about_C, live_C)
    tl.store(place_C + stride, 1.0 / tl.sqrt_rn(variance_C + eps), live_C)
    tl.store(place_C + 2 * stride, variance_C * (n / (n - 1.0)), live_C)


@triton.jit
def base_of(ghost, first, channel, ghost_rows, C, S: tl.constexpr, PLANES: tl.constexpr):
    """Return where row ``first`` of a ghost begins, in 64 bits: batches exceed 2**31 values."""
    start = ghost.to(tl.int64) * ghost_rows * C
    if PLANES:
        return start + (first // S).to(tl.int64) * C * S + channel * S
    else:
        return start + first.to(tl.int64) * C + channel


@triton.jit
def subtile(
    first,  # the tile's first row
    sub,  # number of the sub-tile within the tile
    rows,  # rows of the ghost
    column_C,  # channels within the block
    live_C,  # whether they exist
    C,
    S: tl.constexpr,
    PLANES: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
):
    """Return the offsets of a sub-tile's values from row ``first``, and whether they exist.

    Offsets have 32 bits. Threads lie along R and C, so sums over U need no exchange between them.
    """
    row_R1U = (
        first
        + sub * (U * R)
        + (tl.arange(0, R)[:, None, None] + tl.arange(0, U)[None, None, :] * R)
    )
    if PLANES:
        at_R1U = (row_R1U // S - first // S) * (C * S) + row_R1U % S
        at_RCU = at_R1U + column_C[None, :, None] * S
    else:
        at_RCU = (row_R1U - first) * C + column_C[None, :, None]
    return at_RCU, (row_R1U < rows) & live_C[None, :, None]


@triton.jit
def fetch(ptr, at, keep, EVEN: tl.constexpr, AGAIN: tl.constexpr, STREAM: tl.constexpr):
    """Load values in their dtype; ``STREAM`` says whether they are soon read ``AGAIN``."""
    soon: tl.constexpr = "evict_last" if STREAM > 1 else ""
    never: tl.constexpr = "evict_first" if STREAM > 0 else ""
    policy: tl.constexpr = soon if AGAIN else never
    if EVEN:
        return tl.load(ptr + at, eviction_policy=policy)
    else:
        return tl.load(ptr + at, keep, other=0.0, eviction_policy=policy)


@triton.jit
def load(ptr, at, keep, EVEN: tl.constexpr, AGAIN: tl.constexpr, STREAM: tl.constexpr):
    """Load values as fp32."""
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
def store_and_round(ptr, at, values, keep, EVEN: tl.constexpr, STREAM: tl.constexpr):
    """Store values that are soon read again; return them as they were rounded, in fp32."""
    policy: tl.constexpr = "evict_last" if STREAM > 1 else ""
    rounded = values.to(ptr.dtype.element_ty)
    if EVEN:
        tl.store(ptr + at, rounded, eviction_policy=policy)
    else:
        tl.store(ptr + at, rounded, keep, eviction_policy=policy)
    return rounded.to(tl.float32)


@triton.jit
def load_stored(ptr, at, keep, EVEN: tl.constexpr):
    """Load as fp32 what other programs stored, from the L2 cache, where it is seen."""
    if EVEN:
        return tl.load(ptr + at, cache_modifier=".cg").to(tl.float32)
    else:
        return tl.load(ptr + at, keep, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def parameter(ptr, channel_C, live_C, default: tl.constexpr, GIVEN: tl.constexpr):
    """Return a weight or a bias in fp32; the default if there is none."""
    if GIVEN:
        return tl.load(ptr + channel_C, live_C, other=0.0).to(tl.float32)
    else:
        return tl.full(channel_C.shape, default, tl.float32)


@triton.jit
def read_affine(
    statistics_ptr, place_C, stride, weight_ptr, bias_ptr, channel_C, live_C,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return mean, 1 / deviation, weight / deviation and bias of a group."""
    mean_C = tl.load(statistics_ptr + place_C, live_C, other=0.0)
    invstd_C = tl.load(statistics_ptr + stride + place_C, live_C, other=0.0)
    slope_C = parameter(weight_ptr, channel_C, live_C, 1.0, WEIGHT) * invstd_C
    return mean_C, invstd_C, slope_C, parameter(bias_ptr, channel_C, live_C, 0.0, BIAS)


@triton.jit
def relu_grad(
    dy_RCU,
    centred_RCU,  # x - mean
    y_ptr,  # of the tile
    at,  # offsets within the tile
    keep,  # whether the values exist
    slope_C,  # weight / deviation
    bias_C,
    EVEN: tl.constexpr,
    AGAIN: tl.constexpr,
    STREAM: tl.constexpr,
    RELU: tl.constexpr,
    SAVED: tl.constexpr,  # whether y is read; otherwise ReLU's input is computed again
):
    """Return dy, with zeros where ReLU cut the result."""
    if RELU:
        if SAVED:
            result = load(y_ptr, at, keep, EVEN, AGAIN, STREAM)
        else:
            result = centred_RCU * slope_C[None, :, None] + bias_C[None, :, None]
        dy_RCU = tl.where(result <= 0.0, 0.0, dy_RCU)
    return dy_RCU
