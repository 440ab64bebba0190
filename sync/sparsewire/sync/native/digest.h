/* The two 64-bit mixes of docs/format.md, "Digests", summed over ranges, over positions, and over changes.
 *
 * One vector of keys gives one vector of terms; sums wrap modulo 2^64, so lanes may be added in any order.
 */
#ifndef SPARSEWIRE_DIGEST_H
#define SPARSEWIRE_DIGEST_H

#include "abi.h"
#include "platform.h"

#define INDEX_FACTOR UINT64_C(0x9E3779B97F4A7C15)
#define OFFSET_B UINT64_C(0x632BE59BD9B4E019)
#define FACTOR_A1 UINT64_C(0xFF51AFD7ED558CCD)
#define FACTOR_A2 UINT64_C(0xC4CEB9FE1A85EC53)
#define FACTOR_B1 UINT64_C(0xBF58476D1CE4E5B9)
#define FACTOR_B2 UINT64_C(0x94D049BB133111EB)

struct sums { uint64_t a, b; };

SW_INLINE uint64_t mix_a(uint64_t key) {
    key ^= key >> 33; key *= FACTOR_A1;
    key ^= key >> 33; key *= FACTOR_A2;
    return key ^ (key >> 33);
}

SW_INLINE uint64_t mix_b(uint64_t key) {
    key += OFFSET_B;
    key ^= key >> 30; key *= FACTOR_B1;
    key ^= key >> 27; key *= FACTOR_B2;
    return key ^ (key >> 31);
}

#if defined(SW_AVX512)
#define SW_LANES 8
typedef __m512i lanes;
#define lanes_set1(x) _mm512_set1_epi64((int64_t)(x))
#define lanes_add _mm512_add_epi64
#define lanes_sub _mm512_sub_epi64
#define lanes_xor _mm512_xor_si512
#define lanes_srl _mm512_srli_epi64
#define lanes_load(p) _mm512_loadu_si512(p)
#define lanes_store(p, x) _mm512_storeu_si512(p, x)
#define lanes_mul(x, factor) _mm512_mullo_epi64(x, lanes_set1(factor))

SW_INLINE lanes lanes_load_elements(const void *array, uint64_t at, uint32_t width) {
    const uint8_t *from = (const uint8_t *)array + at * width;
    switch (width) {
    case 1: return _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)from));
    case 2: return _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)from));
    case 4: return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)from));
    default: return _mm512_loadu_si512(from);
    }
}

SW_INLINE lanes lanes_load_u32(const uint32_t *from) {
    return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)from));
}
#elif defined(SW_AVX2)
#define SW_LANES 4
typedef __m256i lanes;
#define lanes_set1(x) _mm256_set1_epi64x((int64_t)(x))
#define lanes_add _mm256_add_epi64
#define lanes_sub _mm256_sub_epi64
#define lanes_xor _mm256_xor_si256
#define lanes_srl _mm256_srli_epi64
#define lanes_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define lanes_store(p, x) _mm256_storeu_si256((__m256i *)(p), x)

/* AVX2 has no 64-bit multiply: low halves give the whole product, the crossed ones its upper half. */
SW_INLINE lanes lanes_mul(lanes x, uint64_t factor) {
    const lanes low = lanes_set1(factor & 0xFFFFFFFFu);
    const lanes high = lanes_set1(factor >> 32);
    const lanes crossed = lanes_add(_mm256_mul_epu32(lanes_srl(x, 32), low), _mm256_mul_epu32(x, high));
    return lanes_add(_mm256_mul_epu32(x, low), _mm256_slli_epi64(crossed, 32));
}

SW_INLINE lanes lanes_load_elements(const void *array, uint64_t at, uint32_t width) {
    const uint8_t *from = (const uint8_t *)array + at * width;
    switch (width) {
    case 1: { int32_t four; memcpy(&four, from, 4); return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)); }
    case 2: return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)from));
    case 4: return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)from));
    default: return lanes_load(from);
    }
}

