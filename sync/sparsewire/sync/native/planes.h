/* Byte planes of the dense body, docs/format.md, "Dense body": split and joined in one pass with the digest.
 *
 * Work goes in blocks that stay in the level-1 cache: one loop turns a block, which compilers make vectors of, and the
 * digest then reads it from there.
 */
#ifndef SPARSEWIRE_PLANES_H
#define SPARSEWIRE_PLANES_H

#include "abi.h"
#include "digest.h"
#include "platform.h"

enum { SW_PLANE_BLOCK = 512 };

SW_INLINE void split_block(const uint8_t *restrict bits, uint64_t size, uint8_t *const *planes, uint64_t at,
                           uint32_t width) {
    const uint32_t top = 8 * width - 1;
    switch (width) {
    case 2: {
        uint8_t *restrict low = planes[0] + at, *restrict high = planes[1] + at;
        for (uint64_t i = 0; i < size; i++) {
            const uint16_t element = (uint16_t)load_element(bits, i, 2);
            const uint16_t turned = (uint16_t)(element << 1 | element >> 15);
            low[i] = (uint8_t)turned;
            high[i] = (uint8_t)(turned >> 8);
        }
        break;
    }
    case 4: {
        uint8_t *restrict p0 = planes[0] + at, *restrict p1 = planes[1] + at, *restrict p2 = planes[2] + at,
                         *restrict p3 = planes[3] + at;
        for (uint64_t i = 0; i < size; i++) {
            const uint32_t element = (uint32_t)load_element(bits, i, 4);
            const uint32_t turned = element << 1 | element >> 31;
            p0[i] = (uint8_t)turned;
            p1[i] = (uint8_t)(turned >> 8);
            p2[i] = (uint8_t)(turned >> 16);
            p3[i] = (uint8_t)(turned >> 24);
        }
        break;
    }
    default:
        for (uint32_t plane = 0; plane < width; plane++) {
            uint8_t *restrict to = planes[plane] + at;
            for (uint64_t i = 0; i < size; i++) {
                const uint64_t element = load_element(bits, i, width);
                to[i] = (uint8_t)((element << 1 | element >> top) >> 8 * plane);
            }
        }
    }
}

SW_INLINE void join_block(uint8_t *restrict bits, uint64_t size, const uint8_t *const *planes, uint64_t at,
                          uint32_t width) {
    switch (width) {
    case 2: {
        const uint8_t *restrict low = planes[0] + at, *restrict high = planes[1] + at;
        for (uint64_t i = 0; i < size; i++) {
            const uint16_t turned = (uint16_t)(low[i] | high[i] << 8);
            store_element(bits, i, (uint16_t)(turned >> 1 | turned << 15), 2);
        }
        break;
    }
    case 4: {
        const uint8_t *restrict p0 = planes[0] + at, *restrict p1 = planes[1] + at, *restrict p2 = planes[2] + at,
                               *restrict p3 = planes[3] + at;
        for (uint64_t i = 0; i < size; i++) {
            const uint32_t turned = p0[i] | (uint32_t)p1[i] << 8 | (uint32_t)p2[i] << 16 | (uint32_t)p3[i] << 24;
            store_element(bits, i, turned >> 1 | turned << 31, 4);
        }
        break;
    }
    default:
        for (uint64_t i = 0; i < size; i++) {
            uint64_t turned = 0;
            for (uint32_t plane = 0; plane < 8; plane++) turned |= (uint64_t)planes[plane][at + i] << 8 * plane;
            store_element(bits, i, turned >> 1 | turned << 63, 8);
        }
    }
}

/* Elements of a segment in the block at `at`; adds the block's digest to the segment's. */
SW_INLINE void digest_block(const uint8_t *bits, uint64_t size, uint64_t start, uint64_t *a, uint64_t *b, uint32_t width) {
    const struct sums sums = digest_range(bits, size, start, width);
    *a += sums.a;
    *b += sums.b;
}

/* Both directions: the new bits of segments, end to end, to or from one plane for each byte of an element. */
SW_INLINE int64_t turn_segments(uint64_t num_segments, uint64_t *table, uint8_t *const *planes, int joining,
                                uint32_t width) {
    uint64_t at = 0;
    for (uint64_t number = 0; number < num_segments; number++) {
        uint8_t *bits = (uint8_t *)(uintptr_t)table[SW_NEW * num_segments + number];
        const uint64_t count = table[SW_COUNT * num_segments + number];
        const uint64_t start = table[SW_START * num_segments + number];
        uint64_t a = 0, b = 0;
        for (uint64_t done = 0; done < count; done += SW_PLANE_BLOCK, bits += SW_PLANE_BLOCK * width) {
            const uint64_t size = count - done < SW_PLANE_BLOCK ? count - done : SW_PLANE_BLOCK;
            if (joining) {
                join_block(bits, size, (const uint8_t *const *)planes, at + done, width);
            } else {
                split_block(bits, size, planes, at + done, width);
            }
            digest_block(bits, size, start + done, &a, &b, width);
        }
        table[SW_DIGEST_A * num_segments + number] = a;
        table[SW_DIGEST_B * num_segments + number] = b;
        at += count;
    }
    return 0;
}

#endif
