/* What differs between instruction sets, so that the other files need not care: loads, bit tricks, vector words.
 *
 * kernel.c is compiled once per level. A level is named by the macros the compiler sets for its -m flags, so the same
 * source serves x86-64 from SSE2 to AVX-512 and, in its portable form, every other little-endian machine.
 */
#ifndef SPARSEWIRE_PLATFORM_H
#define SPARSEWIRE_PLATFORM_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel is written for little-endian machines; the NumPy form works everywhere"
#endif

#if defined(__AVX512VBMI2__) && defined(__AVX512VPOPCNTDQ__) && defined(__GFNI__) && defined(__BMI2__)
#define SW_AVX512 1
#elif defined(__AVX2__) && defined(__BMI2__)
#define SW_AVX2 1
#endif
#if defined(SW_AVX512) || defined(SW_AVX2)
#include <immintrin.h>
#elif defined(__SSE2__) && !defined(SW_NO_SSE2)
#include <emmintrin.h>
#define SW_SSE2 1
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SW_ADDRESS_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define SW_ADDRESS_SANITIZER 1
#endif
#if defined(SW_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

#define SW_INLINE static inline __attribute__((always_inline))
#define SW_UNLIKELY(x) __builtin_expect(!!(x), 0)

SW_INLINE uint64_t load64(const void *from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

SW_INLINE void store64(void *to, uint64_t value) { memcpy(to, &value, 8); }

/* Element `at` of an array of elements of `width` bytes; `width` is a constant wherever speed matters. */
SW_INLINE uint64_t load_element(const void *array, uint64_t at, uint32_t width) {
    const uint8_t *from = (const uint8_t *)array + at * width;
    switch (width) {
    case 1: return *from;
    case 2: { uint16_t value; memcpy(&value, from, 2); return value; }
    case 4: { uint32_t value; memcpy(&value, from, 4); return value; }
    default: return load64(from);
    }
}

SW_INLINE void store_element(void *array, uint64_t at, uint64_t element, uint32_t width) {
    uint8_t *to = (uint8_t *)array + at * width;
    switch (width) {
    case 1: *to = (uint8_t)element; break;
    case 2: { uint16_t value = (uint16_t)element; memcpy(to, &value, 2); break; }
    case 4: { uint32_t value = (uint32_t)element; memcpy(to, &value, 4); break; }
    default: store64(to, element);
    }
}

SW_INLINE uint32_t trailing_zeros(uint64_t word) { return (uint32_t)__builtin_ctzll(word); }

SW_INLINE uint32_t highest_bit(uint64_t word) { return 63 - (uint32_t)__builtin_clzll(word); }

SW_INLINE uint32_t popcount64(uint64_t word) {
#if defined(__POPCNT__) || !defined(__x86_64__)
    return (uint32_t)__builtin_popcountll(word);
#else
    word -= (word >> 1) & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + ((word >> 2) & 0x3333333333333333u);
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
    return (uint32_t)((word * 0x0101010101010101u) >> 56);
#endif
}

/* The `count` lowest bits of a word; count is at most 63. */
SW_INLINE uint64_t low_bits(uint64_t word, uint32_t count) {
#if defined(__BMI2__)
    return _bzhi_u64(word, count);
#else
    return word & ((UINT64_C(1) << count) - 1);
#endif
}

/* The place of the set bit number `number`, from 0, of a word that has more than that. */
SW_INLINE uint32_t select64(uint64_t word, uint32_t number) {
#if defined(__BMI2__)
    return trailing_zeros(_pdep_u64(UINT64_C(1) << number, word));
#else
    /* Vigna 2008, Broadword implementation of rank/select queries: running counts by byte find the byte, then the bit. */
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = UINT64_C(0x8080808080808080);
    uint64_t counts = word - ((word >> 1) & 0x5555555555555555u);
    counts = (counts & 0x3333333333333333u) + ((counts >> 2) & 0x3333333333333333u);
    counts = ((counts + (counts >> 4)) & 0x0F0F0F0F0F0F0F0Fu) * ones;
    const uint32_t byte = (uint32_t)(((((number * ones | tops) - counts) & tops) >> 7) * ones >> 56) * 8;
    const uint32_t rest = number - (uint32_t)((counts << 8) >> byte & 0xFF);
    /* Bit i of the byte to byte i: any bit, then one, then counted as before. */
    uint64_t bits = ((word >> byte & 0xFF) * ones) & UINT64_C(0x8040201008040201);
    bits = ((((bits | tops) - ones) | bits) & tops) >> 7;
    counts = bits * ones;
    return byte + (uint32_t)(((((rest * ones | tops) - counts) & tops) >> 7) * ones >> 56);
#endif
}

#endif
