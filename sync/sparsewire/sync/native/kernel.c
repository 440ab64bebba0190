/* The kernel at one instruction set: every function of abi.h with the level's name as suffix.
 *
 * The build compiles this file once per level with -DLEVEL=name and the level's -m flags; dispatch.c chooses. Each
 * function is compiled once per element width, so that the loops know it.
 */
#include "abi.h"
#include "crc.h"
#include "decode.h"
#include "digest.h"
#include "encode.h"
#include "planes.h"
#include "platform.h"
#include "sample.h"

#define SW_JOIN_(a, b) a##_##b
#define SW_JOIN(a, b) SW_JOIN_(a, b)
#define SW_NAME(name) SW_JOIN(name, LEVEL)

/* Evaluates `call` with `w` bound to a constant width; other widths give SW_UNSUPPORTED. */
#define SW_BY_WIDTH(width, call)                       \
    switch (width) {                                   \
    case 1: { enum { w = 1 }; return call; }           \
    case 2: { enum { w = 2 }; return call; }           \
    case 4: { enum { w = 4 }; return call; }           \
    case 8: { enum { w = 8 }; return call; }           \
    default: return SW_UNSUPPORTED;                    \
    }

int64_t SW_NAME(encode)(struct sparsewire_encode *job) { SW_BY_WIDTH(job->width, encode_segments(job, w)) }

int64_t SW_NAME(decode)(struct sparsewire_decode *job) { SW_BY_WIDTH(job->width, decode_segments(job, w)) }

int64_t SW_NAME(sample)(uint32_t width, uint64_t num_segments, uint64_t *table, uint64_t *elements, uint64_t *counts) {
    const struct segments segments = {num_segments, table};
    SW_BY_WIDTH(width, sample_segments(&segments, elements, counts, w))
}

SW_INLINE int64_t store_sums(struct sums sums, uint64_t *digest) {
    digest[0] = sums.a;
    digest[1] = sums.b;
    return 0;
}

int64_t SW_NAME(digest_range)(uint32_t width, const void *bits, uint64_t count, uint64_t start, uint64_t *digest) {
    SW_BY_WIDTH(width, store_sums(digest_range(bits, count, start, w), digest))
}

int64_t SW_NAME(digest_positions)(uint32_t width, const int64_t *indices, const void *bits, uint64_t count,
                                  uint64_t *digest) {
    SW_BY_WIDTH(width, store_sums(digest_positions(indices, NULL, bits, count, w), digest))
}

SW_INLINE int64_t scatter_width(void *target, uint64_t size, const int64_t *indices, const void *values, uint64_t count,
                                uint32_t width) {
    /* Far enough ahead for memory, few enough to fit the line-fill buffers. */
    enum { AHEAD = 16 };
    for (uint64_t i = 0; i < count; i++) {
        if (SW_UNLIKELY((uint64_t)indices[i] >= size)) return SW_DAMAGED_GAPS;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch((const uint8_t *)target + (uint64_t)indices[i + AHEAD] * width, 1);
        store_element(target, (uint64_t)indices[i], load_element(values, i, width), width);
    }
    return 0;
}

int64_t SW_NAME(scatter)(uint32_t width, void *target, uint64_t size, const int64_t *indices, const void *values,
                         uint64_t count) {
    SW_BY_WIDTH(width, scatter_width(target, size, indices, values, count, w))
}

SW_INLINE int64_t compare_arrays(const uint8_t *old, const uint8_t *new_, uint64_t count, uint32_t width) {
    int64_t num_changed = 0;
    uint64_t at = 0;
    for (; at + SW_WORD <= count; at += SW_WORD) {
        prefetch_word(old + at * width, width);
        prefetch_word(new_ + at * width, width);
        num_changed += popcount64(changed_in_word(old + at * width, new_ + at * width, width));
    }
    for (; at < count; at++) num_changed += load_element(old, at, width) != load_element(new_, at, width);
    return num_changed;
}

int64_t SW_NAME(compare)(uint32_t width, const void *old, const void *new_, uint64_t count) {
    SW_BY_WIDTH(width, compare_arrays(old, new_, count, w))
}

int64_t SW_NAME(split)(uint32_t width, uint64_t num_segments, uint64_t *table, uint8_t *const *planes) {
    switch (width) {
    case 2: return turn_segments(num_segments, table, planes, 0, 2);
    case 4: return turn_segments(num_segments, table, planes, 0, 4);
    case 8: return turn_segments(num_segments, table, planes, 0, 8);
    default: return SW_UNSUPPORTED;
    }
}

int64_t SW_NAME(join)(uint32_t width, uint64_t num_segments, uint64_t *table, uint8_t *const *planes) {
    switch (width) {
    case 2: return turn_segments(num_segments, table, planes, 1, 2);
    case 4: return turn_segments(num_segments, table, planes, 1, 4);
    case 8: return turn_segments(num_segments, table, planes, 1, 8);
    default: return SW_UNSUPPORTED;
    }
}

int64_t SW_NAME(crc32)(uint32_t crc, const uint8_t *bytes, uint64_t size) { return crc32_of(crc, bytes, size); }
