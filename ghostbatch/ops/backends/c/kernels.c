/* Ghost norm on a CPU, forward and backward. build.py compiles this file, bind.py calls it.

   It is compiled for one dtype of tensors at a time, STORED; statistics and arithmetic are REAL,
   the sums over a ghost double. With BFLOAT16, STORED holds the upper halves of floats.

   There are two passes over each ghost: the first takes two sums per channel, the second computes
   the result from them, while the ghost is still in the cache.

               p       sums           result
   forward     x - m   p, p (x - m)   a (x - m) + b [+ residual], cut at 0 by ReLU
   backward    dy      p, p (x - m)   a (x - m) + b + g p

   In the first pass forward, m is a value near the mean; after that it is the mean. Where ReLU cut
   the result, p is 0: where `mask`, the result of ReLU, is 0, or e (x - m) + f, its input, is not
   positive. A channel's values lie in rows, one in each, or in planes of pixels.

   A thread takes whole ghosts if that keeps all threads busy and a ghost fits its cache. Otherwise
   ghosts are cut into parts, and all sums are complete before the second pass begins. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifndef CUT_SMALL
#define CHAIN 64        /* values of a lane that are added in REAL; their sum goes to a double */
#define STRETCH 512     /* pixels of a channel, at least, before the sums in its lanes are added */
#define LARGE (1 << 18) /* values of a ghost beyond a core's cache */
#define GRAIN (1 << 15) /* values that are worth a thread */
#else                   /* for tests: small batches then go through every case */
#define CHAIN 2
#define STRETCH 8
#define LARGE 40
#define GRAIN 4
#endif
#define SOME 128  /* the mean of one in SOME values is near the mean of all */
#define PADDED 16 /* rows of scratch space are a multiple of this long: room for any vector */
#define ROOM 10   /* doubles that a thread needs per channel: see Scratch */

typedef struct {               /* `Work` in bind.py */
    const STORED *x;           /* (N, C, ...), as are the next four: dense, in rows or planes */
    const STORED *other;       /* forward: the residual, or NULL; backward: dy */
    const STORED *mask;        /* backward: y, if ReLU's mask is taken from it */
    STORED *out;               /* forward: y; backward: dx */
    STORED *passed;            /* backward: where p goes, the gradient of a residual, or NULL */
    const REAL *weight, *bias; /* (C), or NULL */
    REAL *statistics;          /* (3, K, C): mean, invstd, unbiased variance */
    double *room;              /* scratch: 2 ROOM per thread and 2 per ghost, times padded C */
    long values;               /* number of values of x */
    long samples, rows;        /* N; rows of a sample: 1 in planes */
    long channels, pixels;     /* C; pixels of a plane: 1 in rows */
    long ghost, ghosts;        /* samples of a ghost; K */
    long threads;              /* of PyTorch, at most */
    long whole;                /* ghosts, the first ones, each of which one thread takes whole */
    long together, parts;      /* other ghosts: how many at a time, and in how many parts each */
    double eps;                /* added to the variance */
    int flags;                 /* those below */
} Work;

enum { OTHER = 1, SCALED = 2, RELU = 4, BY_RESULT = 8, BY_INPUT = 16, PASSED = 32 };

typedef struct {             /* `CRunning` in bind.py: running statistics */
    REAL *mean, *variance;   /* (C) */
    int64_t *tracked;        /* number of batches, or NULL */
    double momentum;         /* weight of the newest ghost */
    int by_mean;             /* one update with the mean over ghosts instead of one per ghost */
} Running;

typedef struct {
    double *one, *two;       /* the two sums, per channel */
    REAL *ones, *twos;       /* sums of a chain that is not yet added to them */
    REAL *m, *a, *b, *e, *f, *g;
} Scratch;

/* ------------------------------------------------------------------------------------ vectors */

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES ((long)(BYTES / sizeof(REAL)))
#define WIDE 4 /* vectors side by side, to hide the time that one addition takes */
#define EACH _Pragma("GCC unroll 4") for (int u = 0; u < wide; u++)
#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(BYTES)));
typedef __typeof__(_Generic((REAL)0, float: (int32_t)0, double: (int64_t)0)) integer;
typedef integer bits __attribute__((vector_size(BYTES)));

#ifdef BFLOAT16
typedef uint16_t halves __attribute__((vector_size(BYTES / 2)));
typedef uint32_t wholes __attribute__((vector_size(BYTES)));

