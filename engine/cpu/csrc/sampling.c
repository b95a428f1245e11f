/* One draw from a row of logits: softmax at a temperature, top_k, top_p, min_p, inverse CDF from the likeliest down.

   Every filter keeps the likeliest tokens up to some place in descending order. Finding a place does not sort the
   vocabulary: tokens are put into buckets of nearly equal logits, a walk skips whole buckets by their counts and
   masses, and only the bucket in which the walk ends is sorted. */
#include <stdlib.h>

#include "vectors.h"

#define BUCKETS_PER_NAT 64
#define LIKELY (-9.0f) /* nats below the highest logit; less likely tokens get buckets only if a walk needs them */
#define BLOCK (4 * LANES)
#define NUM_BUCKETS (32 * BUCKETS_PER_NAT) /* the last bucket also holds tokens below e^-32 of the likeliest */

struct token {
    float logit; /* scaled, relative to the highest */
    int32_t id;
};

struct row {
    int64_t vocab;
    float *logits, *weights; /* [vocab + BLOCK], logits scaled and relative to the highest; weights = exp(logits) */
    int32_t *next;           /* [vocab], linked list: the token added before to the same bucket */
    struct token *tokens;    /* [vocab], scratch for sorting a bucket */
    double masses[NUM_BUCKETS];
    int32_t counts[NUM_BUCKETS], last[NUM_BUCKETS];
};

struct place {
    int64_t count; /* of tokens up to and including this place */
    double mass;   /* of these tokens */
    int32_t id;
    int found; /* 0: the buckets hold too few tokens; this is the last one */
};

INLINE int bucket_of(float logit) {
    const float bucket = -logit * BUCKETS_PER_NAT;
    return bucket < NUM_BUCKETS - 1 ? (int)bucket : NUM_BUCKETS - 1;
}

static int likelier_first(const void *left, const void *right) {
    const struct token *a = left, *b = right;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

static void sort_bucket(const struct row *row, int bucket) {
    int32_t id = row->last[bucket];
    for (int32_t i = 0; i < row->counts[bucket]; i++, id = row->next[id])
        row->tokens[i] = (struct token){row->logits[id], id};
    qsort(row->tokens, row->counts[bucket], sizeof(struct token), likelier_first);
}

/* The first place in descending order that has `count` tokens, or more than `mass` (at least `mass`, if `reaches`), or
   after which the next token is lighter than `lightest`. */
static struct place walk(const struct row *row, int64_t count, double mass, int reaches, double lightest) {
    struct place at = {0, 0.0, 0, 1};
    for (int bucket = 0; bucket < NUM_BUCKETS; bucket++) {
        const int32_t here = row->counts[bucket];
        /* Compares the bucket's lower bound of weights, reduced a little because weights are rounded. */
        const int all_heavy = lightest <= 0.0 || exp(-(bucket + 1.0) / BUCKETS_PER_NAT) * 0.9999 >= lightest;
        const double mass_after = at.mass + row->masses[bucket];
        if (here == 0) continue;
        if (at.count + here < count && mass_after * (1.0 + 1e-12) < mass && all_heavy && bucket < NUM_BUCKETS - 1) {
            at.count += here, at.mass = mass_after;
            continue;
        }
        sort_bucket(row, bucket);
        for (int32_t i = 0; i < here; i++) {
            const struct token token = row->tokens[i];
            const double weight = row->weights[token.id];
            if (at.count > 0 && (weight < lightest || weight == 0.0)) return at;
            at = (struct place){at.count + 1, at.mass + weight, token.id, 1};
            if (at.count >= count || (reaches ? at.mass >= mass : at.mass > mass)) return at;
        }
    }
    at.found = 0;
    return at;
}

INLINE float highest(const float *logits, int64_t vocab) {
    vfloat tops = splat(-INFINITY);
    int64_t id = 0;
    for (; id + LANES <= vocab; id += LANES) tops = larger(tops, load_floats(logits + id));
    float top = largest_lane(tops);
    for (; id < vocab; id++) top = logits[id] > top ? logits[id] : top;
    return top;
}

/* Computes the weights of BLOCK logits, and puts those of the first `count` that reach the cutoff into buckets. The
   first logit is token `from`. Returns the sum of the weights. */
INLINE double weigh_block(struct row *row, const float *logits, int64_t from, int count, float temperature, float top,
                          float cutoff) {
    float *scaled = row->logits + from, *weights = row->weights + from;
    vfloat tops = splat(-INFINITY), sums = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        const vfloat relative = load_floats(logits + i) / temperature - top, weighed = exponential(relative);
        store_floats(scaled + i, relative);
        store_floats(weights + i, weighed);
        tops = larger(tops, relative);
        sums += weighed;
    }
    for (int i = largest_lane(tops) < cutoff ? count : 0; i < count; i++) {
        if (scaled[i] < cutoff) continue;
        const int bucket = bucket_of(scaled[i]);
        row->next[from + i] = row->last[bucket];
        row->last[bucket] = (int32_t)(from + i);
        row->counts[bucket]++;
        row->masses[bucket] += weights[i];
    }
    return sum_lanes(sums);
}

/* Fills the row and returns the mass of all tokens. Tokens below the cutoff are in no bucket. */
static double weigh(struct row *row, const float *logits, float temperature, float cutoff) {
    const float top = highest(logits, row->vocab) / temperature;
    memset(row->masses, 0, sizeof row->masses);
    memset(row->counts, 0, sizeof row->counts);
    double total = 0.0;
    int64_t from = 0;
    for (; from + BLOCK <= row->vocab; from += BLOCK)
        total += weigh_block(row, logits + from, from, BLOCK, temperature, top, cutoff);
    float rest[BLOCK];
    for (int i = 0; i < BLOCK; i++) rest[i] = from + i < row->vocab ? logits[from + i] : -INFINITY;
    return total + weigh_block(row, rest, from, (int)(row->vocab - from), temperature, top, cutoff);
}

/* Bytes of scratch for one draw. */
EXPORT int64_t tandem_draw_scratch_bytes(int64_t vocab) {
    const int64_t per_token = 2 * sizeof(float) + sizeof(int32_t) + sizeof(struct token);
    return (int64_t)sizeof(struct row) + (vocab + BLOCK) * per_token;
}

/* The token at quantile `draw` in [0, 1) of the filtered distribution. logits: [vocab]; temperature > 0; top_k = 0
   keeps all tokens. */
EXPORT int64_t tandem_draw_token(const float *logits, int64_t vocab, float temperature, int64_t top_k, double top_p,
                                 double min_p, double draw, void *scratch) {
    struct row *row = scratch;
    row->vocab = vocab;
    row->tokens = (struct token *)(row + 1);
    row->logits = (float *)(row->tokens + vocab);
    row->weights = row->logits + vocab + BLOCK;
    row->next = (int32_t *)(row->weights + vocab + BLOCK);
    for (float cutoff = LIKELY;; cutoff = -INFINITY) {
        struct place kept = {vocab, weigh(row, logits, temperature, cutoff), 0, 1}, drawn = kept;
        if (top_k > 0 && top_k < vocab) kept = walk(row, top_k, INFINITY, 1, 0.0);
        if (kept.found && (top_p < 1.0 || min_p > 0.0))
            kept = walk(row, kept.count, top_p < 1.0 ? top_p * kept.mass : INFINITY, 1, min_p);
        if (kept.found) drawn = walk(row, kept.count, draw * kept.mass, 0, 0.0);
        if ((kept.found && drawn.found) || cutoff == -INFINITY) return drawn.id;
    }
}
