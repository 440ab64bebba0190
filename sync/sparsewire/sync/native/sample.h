/* What cuts are fitted to: how many elements have each key, and how often each step changes them, in a sample. */
#ifndef SPARSEWIRE_SAMPLE_H
#define SPARSEWIRE_SAMPLE_H

#include "classes.h"
#include "records.h"
#include "tokens.h"

/* Of more elements than the first, one block in so many is looked at; blocks lie in the space of all segments. */
enum { SW_SAMPLE_WHOLE = 1 << 18, SW_SAMPLE_BLOCK = 1 << 12, SW_SAMPLE_PERIOD = 8 * SW_SAMPLE_BLOCK };

/* Adds up `elements` by key, and `counts` by key and token. Both begin at zero. */
SW_INLINE int64_t sample_segments(const struct segments *segments, uint64_t *elements, uint64_t *counts, uint32_t width) {
    const uint32_t num_tokens = num_tokens_of(width);
    uint64_t num_elements = 0;
    /* Neighbours often share a key: turns between tables keep a counter from waiting for its last increment. */
    uint32_t by_key[4][256];
    memset(by_key, 0, sizeof by_key);
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        num_elements += segment_row(segments, SW_COUNT)[segment];
    }
    if (num_elements > SW_MAX_ELEMENTS) return SW_DAMAGED_HEAD;
    const uint64_t period = num_elements <= SW_SAMPLE_WHOLE ? SW_SAMPLE_BLOCK : SW_SAMPLE_PERIOD;
    uint64_t phase = 0; /* of the first element of the segment within the period */
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const uint8_t *old = segment_bits(segments, SW_OLD, segment);
        const uint8_t *new_ = segment_bits(segments, SW_NEW, segment);
        const uint64_t size = segment_row(segments, SW_COUNT)[segment];
        for (uint64_t at = 0; at < size;) {
            const uint64_t place = (phase + at) % period;
            if (place >= SW_SAMPLE_BLOCK) {
                at += period - place;
                continue;
            }
            const uint64_t block_end = at + SW_SAMPLE_BLOCK - place;
            for (const uint64_t stop = block_end < size ? block_end : size; at < stop; at++) {
                const uint64_t before = load_element(old, at, width);
                const uint64_t step = load_element(new_, at, width) - before;
                const uint32_t key = key_of(before, width);
                by_key[at & 3][key]++;
                if (SW_UNLIKELY(step << (64 - 8 * width) != 0)) {
                    counts[key * num_tokens + token_of(step & (~UINT64_C(0) >> (64 - 8 * width)), width).token]++;
                }
            }
        }
        phase = (phase + size) % period;
    }
    for (uint32_t key = 0; key < 256; key++) {
        elements[key] += (uint64_t)by_key[0][key] + by_key[1][key] + by_key[2][key] + by_key[3][key];
    }
    return 0;
}

#endif