INLINE vec load_all(const STORED *from) {
    halves upper;
    memcpy(&upper, from, sizeof upper);
    return (vec)(__builtin_convertvector(upper, wholes) << 16);
}

INLINE void store_all(STORED *to, vec v) {
    wholes exact = (wholes)v, nan = (wholes)(v != v);
    wholes nearest = (exact + 0x7fff + ((exact >> 16) & 1)) >> 16;
    halves upper = __builtin_convertvector((nearest & ~nan) | (nan & 0x7fc0), halves);
    memcpy(to, &upper, sizeof upper);
}
#else
INLINE vec load_all(const STORED *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store_all(STORED *to, vec v) { memcpy(to, &v, sizeof v); }
#endif

INLINE vec only(bits where, vec v) { return (vec)((bits)v & where); }

INLINE bits first(long n) {
    bits lane = {0};
    for (long i = 0; i < LANES; i++) lane[i] = i;
    return lane < (integer)n;
}

/* n values, and zeros; `end` is where the tensor ends. */
INLINE vec load(const STORED *from, long at, long n, long end) {
    if (n == LANES) return load_all(from + at);
    if (at + LANES <= end) return only(first(n), load_all(from + at));
    STORED some[LANES] = {0};
    for (long i = 0; i < n; i++) some[i] = from[at + i];
    return load_all(some);
}

/* n values; what follows them, up to `end`, is not written yet and may change. */
INLINE void store(STORED *to, long at, vec v, long n, long end) {
    if (n == LANES || at + LANES <= end) {
        store_all(to + at, v);
        return;
    }
    STORED some[LANES];
    store_all(some, v);
    for (long i = 0; i < n; i++) to[at + i] = some[i];
}

INLINE vec load_real(const REAL *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store_real(REAL *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec spread(REAL value) { return value - (vec){0}; }

/* Work along some values: on WIDE vectors at a time, then on one, then on the n that are left. */
#define ALONG(i, length, ...)                                                                      \
    {                                                                                              \
        long i = 0;                                                                                \
        for (; i + WIDE * LANES <= (length); i += WIDE * LANES) {                                  \
            const int wide = WIDE;                                                                 \
            const long n = LANES;                                                                  \
            __VA_ARGS__                                                                            \
        }                                                                                          \
        for (; i + LANES <= (length); i += LANES) {                                                \
            const int wide = 1;                                                                    \
            const long n = LANES;                                                                  \
            __VA_ARGS__                                                                            \
        }                                                                                          \
        if (i < (length)) {                                                                        \
            const int wide = 1;                                                                    \
            const long n = (length) - i;                                                           \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

/* ----------------------------------------------------------------------- one vector of a pass */

typedef struct {
    vec m, a, b, e, f, g;
} Terms;

INLINE vec p_at(const Work *w, long at, long n, int flags, vec d, const Terms *t) {
    vec p = load(w->other, at, n, w->values);
    if (flags & BY_RESULT) p = only(~(load(w->mask, at, n, w->values) <= 0), p);
    if (flags & BY_INPUT) p = only(~(t->e * d + t->f <= 0), p);
    return p;
}

INLINE void add_at(const Work *w, long at, long n, int flags, const Terms *t, vec *one, vec *two) {
    vec d = load(w->x, at, n, w->values) - t->m;
    if (n < LANES) d = only(first(n), d);
    vec p = flags & OTHER ? p_at(w, at, n, flags, d, t) : d;
    *one += p;
    *two += p * d;
}

INLINE void result_at(const Work *w, long at, long n, long end, int flags, const Terms *t) {
    vec d = load(w->x, at, n, w->values) - t->m, v = t->a * d + t->b;
    if (flags & OTHER) {
        vec p = p_at(w, at, n, flags, d, t);
        if (flags & PASSED) store(w->passed, at, p, n, end);
        v += flags & SCALED ? t->g * p : p;
    }
    store(w->out, at, flags & RELU ? only(~(v <= 0), v) : v, n, end);
}

/* --------------------------------------------------------------------------------------- rows */

INLINE long least(long a, long b) { return a < b ? a : b; }

INLINE Terms terms_of_row(const Scratch *s, long c) {
    return (Terms){load_real(s->m + c), load_real(s->a + c), load_real(s->b + c),
                   load_real(s->e + c), load_real(s->f + c), load_real(s->g + c)};
}

/* `step` rows at once: 1, so that memory is read in order, or many that are one vector each. */
INLINE void add_rows(const Work *w, long from, long to, long step, int flags, const Scratch *s) {
    const long C = w->channels;
    for (long chain = from; chain < to; chain += CHAIN) {
        memset(s->ones, 0, C * sizeof(REAL));
        memset(s->twos, 0, C * sizeof(REAL));
        for (long r = chain, stop = least(chain + CHAIN, to); r < stop; r += step)
            ALONG(c, C, {
                vec one[WIDE], two[WIDE];
                Terms t[WIDE];
                EACH one[u] = load_real(s->ones + c + u * LANES);
                EACH two[u] = load_real(s->twos + c + u * LANES);
                EACH t[u] = terms_of_row(s, c + u * LANES);
                for (long q = r; q < least(r + step, stop); q++)
                    EACH add_at(w, q * C + c + u * LANES, n, flags, &t[u], &one[u], &two[u]);
                EACH store_real(s->ones + c + u * LANES, one[u]);
                EACH store_real(s->twos + c + u * LANES, two[u]);
            })
        for (long c = 0; c < C; c++) s->one[c] += s->ones[c];
        for (long c = 0; c < C; c++) s->two[c] += s->twos[c];
    }
}

INLINE void finish_rows(const Work *w, long from, long to, long step, int flags, const Scratch *s) {
    const long C = w->channels;
    for (long r = from; r < to; r += step)
        ALONG(c, C, {
            Terms t[WIDE];
            EACH t[u] = terms_of_row(s, c + u * LANES);
            for (long q = r; q < least(r + step, to); q++)
                EACH result_at(w, q * C + c + u * LANES, n, to * C, flags, &t[u]);
        })
}

/* ------------------------------------------------------------------------------------- planes */

INLINE Terms terms_of_plane(const Scratch *s, long c) {
    return (Terms){spread(s->m[c]), spread(s->a[c]), spread(s->b[c]),
                   spread(s->e[c]), spread(s->f[c]), spread(s->g[c])};
}

INLINE void add_planes(const Work *w, long from, long to, int flags, const Scratch *s) {
    const long C = w->channels, S = w->pixels, stretch = CHAIN * LANES;
    const long step = S < STRETCH ? STRETCH / S : 1;
    for (; from < to; from += step)
        for (long c = 0; c < C; c++) {
            const Terms t = terms_of_plane(s, c);
            for (long i = 0; i < S; i += stretch) {
                vec one[WIDE] = {0}, two[WIDE] = {0};
                for (long r = from; r < least(from + step, to); r++) {
                    const long at = (r * C + c) * S + i;
                    ALONG(j, least(stretch, S - i), {
                        EACH add_at(w, at + j + u * LANES, n, flags, &t, &one[u], &two[u]);
                    })
                }
                const vec sum = one[0] + one[1] + one[2] + one[3];
                const vec dot = two[0] + two[1] + two[2] + two[3];
                for (long l = 0; l < LANES; l++) s->one[c] += sum[l], s->two[c] += dot[l];
            }
        }
}

INLINE void finish_planes(const Work *w, long from, long to, int flags, const Scratch *s) {
    const long C = w->channels, S = w->pixels;
    for (; from < to; from++)
        for (long c = 0; c < C; c++) {
            const long at = (from * C + c) * S;
            const Terms t = terms_of_plane(s, c);
            ALONG(i, S, { EACH result_at(w, at + i + u * LANES, n, to * C * S, flags, &t); })
        }
}

/* ------------------------------------------------------------------------------------- passes */

/* One copy of a pass for each layout and for each set of things that it may have to do. */
#define CASE(pass, which)                                                                          \
    case which:                                                                                    \
        if (w.pixels > 1)                                                                          \
            pass##_planes(&w, from, to, which, &s);                                                \
        else if (w.channels > LANES)                                                               \
            pass##_rows(&w, from, to, 1, which, &s);                                               \
        else                                                                                       \
            pass##_rows(&w, from, to, CHAIN, which, &s);                                           \
        break;

/* The first pass, over some rows or, in planes, samples. Copies of the arguments tell the compiler
   that nothing written changes them. */
static void add(const Work *work, long from, long to, int flags, const Scratch *scratch) {
    const Work w = *work;
    const Scratch s = *scratch;
    memset(s.one, 0, w.channels * sizeof(double));
    memset(s.two, 0, w.channels * sizeof(double));
    switch (flags) {
        CASE(add, 0)
        CASE(add, OTHER)
        CASE(add, OTHER | BY_RESULT)
        CASE(add, OTHER | BY_INPUT)
    }
}

/* The second. */
static void finish(const Work *work, long from, long to, const Scratch *scratch) {
    const Work w = *work;
    const Scratch s = *scratch;
    switch (w.flags) {
        CASE(finish, 0)
        CASE(finish, RELU)
        CASE(finish, OTHER)
        CASE(finish, OTHER | RELU)
        CASE(finish, OTHER | SCALED)
        CASE(finish, OTHER | SCALED | BY_INPUT)
        CASE(finish, OTHER | SCALED | BY_RESULT | PASSED)
    }
}

/* ------------------------------------------------------------------------------ parts of ghosts */

/* The first row, or sample, of a part of a ghost; for part w->parts, that of the next ghost. */
static long begin(const Work *w, long k, long part) {
    const long from = k * w->ghost, to = k + 1 < w->ghosts ? from + w->ghost : w->samples;
    return from * w->rows + (to - from) * w->rows * part / w->parts;
}

/* Values of a channel in a ghost. */
static double count(const Work *w, long k) {
    return (double)(begin(w, k, w->parts) - begin(w, k, 0)) * w->pixels;
}

/* Channels, and as many places as fill the longest vector. */
static long padded(long channels) { return (channels + PADDED - 1) / PADDED * PADDED; }

/* That of a thread that takes whole ghosts, or of a part of one of those worked on together. */
static Scratch scratch(const Work *w, long k, long part) {
    const long P = padded(w->channels), nth = (k - w->whole) % w->together;
    const long place = k < w->whole ? omp_get_thread_num() : nth * w->parts + part;
    double *one = w->room + place * ROOM * P;
    REAL *row[ROOM - 2] = {(REAL *)(one + 2 * P)};
    for (int i = 1; i < ROOM - 2; i++) row[i] = row[i - 1] + P;
    return (Scratch){one,    one + P, row[0], row[1], row[2],
                     row[3], row[4],  row[5], row[6], row[7]};
}

/* The sums over a whole ghost; those of its parts lie side by side. */
static void total(const Work *w, const Scratch *s, long part, long c, double *one, double *two) {
    const long P = padded(w->channels);
    const double *at = s->one + c - part * ROOM * P;
    *one = *two = 0;
    for (long i = 0; i < w->parts; i++, at += ROOM * P) *one += at[0], *two += at[P];
}

static REAL scale(const Work *w, long c) { return w->weight ? w->weight[c] : 1; }

static REAL shift(const Work *w, long c) { return w->bias ? w->bias[c] : 0; }

typedef void step(const Work *w, long k, long part);

static void run(Work *w, step sum, step result) {
    const long K = w->ghosts, threads = w->threads = least(w->threads, 1 + w->values / GRAIN);
    const int large = w->values / w->samples * w->ghost > LARGE;
    w->whole = large ? 0 : K - K % threads;
    w->together = w->parts = 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long k = 0; k < w->whole; k++) sum(w, k, 0), result(w, k, 0);
    if (w->whole == K) return;
    w->together = large ? 1 : K - w->whole;
    w->parts = (threads + w->together - 1) / w->together;
#pragma omp parallel num_threads(threads)
    for (long k = w->whole; k < K; k += w->together) {
#pragma omp for schedule(static)
        for (long i = 0; i < w->together * w->parts; i++) sum(w, k + i / w->parts, i % w->parts);
#pragma omp for schedule(static)
        for (long i = 0; i < w->together * w->parts; i++) result(w, k + i / w->parts, i % w->parts);
    }
}

/* ------------------------------------------------------------------------------------- forward */

static void sum_forward(const Work *w, long k, long part) {
    const Scratch s = scratch(w, k, part);
    /* Squares are taken about a value near the mean, else rounding eats the variance. The mean of n
       values will do: if it is d away from that of all N, the variance is over d d n / N. */
    const long from = begin(w, k, 0), some = (begin(w, k, w->parts) - from + SOME - 1) / SOME;
    memset(s.m, 0, w->channels * sizeof(REAL));
    add(w, from, from + some, 0, &s);
    for (long c = 0; c < w->channels; c++) {
        const REAL near = s.one[c] / ((double)some * w->pixels);
        s.m[c] = isfinite(near) ? near : 0;
    }
    add(w, begin(w, k, part), begin(w, k, part + 1), 0, &s);
}

static void result_forward(const Work *w, long k, long part) {
    const long C = w->channels, K = w->ghosts;
    const Scratch s = scratch(w, k, part);
    const double n = count(w, k);
    for (long c = 0; c < C; c++) {
        double one, two;
        total(w, &s, part, c, &one, &two);
        const double off = one / n, variance = two / n - off * off;
        const double biased = variance < 0 ? 0 : variance;
        const REAL invstd = 1 / sqrt(biased + w->eps);
        s.m[c] += off;
        s.a[c] = scale(w, c) * invstd;
        s.b[c] = shift(w, c);
        if (part == 0) {
            w->statistics[k * C + c] = s.m[c];
            w->statistics[(K + k) * C + c] = invstd;
            w->statistics[(2 * K + k) * C + c] = biased * (n / (n - 1));
        }
    }
    finish(w, begin(w, k, part), begin(w, k, part + 1), &s);
}

/* Update a running statistic by those of all ghosts (K, C), oldest first. */
static void update_running_stats(REAL *stats, const REAL *ghosts, const Work *w, const Running *r) {
    const long C = w->channels, K = w->ghosts;
    const double momentum = r->momentum, keep = 1 - momentum;
    double *now = w->room;
    for (long c = 0; c < C; c++) now[c] = stats[c] * (r->by_mean ? keep : 1);
    for (long k = 0; k < K; k++)
        for (long c = 0; c < C; c++)
            now[c] = r->by_mean ? now[c] + momentum / K * ghosts[k * C + c]
                                : now[c] * keep + momentum * ghosts[k * C + c];
    for (long c = 0; c < C; c++) stats[c] = now[c];
}

/* Normalise, and update the running statistics unless `r` is NULL. */
void forward(Work *w, const Running *r) {
    run(w, sum_forward, result_forward);
    if (!r) return;
    update_running_stats(r->mean, w->statistics, w, r);
    update_running_stats(r->variance, w->statistics + 2 * w->ghosts * w->channels, w, r);
    if (r->tracked) *r->tracked += r->by_mean ? 1 : w->ghosts;
}

/* ------------------------------------------------------------------------------------ backward */

static void sum_backward(const Work *w, long k, long part) {
    const long C = w->channels;
    const REAL *mean = w->statistics + k * C, *invstd = mean + w->ghosts * C;
    const Scratch s = scratch(w, k, part);
    for (long c = 0; c < C; c++)
        s.m[c] = mean[c], s.e[c] = scale(w, c) * invstd[c], s.f[c] = shift(w, c);
    const int flags = w->flags & (OTHER | BY_RESULT | BY_INPUT);
    add(w, begin(w, k, part), begin(w, k, part + 1), flags, &s);
}

/* Where a ghost's gradients of weight and bias are kept. */
static double *parameters(const Work *w, long k) {
    return w->room + 2 * (w->threads * ROOM + k) * padded(w->channels);
}

/* dx = weight invstd (dy - mean(dy) - xhat mean(dy xhat)), with xhat = (x - mean) invstd */
static void result_backward(const Work *w, long k, long part) {
    const long C = w->channels;
    const REAL *invstd = w->statistics + (w->ghosts + k) * C;
    const Scratch s = scratch(w, k, part);
    const double n = count(w, k);
    double *gradients = parameters(w, k);
    for (long c = 0; c < C; c++) {
        double one, two;
        total(w, &s, part, c, &one, &two);
        const double gain = scale(w, c) * (double)invstd[c];
        /* A variance beyond all numbers leaves an xhat of 0, and a dot of 0, or NaN if dy has one. */
        const double dot = invstd[c] == 0 ? one - one : two * invstd[c];
        s.a[c] = -gain * invstd[c] * dot / n;
        s.b[c] = -gain * one / n;
        s.g[c] = gain;
        if (part == 0) gradients[c] = dot, gradients[C + c] = one;
    }
    finish(w, begin(w, k, part), begin(w, k, part + 1), &s);
}

/* The gradients of weight and bias go to `sums`, one after the other. */
void backward(Work *w, REAL *sums) {
    run(w, sum_backward, result_backward);
    double *all = parameters(w, 0);
    for (long k = 1; k < w->ghosts; k++)
        for (long c = 0; c < 2 * w->channels; c++) all[c] += parameters(w, k)[c];
    for (long c = 0; c < 2 * w->channels; c++) sums[c] = all[c];
}
