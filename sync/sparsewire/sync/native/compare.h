/* Which elements of a word of 64 differ between two arrays. */
#ifndef SPARSEWIRE_COMPARE_H
#define SPARSEWIRE_COMPARE_H

#include "abi.h"
#include "platform.h"

/* How far ahead of the word in hand memory is asked for: within a page, so that no translation is missed early. */
enum { SW_AHEAD_BYTES = 2048 };

#if defined(SW_AVX512)
SW_INLINE uint64_t changed_in_word(const uint8_t *old, const uint8_t *new_, uint32_t width) {
    uint64_t changed = 0;
    for (uint32_t part = 0; part < width; part++) {
        const __m512i x = _mm512_loadu_si512(old + 64 * part);
        const __m512i y = _mm512_loadu_si512(new_ + 64 * part);
        switch (width) {
        case 1: changed = _mm512_cmpneq_epi8_mask(x, y); break;
        case 2: changed |= (uint64_t)_mm512_cmpneq_epi16_mask(x, y) << (32 * part); break;
        case 4: changed |= (uint64_t)_mm512_cmpneq_epi32_mask(x, y) << (16 * part); break;
        default: changed |= (uint64_t)_mm512_cmpneq_epi64_mask(x, y) << (8 * part);
        }
    }
    return changed;
}
#elif defined(SW_AVX2)
SW_INLINE uint32_t changed_in_half(const uint8_t *old, const uint8_t *new_, uint32_t width) {
    const __m256i *x = (const __m256i *)old;
    const __m256i *y = (const __m256i *)new_;
    switch (width) {
    case 1: return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(x), _mm256_loadu_si256(y)));
    case 2: {
        const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
        const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
        return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8));
    }
    case 4: {
        uint32_t same = 0;
        for (int i = 0; i < 4; i++) {
            const __m256i equal = _mm256_cmpeq_epi32(_mm256_loadu_si256(x + i), _mm256_loadu_si256(y + i));
            same |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(equal)) << (8 * i);
        }
        return ~same;
    }
    default: {
        uint32_t same = 0;
        for (int i = 0; i < 8; i++) {
            const __m256i equal = _mm256_cmpeq_epi64(_mm256_loadu_si256(x + i), _mm256_loadu_si256(y + i));
            same |= (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(equal)) << (4 * i);
        }
        return ~same;
    }
    }
}

SW_INLINE uint64_t changed_in_word(const uint8_t *old, const uint8_t *new_, uint32_t width) {
    return changed_in_half(old, new_, width) |
           (uint64_t)changed_in_half(old + 32 * width, new_ + 32 * width, width) << 32;
}
#else
/* Eight elements at a time: most groups are equal, and are left at one comparison of their bytes. */
SW_INLINE uint64_t changed_in_groups(const uint8_t *old, const uint8_t *new_, uint32_t width) {
    uint64_t changed = 0;
    for (uint32_t part = 0; part < 8; part++) {
        const uint8_t *x = old + 8 * width * part;
        const uint8_t *y = new_ + 8 * width * part;
        uint64_t differ = 0;
        for (uint32_t i = 0; i < width; i++) differ |= load64(x + 8 * i) ^ load64(y + 8 * i);
        if (!differ) continue;
        for (uint32_t i = 0; i < 8; i++) {
            changed |= (uint64_t)(load_element(x, i, width) != load_element(y, i, width)) << (8 * part + i);
        }
    }
    return changed;
}

#if defined(SW_SSE2)
SW_INLINE __m128i equal16(const uint8_t *x, const uint8_t *y, uint32_t width) {
    const __m128i a = _mm_loadu_si128((const __m128i *)x);
    const __m128i b = _mm_loadu_si128((const __m128i *)y);
    return width == 1 ? _mm_cmpeq_epi8(a, b) : width == 2 ? _mm_cmpeq_epi16(a, b) : _mm_cmpeq_epi32(a, b);
}

SW_INLINE uint64_t changed_in_word(const uint8_t *old, const uint8_t *new_, uint32_t width) {
    uint64_t same = 0;
    if (width == 8) return changed_in_groups(old, new_, width);
    for (uint32_t part = 0; part < 4; part++) {
        const uint8_t *x = old + 16 * width * part;
        const uint8_t *y = new_ + 16 * width * part;
        __m128i bytes;
        switch (width) {
        case 1: bytes = equal16(x, y, 1); break;
        case 2: bytes = _mm_packs_epi16(equal16(x, y, 2), equal16(x + 16, y + 16, 2)); break;
        default:
            bytes = _mm_packs_epi16(_mm_packs_epi32(equal16(x, y, 4), equal16(x + 16, y + 16, 4)),
                                    _mm_packs_epi32(equal16(x + 32, y + 32, 4), equal16(x + 48, y + 48, 4)));
        }
        same |= (uint64_t)(uint32_t)_mm_movemask_epi8(bytes) << (16 * part);
    }
    return ~same;
}
#else
SW_INLINE uint64_t changed_in_word(const uint8_t *old, const uint8_t *new_, uint32_t width) {
    return changed_in_groups(old, new_, width);
}
#endif
#endif

/* Asks for the memory that comes a while after this word: computing and loading then overlap. */
SW_INLINE void prefetch_word(const uint8_t *from, uint32_t width) {
    for (uint32_t line = 0; line < width; line++) __builtin_prefetch(from + SW_AHEAD_BYTES + 64 * line);
}

#endif
