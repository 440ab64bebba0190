/* The changes of all segments of a job, one after the other, and the table of segments that they belong to. */
#ifndef SPARSEWIRE_RECORDS_H
#define SPARSEWIRE_RECORDS_H

#include "digest.h"

struct segments { uint64_t num; uint64_t *table; };

SW_INLINE uint64_t *segment_row(const struct segments *segments, enum sparsewire_row row) {
    return segments->table + (uint64_t)row * segments->num;
}

SW_INLINE const uint8_t *segment_bits(const struct segments *segments, enum sparsewire_row row, uint64_t segment) {
    return (const uint8_t *)(uintptr_t)segment_row(segments, row)[segment];
}

struct records {
    uint64_t num;
    uint64_t capacity;   /* of every array, slack included */
    int64_t *indices;    /* flat positions in the tensors; filled last, by finish_records */
    uint32_t *positions; /* places in the segments */
    uint8_t *old;
    uint8_t *new_;
    uint32_t *ranks;     /* places among the elements of their class in all classed segments; encoder only */
    uint8_t *classes;    /* encoder only */
};

/* Takes a part of scratch: sets `field` unless only the size is asked for, with `base` NULL, and adds to `used`. */
#define SW_TAKE(field, type, bytes) \
    ((field) = (type)(void *)(base ? base + used : NULL), used += ((uint64_t)(bytes) + 127) & ~(uint64_t)63)

static uint64_t lay_out_records(struct records *records, uint8_t *base, uint64_t capacity, uint32_t width, int encoder) {
    uint64_t used = 0;
    records->num = 0;
    records->capacity = capacity;
    SW_TAKE(records->indices, int64_t *, 8 * capacity);
    SW_TAKE(records->positions, uint32_t *, 4 * capacity);
    SW_TAKE(records->old, uint8_t *, width * capacity);
    SW_TAKE(records->new_, uint8_t *, width * capacity);
    records->ranks = NULL;
    records->classes = NULL;
    if (encoder) {
        SW_TAKE(records->ranks, uint32_t *, 4 * capacity);
        SW_TAKE(records->classes, uint8_t *, capacity);
    }
    return used;
}

/* Fills indices, and the digests of the segments, by the number of changes that the table states for those in the body. */
SW_INLINE void finish_records(const struct segments *segments, const struct records *records, int all, uint32_t width) {
    uint64_t at = 0;
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const int taken = all || segment_row(segments, SW_MODE)[segment] == SW_CLASSED;
        const uint64_t count = taken ? segment_row(segments, SW_NUM_CHANGED)[segment] : 0;
        const int64_t start = (int64_t)segment_row(segments, SW_START)[segment];
        for (uint64_t i = at; i < at + count; i++) records->indices[i] = start + records->positions[i];
        const struct sums change =
            digest_positions(records->indices + at, records->old + at * width, records->new_ + at * width, count, width);
        segment_row(segments, SW_DIGEST_A)[segment] = change.a;
        segment_row(segments, SW_DIGEST_B)[segment] = change.b;
        at += count;
    }
}

#endif
