/* The encoder's pass over old and new bits: what changed, its class, and its rank among the elements of that class.
 *
 * One pass, block by block, so that both arrays are read from memory once. Segments that turn out unchanged or crowded
 * are taken back: the running counts are those of classed segments alone, as docs/format.md numbers elements.
 */
#ifndef SPARSEWIRE_SCAN_H
#define SPARSEWIRE_SCAN_H

#include "classes.h"
#include "records.h"

/* Words a block: old, new, masks and lists of a block together stay in a level-1 cache of 48 KiB. */
enum { SW_SCAN_WORDS = 32 };

/* Appends the changes of a block, whose `changed` is filled; returns how many. With one class `rank` is the first one's. */
SW_INLINE uint32_t record_changes(struct records *records, struct block *block, const uint8_t *old, const uint8_t *new_,
                                  uint32_t num_words, uint64_t origin, int classified, uint32_t rank, uint32_t width) {
    const uint32_t count = block->num_changed;
    const uint64_t num = records->num;
    list_changes(block, num_words);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t position = block->at[i];
        records->positions[num + i] = (uint32_t)origin + position;
        records->ranks[num + i] = classified ? rank_of(block, position) : rank + position;
        records->classes[num + i] = classified ? block->class_of[position] : 0;
        store_element(records->old, num + i, load_element(old, position, width), width);
        store_element(records->new_, num + i, load_element(new_, position, width), width);
    }
    records->num = num + count;
    return count;
}

/* Elements that the records must have room for: those of segments that are taken anyway, else what is not crowded. */
static uint64_t records_capacity(const struct segments *segments, uint64_t crowded) {
    uint64_t capacity = SW_SLACK;
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const uint64_t count = segment_row(segments, SW_COUNT)[segment];
        const uint64_t wish = segment_row(segments, SW_MODE)[segment];
        capacity += wish == SW_SKIP ? 0 : wish == SW_CLASSED ? count : count / crowded + 1;
    }
    return capacity;
}

/* Fills records, the outcome of each segment, and the number of elements of every class in classed segments. */
SW_INLINE void scan_segments(const struct segments *segments, struct records *records, struct counts *counts,
                             const struct classes *classes, uint64_t crowded_share, uint32_t width) {
    struct block block;
    uint8_t tail[2][SW_WORD * 8];
    const uint32_t num_classes = classes->num_classes;
    memset(counts, 0, sizeof *counts);
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        uint64_t *const mode = &segment_row(segments, SW_MODE)[segment];
        const uint64_t size = segment_row(segments, SW_COUNT)[segment];
        const struct counts counts_before = *counts;
        const uint64_t num_before = records->num;
        uint64_t num_changed = 0;
        int crowded = 0;
        segment_row(segments, SW_NUM_CHANGED)[segment] = 0;
        if (*mode == SW_SKIP) continue;
        for (uint64_t at = 0; at < size;) {
            const uint8_t *old = segment_bits(segments, SW_OLD, segment) + at * width;
            const uint8_t *new_ = segment_bits(segments, SW_NEW, segment) + at * width;
            const uint64_t left = size - at;
            uint32_t num_words = left >= SW_SCAN_WORDS * SW_WORD ? SW_SCAN_WORDS : (uint32_t)(left / SW_WORD);
            uint64_t taken = (uint64_t)num_words * SW_WORD;
            uint32_t padding = 0;
            if (num_words == 0) {
                memset(tail, 0, sizeof tail);
                memcpy(tail[0], old, left * width);
                memcpy(tail[1], new_, left * width);
                old = tail[0];
                new_ = tail[1];
                num_words = 1;
                taken = left;
                padding = (uint32_t)(SW_WORD - left);
            }
            if (crowded || num_classes == 1) {
                forget_changes(&block);
                for (uint32_t word = 0; word < num_words; word++) {
                    compare_word(&block, old + (size_t)word * SW_WORD * width, new_, word, width);
                }
            } else {
                classify_block(&block, counts, classes, old, new_, num_words, width);
                counts->of[0] -= padding; /* zeros, which every choice of cuts puts into class 0 */
            }
            if (crowded) {
                num_changed += block.num_changed;
            } else if (num_classes == 1) {
                num_changed += record_changes(records, &block, old, new_, num_words, at, 0, counts->of[0], width);
                counts->of[0] += (uint32_t)taken;
            } else {
                num_changed += record_changes(records, &block, old, new_, num_words, at, 1, 0, width);
            }
            crowded = crowded || (*mode == SW_AUTO && num_changed * crowded_share > size);
            at += taken;
        }
        segment_row(segments, SW_NUM_CHANGED)[segment] = num_changed;
        *mode = crowded ? SW_CROWDED : num_changed || *mode == SW_CLASSED ? SW_CLASSED : SW_UNCHANGED;
        if (*mode != SW_CLASSED) {
            *counts = counts_before;
            records->num = num_before;
        }
    }
}

#endif
