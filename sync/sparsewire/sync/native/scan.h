/* The encoder's pass over old and new bits: what changed, its class, and its rank among the elements of that class.
 *
 * One pass, block by block, so that both arrays are read from memory once. Segments that turn out unchanged or crowded
 * are taken back: the running counts are those of classed segments alone, as docs/format.md numbers elements.
 */
#ifndef SPARSEWIRE_SCAN_H
#define SPARSEWIRE_SCAN_H

#include "classes.h"

/* Words a block: old, new, masks and lists of a block together stay in a level-1 cache of 48 KiB. */
enum { SW_SCAN_WORDS = 32 };

/* Appends the changes of a block from record number `num` on; returns how many. `changed` of the block is filled. */
SW_INLINE uint32_t record_changes(const struct sparsewire_scan *job, struct block *block, const uint8_t *old,
                                  const uint8_t *new_, uint32_t num_words, uint64_t origin, uint64_t num,
                                  uint32_t width) {
    const uint32_t count = list_changes(block, num_words);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t position = block->at[i];
        job->positions[num + i] = (uint32_t)origin + position;
        job->ranks[num + i] = rank_of(block, position);
        job->classes[num + i] = block->class_of[position];
        store_element(job->old_changed, num + i, load_element(old, position, width), width);
        store_element(job->new_changed, num + i, load_element(new_, position, width), width);
    }
    return count;
}

/* Compares the words of a block into `changed`; returns the number of changes. */
SW_INLINE uint32_t compare_block(struct block *block, const uint8_t *old, const uint8_t *new_, uint32_t num_words,
                                 uint32_t width) {
    uint32_t count = 0;
    const size_t word_bytes = (size_t)SW_WORD * width;
    for (uint32_t word = 0; word < num_words; word++) {
        const uint8_t *x = old + word * word_bytes;
        const uint8_t *y = new_ + word * word_bytes;
        for (size_t line = 0; line < word_bytes; line += 64) {
            __builtin_prefetch(x + SW_SCAN_WORDS * word_bytes + line);
            __builtin_prefetch(y + SW_SCAN_WORDS * word_bytes + line);
        }
        block->changed[word] = changed_in_word(x, y, width);
        count += popcount64(block->changed[word]);
    }
    return count;
}

SW_INLINE int64_t scan_segments(const struct sparsewire_scan *job, uint32_t width) {
    struct classes classes;
    struct block block;
    struct counts counts;
    uint8_t tail[2][SW_WORD * 8];
    uint64_t num = 0;
    memset(&counts, 0, sizeof counts);
    if (!prepare_classes(&classes, job->cuts, job->num_cuts)) return SW_DAMAGED_HEAD;
    for (uint64_t segment = 0; segment < job->num_segments; segment++) {
        const uint8_t wish = job->modes[segment];
        const uint64_t size = job->counts[segment];
        const struct counts counts_before = counts;
        const uint64_t num_before = num;
        uint64_t num_changed = 0;
        int crowded = 0;
        if (wish == SW_SKIP) continue;
        for (uint64_t at = 0; at < size;) {
            const uint8_t *old = (const uint8_t *)job->old_bits[segment] + at * width;
            const uint8_t *new_ = (const uint8_t *)job->new_bits[segment] + at * width;
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
            num_changed += compare_block(&block, old, new_, num_words, width);
            crowded |= wish == SW_AUTO && num_changed * job->crowded > size;
            if (!crowded) {
                if (SW_UNLIKELY(num + SW_SLACK > job->capacity)) return SW_TOO_SMALL;
                classify_block(&block, &counts, &classes, old, num_words, width);
                counts.of[0] -= padding; /* zeros, which every choice of cuts puts into class 0 */
                num += record_changes(job, &block, old, new_, num_words, at, num, width);
            }
            at += taken;
        }
        job->num_changed[segment] = num_changed;
        job->modes[segment] = crowded ? SW_CROWDED : num_changed ? SW_CLASSED : SW_UNCHANGED;
        if (crowded || !num_changed) {
            counts = counts_before;
            num = num_before;
        }
    }
    for (uint32_t class_ = 0; class_ < SW_MAX_CLASSES; class_++) job->class_sizes[class_] = counts.of[class_];
    return (int64_t)num;
}

#endif
