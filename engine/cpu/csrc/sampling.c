/* One draw from a row of logits, as `draw_token` of engine/sampling.py: of the tokens that top_k, top_p and min_p keep,
   the one with the smallest exponential(key, id) / weight, where weight = exp((logit - highest) / temperature).

   Nothing is sorted. Each filter keeps the tokens down to some place in descending order. So the draw takes the best of
   all tokens, and if a filter drops that token, the filter drops every token behind it too: the draw goes on among the
   tokens before it. Each round leaves a random share of the mass, so few rounds suffice. What top_k keeps is known only
   between two bounds of weights, which are halved until they decide. */
#include "vectors.h"

typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));

#define GROUP 4  /* vectors that are looked at together */
#define BATCH 64 /* vectors whose sums are added up in float before they become double */
#define LEAST_WEIGHT 1e-18f /* lighter tokens are a rounding error of every sum */

struct share {
    int64_t count;
    double mass;
};

struct row {
    const float *logits;
    const uint8_t *allowed; /* a bit for each token, the lowest first; NULL allows all */
    float *weights;         /* [vocab] */
    int64_t vocab;
    uint32_t key[2];
    /* The weight of the top_k-th token is above `many` and at most `few`. The shares are of the tokens above these. */
    float few, many;
    struct share above_few, above_many;
};

INLINE vfloat loaded(const float *from, int64_t count, float otherwise) {
    if (count >= LANES) return load_floats(from);
    vfloat values = splat(otherwise);
    for (int64_t lane = 0; lane < count; lane++) values[lane] = from[lane];
    return values;
}

/* The logits from `id` on; -INFINITY behind the last one, and for tokens that are not allowed. */
INLINE vfloat allowed_logits(const struct row *row, int64_t id) {
    const int64_t count = row->vocab - id < LANES ? row->vocab - id : LANES;
    const vfloat logits = loaded(row->logits + id, count, -INFINITY);
    if (!row->allowed) return logits;
    uint16_t bits = row->allowed[id / 8];
    if (count > 8) bits |= row->allowed[id / 8 + 1] << 8;
    vint bit_of_lane;
    for (int lane = 0; lane < LANES; lane++) bit_of_lane[lane] = 1 << lane;
    const vint flags = (bit_of_lane & (int32_t)bits) != 0;
    return (vfloat)(((vint)logits & flags) | ((vint)splat(-INFINITY) & ~flags));
}

INLINE int any_lane(vint flags) {
    int64_t halves[LANES / 2], some = 0;
    memcpy(halves, &flags, sizeof flags);
    for (int i = 0; i < LANES / 2; i++) some |= halves[i];
    return some != 0;
}

/* The random bits of the LANES tokens from `id` on. */
INLINE vuint random_bits(const struct row *row, int64_t id) {
    vuint bits;
    for (int lane = 0; lane < LANES; lane++) bits[lane] = (uint32_t)lane;
    bits = (bits + (uint32_t)id) ^ row->key[0];
    bits = (bits ^ bits >> 16) * 0x7feb352du + row->key[1];
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}

static double exponential_variate(uint32_t bits) {
    const double quantile = (bits + 0.5) / 4294967296.0;
    return -log1p(-(quantile < 0.99999994 ? quantile : 0.99999994));
}

/* Fills the weights and returns their sum. */
static double weigh(struct row *row, float temperature) {
    vfloat tops = splat(-INFINITY);
    for (int64_t id = 0; id < row->vocab; id += LANES)
        tops = larger(tops, allowed_logits(row, id));
    const float highest = largest_lane(tops);
    double mass = 0.0;
    for (int64_t from = 0; from < row->vocab; from += BATCH * LANES) {
        vfloat sums = {0};
        for (int64_t id = from; id < from + BATCH * LANES && id < row->vocab; id += LANES) {
            const vfloat weights = exponential((allowed_logits(row, id) - highest) / temperature);
            const int64_t count = row->vocab - id < LANES ? row->vocab - id : LANES;
            memcpy(row->weights + id, &weights, count * sizeof(float));
            sums += weights;
        }
        mass += sum_lanes(sums);
    }
    return mass;
}

INLINE int is_before(const struct row *row, int64_t id, int64_t other) {
    return row->logits[id] > row->logits[other] || (row->logits[id] == row->logits[other] && id < other);
}