SW_INLINE lanes lanes_load_u32(const uint32_t *from) {
    return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)from));
}
#endif

#if defined(SW_LANES)
SW_INLINE lanes lanes_mix_a(lanes key) {
    key = lanes_mul(lanes_xor(key, lanes_srl(key, 33)), FACTOR_A1);
    key = lanes_mul(lanes_xor(key, lanes_srl(key, 33)), FACTOR_A2);
    return lanes_xor(key, lanes_srl(key, 33));
}

SW_INLINE lanes lanes_mix_b(lanes key) {
    key = lanes_add(key, lanes_set1(OFFSET_B));
    key = lanes_mul(lanes_xor(key, lanes_srl(key, 30)), FACTOR_B1);
    key = lanes_mul(lanes_xor(key, lanes_srl(key, 27)), FACTOR_B2);
    return lanes_xor(key, lanes_srl(key, 31));
}

SW_INLINE uint64_t lanes_total(lanes x) {
    uint64_t parts[SW_LANES];
    uint64_t total = 0;
    lanes_store(parts, x);
    for (int lane = 0; lane < SW_LANES; lane++) total += parts[lane];
    return total;
}
#endif

/* Digest of `count` elements, the first of which has flat position `start`. */
SW_INLINE struct sums digest_range(const void *bits, uint64_t count, uint64_t start, uint32_t width) {
    struct sums total = {0, 0};
    uint64_t at = 0;
    uint64_t key = start * INDEX_FACTOR;
#if defined(SW_LANES)
    uint64_t ramp[SW_LANES];
    for (uint64_t lane = 0; lane < SW_LANES; lane++) ramp[lane] = key + lane * INDEX_FACTOR;
    lanes origin = lanes_load(ramp);
    lanes a = lanes_set1(0), b = lanes_set1(0);
    for (; at + SW_LANES <= count; at += SW_LANES) {
        const lanes keys = lanes_add(origin, lanes_load_elements(bits, at, width));
        a = lanes_add(a, lanes_mix_a(keys));
        b = lanes_add(b, lanes_mix_b(keys));
        origin = lanes_add(origin, lanes_set1(SW_LANES * INDEX_FACTOR));
    }
    total.a = lanes_total(a);
    total.b = lanes_total(b);
    key += at * INDEX_FACTOR;
#endif
    for (; at < count; at++, key += INDEX_FACTOR) {
        const uint64_t mixed = key + load_element(bits, at, width);
        total.a += mix_a(mixed);
        total.b += mix_b(mixed);
    }
    return total;
}

/* Digest of `count` elements at flat positions `indices`, less that of `old` at the same ones unless it is NULL. */
SW_INLINE struct sums digest_positions(const int64_t *indices, const void *old, const void *bits, uint64_t count,
                                       uint32_t width) {
    struct sums total = {0, 0};
    uint64_t at = 0;
#if defined(SW_LANES)
    lanes a = lanes_set1(0), b = lanes_set1(0);
    for (; at + SW_LANES <= count; at += SW_LANES) {
        const lanes origin = lanes_mul(lanes_load(indices + at), INDEX_FACTOR);
        const lanes keys = lanes_add(origin, lanes_load_elements(bits, at, width));
        a = lanes_add(a, lanes_mix_a(keys));
        b = lanes_add(b, lanes_mix_b(keys));
        if (old) {
            const lanes before = lanes_add(origin, lanes_load_elements(old, at, width));
            a = lanes_sub(a, lanes_mix_a(before));
            b = lanes_sub(b, lanes_mix_b(before));
        }
    }
    total.a = lanes_total(a);
    total.b = lanes_total(b);
#endif
    for (; at < count; at++) {
        const uint64_t origin = (uint64_t)indices[at] * INDEX_FACTOR;
        const uint64_t key = origin + load_element(bits, at, width);
        total.a += mix_a(key);
        total.b += mix_b(key);
        if (old) {
            const uint64_t before = origin + load_element(old, at, width);
            total.a -= mix_a(before);
            total.b -= mix_b(before);
        }
    }
    return total;
}

#endif
