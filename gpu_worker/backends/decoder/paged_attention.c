/* Attention of one new token of each of n sequences over their pages: float32, no copy of keys and values.
 *
 * Plain loops that a compiler turns into vector code; for the usual head widths it knows how long they are. Scores of
 * one sequence and KV head are kept in `scratch` (group * longest floats), softmax is the usual stable one, and the
 * query heads of a group share each key and value while it is in the cache.
 */
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

struct layer {
    const float *keys, *values; /* the layer's first element in page 0; a page holds (block, kv_heads, width) */
    const int64_t *table;       /* (n, pages) */
    const int64_t *lengths;     /* (n) */
    int64_t pages, block, page_stride, kv_heads, group, width, window, longest;
    float scale, cap;
};

/* Scores within (-cap, cap), smoothly. */
static void bend(float *scores, int64_t from, int64_t to, float cap) {
    for (int64_t t = from; t < to; t++)
        scores[t] = cap * tanhf(scores[t] / cap);
}

static void soften(float *scores, int64_t from, int64_t to) {
    float largest = scores[from], sum = 0.0f;
    for (int64_t t = from + 1; t < to; t++)
        largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = from; t < to; t++) {
        scores[t] = expf(scores[t] - largest);
        sum += scores[t];
    }
    const float share = 1.0f / sum;
    for (int64_t t = from; t < to; t++)
        scores[t] *= share;
}

INLINE void attend(
    float *restrict out, const float *restrict queries, const struct layer *at, int64_t first, int64_t last,
    int64_t width, float *restrict scratch) {
    const int64_t group = at->group, block = at->block, longest = at->longest, row = at->kv_heads * width;
    for (int64_t s = first; s < last; s++) {
        const int64_t to = at->lengths[s];
        const int64_t from = at->window > 0 && to > at->window ? to - at->window : 0;
        const int64_t *table = at->table + s * at->pages;
        for (int64_t h = 0; h < at->kv_heads; h++) {
            const float *asked = queries + (s * at->kv_heads + h) * group * width;
            float *answer = out + (s * at->kv_heads + h) * group * width;
            for (int64_t page = from / block; page * block < to; page++) {
                const float *key = at->keys + table[page] * at->page_stride + h * width;
                const int64_t start = page * block > from ? page * block : from;
                const int64_t end = (page + 1) * block < to ? (page + 1) * block : to;
                for (int64_t t = start; t < end; t++)
                    for (int64_t g = 0; g < group; g++) {
                        float sum = 0.0f;
                        for (int64_t i = 0; i < width; i++)
                            sum += asked[g * width + i] * key[(t - page * block) * row + i];
                        scratch[g * longest + t] = at->scale * sum;
                    }
            }
            for (int64_t g = 0; g < group && at->cap > 0.0f; g++)
                bend(scratch + g * longest, from, to, at->cap);
            for (int64_t g = 0; g < group; g++)
                soften(scratch + g * longest, from, to);
            for (int64_t g = 0; g < group; g++) {
                float told[width];
                for (int64_t i = 0; i < width; i++)
                    told[i] = 0.0f;
                for (int64_t page = from / block; page * block < to; page++) {
                    const float *value = at->values + table[page] * at->page_stride + h * width;
                    const int64_t start = page * block > from ? page * block : from;
                    const int64_t end = (page + 1) * block < to ? (page + 1) * block : to;
                    for (int64_t t = start; t < end; t++) {
                        const float share = scratch[g * longest + t];
                        for (int64_t i = 0; i < width; i++)
                            told[i] += share * value[(t - page * block) * row + i];
                    }
                }
                for (int64_t i = 0; i < width; i++)
                    answer[g * width + i] = told[i];
            }
        }
    }
}

/* queries, out: (n, kv_heads, group, width); sequences first..last-1 of them. window 0: all tokens are seen. cap 0: scores as
 * they are. */
void paged_attention(
    float *out, const float *queries, const float *keys, const float *values, const int64_t *table,
    const int64_t *lengths, int64_t first, int64_t last, int64_t pages, int64_t block, int64_t page_stride,
    int64_t kv_heads, int64_t group, int64_t width, int64_t window, int64_t longest, float scale, float cap,
    float *scratch) {
    const struct layer at = {keys,  values, table, lengths, pages,   block, page_stride, kv_heads,
                             group, width,  window, longest, scale, cap};
    if (width == 64)
        attend(out, queries, &at, first, last, 64, scratch);
    else if (width == 128)
        attend(out, queries, &at, first, last, 128, scratch);
    else
        attend(out, queries, &at, first, last, width, scratch);
}
