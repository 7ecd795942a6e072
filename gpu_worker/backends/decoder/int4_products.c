/* Products of float32 rows with 4-bit weights in blocks of Q4_1: 32 weights are scale * q + offset, q from 0 to 15.
 *
 * As llama.cpp does it, the rows are rounded to int8 with a scale for each group of 32, so that products are sums of small
 * integers; what the offsets add is the exact sum of the group. A row's result does not depend on the rows beside it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define GROUP 32
#define BLOCK 20
#define TILE 4
#define INLINE static inline __attribute__((always_inline))

/* x: (count, groups * 32) -> rounded: the same shape, scales and sums: (count, groups). */
void int4_rounded(
    const float *restrict x, int64_t count, int64_t groups, int8_t *restrict rounded, float *restrict scales,
    float *restrict sums) {
    for (int64_t g = 0; g < count * groups; g++) {
        const float *from = x + g * GROUP;
        float largest = 0.0f, sum = 0.0f;
        for (int i = 0; i < GROUP; i++) {
            const float size = fabsf(from[i]);
            largest = size > largest ? size : largest;
            sum += from[i];
        }
        const float back = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (int i = 0; i < GROUP; i++)
            rounded[g * GROUP + i] = (int8_t)lrintf(from[i] * back);
        scales[g] = largest / 127.0f;
        sums[g] = sum;
    }
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

INLINE void tile(
    float *restrict out, const uint8_t *restrict weights, const int8_t *restrict rounded, const float *restrict scales,
    const float *restrict sums, int64_t groups, int64_t outs, int count) {
    const __m128i low = _mm_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 total[TILE];
    float added[TILE];
    for (int r = 0; r < count; r++) {
        total[r] = _mm256_setzero_ps();
        added[r] = 0.0f;
    }
    for (int64_t g = 0; g < groups; g++, weights += BLOCK) {
        int32_t ends;
        memcpy(&ends, weights, 4);
        const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(ends));
        const float scale = _mm_cvtss_f32(both), offset = _mm_cvtss_f32(_mm_movehdup_ps(both));
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(weights + 4));
        const __m256i q =
            _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), _mm_and_si128(bytes, low));
        for (int r = 0; r < count; r++) {
            const int64_t at = r * groups + g;
            const __m256i row = _mm256_loadu_si256((const __m256i *)(rounded + at * GROUP));
            const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(q, row), ones);
            total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(scale * scales[at]), total[r]);
            added[r] += offset * sums[at];
        }
    }
    for (int r = 0; r < count; r++) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(total[r]), _mm256_extractf128_ps(total[r], 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        out[r * outs] = _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half))) + added[r];
    }
}
#else
static float half_to_float(const uint8_t *from) {
    const uint32_t half = from[0] | (uint32_t)from[1] << 8, exponent = half >> 10 & 31, fraction = half & 1023;
    const float size = exponent == 0 ? ldexpf((float)fraction, -24) : ldexpf((float)(fraction | 1024), (int)exponent - 25);
    return half >> 15 ? -size : size;
}

INLINE void tile(
    float *restrict out, const uint8_t *restrict weights, const int8_t *restrict rounded, const float *restrict scales,
    const float *restrict sums, int64_t groups, int64_t outs, int count) {
    float total[TILE] = {0.0f};
    for (int64_t g = 0; g < groups; g++, weights += BLOCK) {
        const float scale = half_to_float(weights), offset = half_to_float(weights + 2);
        for (int r = 0; r < count; r++) {
            const int64_t at = r * groups + g;
            const int8_t *row = rounded + at * GROUP;
            int32_t products = 0;
            for (int i = 0; i < GROUP / 2; i++)
                products += (weights[4 + i] & 15) * row[i] + (weights[4 + i] >> 4) * row[i + GROUP / 2];
            total[r] += scale * scales[at] * (float)products + offset * sums[at];
        }
    }
    for (int r = 0; r < count; r++)
        out[r * outs] = total[r];
}
#endif

/* out: (count, outs); weights: (outs, groups) blocks. Columns first to last-1 of out are written. */
void int4_products(
    float *out, const uint8_t *weights, const int8_t *rounded, const float *scales, const float *sums, int64_t count,
    int64_t groups, int64_t outs, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) {
        const uint8_t *row = weights + n * groups * BLOCK;
        int64_t r = 0;
        for (; r + TILE <= count; r += TILE)
            tile(out + r * outs + n, row, rounded + r * groups * GROUP, scales + r * groups, sums + r * groups, groups,
                 outs, TILE);
        for (; r < count; r++)
            tile(out + r * outs + n, row, rounded + r * groups * GROUP, scales + r * groups, sums + r * groups, groups,
                 outs, 1);
    }
}
