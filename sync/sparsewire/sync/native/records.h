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

/* Takes a part of scratch, or only its size while `base` is NULL. What lies between parts belongs to none of them. */
static void *take_scratch(uint8_t *base, uint64_t *used, uint64_t bytes) {
    uint8_t *part = base ? base + *used : NULL;
    const uint64_t next = (*used + bytes + 127) & ~UINT64_C(63);
#if defined(SW_ADDRESS_SANITIZER)
    if (base) {
        ASAN_UNPOISON_MEMORY_REGION(part, bytes);
        ASAN_POISON_MEMORY_REGION(part + bytes, next - *used - bytes);
    }
#endif
    *used = next;
    return part;
}

static uint64_t lay_out_records(struct records *records, uint8_t *base, uint64_t capacity, uint32_t width, int encoder) {
    uint64_t used = 0;
    records->num = 0;
    records->capacity = capacity;
    records->indices = take_scratch(base, &used, 8 * capacity);
    records->positions = take_scratch(base, &used, 4 * capacity);
    records->old = take_scratch(base, &used, width * capacity);
    records->new_ = take_scratch(base, &used, width * capacity);
    records->ranks = NULL;
    records->classes = NULL;
    if (encoder) {
        records->ranks = take_scratch(base, &used, 4 * capacity);
        records->classes = take_scratch(base, &used, capacity);
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