/* The best of the tokens above the weight `many`, and before token `end` unless that is negative. -1: there is none. */
static int64_t best_token(const struct row *row, int64_t end) {
    const float least_weight = end < 0 ? 0.0f : row->weights[end];
    double best_ratio = INFINITY;
    int64_t best = -1;
    for (int64_t from = 0; from < row->vocab; from += GROUP * LANES) {
        vuint bits[GROUP];
        vint may_win[GROUP], some = {0};
        for (int part = 0; part < GROUP; part++) {
            const int64_t id = from + part * LANES;
            const vfloat weights = loaded(row->weights + id, row->vocab - id, 0.0f);
            bits[part] = random_bits(row, id);
            /* An exponential variate is at least its quantile, and this is at most its quantile. */
            const vfloat quantiles = __builtin_convertvector((vint)(bits[part] >> 8), vfloat) * 0x1p-24f;
            may_win[part] = (quantiles <= weights * (float)(best_ratio * 1.000001)) & (weights > row->many) &
                            (weights >= least_weight);
            some |= may_win[part];
        }
        if (!any_lane(some)) continue;
        for (int64_t id = from; id < from + GROUP * LANES && id < row->vocab; id++) {
            const int part = (int)(id - from) / LANES, lane = (int)(id - from) % LANES;
            if (!may_win[part][lane] || (end >= 0 && !is_before(row, id, end))) continue;
            const double ratio = exponential_variate(bits[part][lane]) / row->weights[id];
            if (ratio < best_ratio) best_ratio = ratio, best = id;
        }
    }
    return best;
}

static struct share share_above(const struct row *row, float weight) {
    struct share above = {0, 0.0};
    for (int64_t from = 0; from < row->vocab; from += BATCH * LANES) {
        vfloat sums = {0};
        vint counts = {0};
        for (int64_t id = from; id < from + BATCH * LANES && id < row->vocab; id += LANES) {
            const vfloat weights = loaded(row->weights + id, row->vocab - id, -1.0f);
            const vint taken = weights > weight;
            counts -= taken;
            sums += (vfloat)((vint)weights & taken);
        }
        for (int lane = 0; lane < LANES; lane++) above.count += counts[lane];
        above.mass += sum_lanes(sums);
    }
    return above;
}

/* The tokens before token `end`. */
static struct share share_before(const struct row *row, int64_t end) {
    const float weight = row->weights[end];
    struct share before = share_above(row, weight);
    for (int64_t id = 0; id < row->vocab; id += LANES) {
        const vint equal = loaded(row->weights + id, row->vocab - id, -1.0f) == weight;
        if (!any_lane(equal)) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (equal[lane] && is_before(row, id + lane, end)) before.count++, before.mass += weight;
    }
    return before;
}

INLINE int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Move one bound to the weight in the middle, whose logarithm is about the mean. Returns 0 if there is none between. */
static int halve(struct row *row, int64_t top_k) {
    const int32_t few = bits_of(row->few), many = bits_of(row->many); /* of positive floats: in the order of floats */
    if (few - many <= 1) return 0;
    const float middle = float_of(many + (few - many) / 2);
    const struct share above = share_above(row, middle);
    if (above.count < top_k) row->few = middle, row->above_few = above;
    else row->many = middle, row->above_many = above;
    return 1;
}

/* Whether `mass` is less than top_p of the mass of the tokens that top_k keeps. */
static int is_within(struct row *row, double mass, int64_t top_k, double top_p) {
    if (top_k <= 0) return mass < top_p * row->above_many.mass;
    for (;;) {
        const double missing = top_k - row->above_few.count; /* tokens with weights from above `many` to `few` */
        const double most = row->above_few.mass + missing * row->few, all = row->above_many.mass;
        if (mass >= top_p * (most < all ? most : all)) return 0;
        if (mass < top_p * (row->above_few.mass + missing * row->many)) return 1;
        if (!halve(row, top_k)) return mass < top_p * most;
    }
}

/* logits: [vocab]; allowed: [(vocab + 7) / 8] or NULL; temperature > 0; top_k = 0 keeps all tokens; weights: float
   [vocab] scratch. */
EXPORT int64_t tandem_draw_token(const float *logits, const uint8_t *allowed, int64_t vocab, float temperature,
                                 int64_t top_k, double top_p, double min_p, uint64_t key, float *weights) {
    struct row row = {logits, allowed, weights, vocab, {(uint32_t)key, (uint32_t)(key >> 32)},
                      1.0f, 0.0f, {0, 0.0}, {vocab, 0.0}};
    row.above_many.mass = weigh(&row, temperature);
    if (top_k >= vocab) top_k = 0;
    if (top_k > 0) {
        const struct share heavy = share_above(&row, LEAST_WEIGHT);
        if (heavy.count >= top_k) row.many = LEAST_WEIGHT, row.above_many = heavy;
        else top_k = 0; /* drops only tokens that are never drawn */
    }
    for (int64_t drawn = best_token(&row, -1), next;; drawn = next) {
        if (drawn < 0) return 0; /* a row of NaN */
        if (top_k <= 0 && top_p >= 1.0 && min_p <= 0.0) return drawn;
        const struct share before = share_before(&row, drawn);
        const int in_top_k = top_k <= 0 || before.count < top_k;
        if (in_top_k && weights[drawn] >= min_p && (top_p >= 1.0 || is_within(&row, before.mass, top_k, top_p)))
            return drawn;
        while (!in_top_k && row.above_many.count > 2 * top_k && halve(&row, top_k)) continue;
        if (before.count == 0 || (next = best_token(&row, drawn)) < 0) return drawn;
    }
}
