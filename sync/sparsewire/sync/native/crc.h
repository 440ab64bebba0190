/* The checksum of a chunk: CRC-32 as zlib computes it (reflected, polynomial 0x04C11DB7), by carry-less multiplication.
 *
 * Gopal et al. 2009, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ: four registers are folded 64 bytes
 * ahead, then into one, whose 16 bytes are divided bit by bit. Without the instruction callers use zlib itself.
 */
#ifndef SPARSEWIRE_CRC_H
#define SPARSEWIRE_CRC_H

#include "platform.h"

SW_INLINE uint32_t crc_bytes(uint32_t crc, const uint8_t *from, uint64_t size) {
    for (uint64_t i = 0; i < size; i++) {
        crc ^= from[i];
        for (uint32_t bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xEDB88320u & (0 - (crc & 1)));
    }
    return crc;
}

#if defined(__PCLMUL__)
/* `x` moved on by as many bits as `powers` stands for, onto what lies there. */
SW_INLINE __m128i crc_fold(__m128i x, __m128i onto, __m128i powers) {
    const __m128i low = _mm_clmulepi64_si128(x, powers, 0x00);
    const __m128i high = _mm_clmulepi64_si128(x, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}
#endif

/* Of `size` bytes after others whose checksum is `crc` (0 at the beginning), as zlib's crc32. */
SW_INLINE uint32_t crc32_of(uint32_t crc, const uint8_t *from, uint64_t size) {
    crc = ~crc;
#if defined(__PCLMUL__)
    if (size >= 128) {
        /* x^(512+32), x^(512-32), x^(128+32) and x^(128-32) modulo the polynomial, reflected. */
        const __m128i by_512 = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4);
        const __m128i by_128 = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
        __m128i x[4];
        for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128((const __m128i *)from + i);
        x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int32_t)crc));
        for (from += 64, size -= 64; size >= 64; from += 64, size -= 64) {
            for (int i = 0; i < 4; i++) x[i] = crc_fold(x[i], _mm_loadu_si128((const __m128i *)from + i), by_512);
        }
        for (int i = 1; i < 4; i++) x[0] = crc_fold(x[0], x[i], by_128);
        uint8_t rest[16];
        _mm_storeu_si128((__m128i *)rest, x[0]);
        crc = crc_bytes(0, rest, sizeof rest);
    }
#endif
    return ~crc_bytes(crc, from, size);
}

#endif
