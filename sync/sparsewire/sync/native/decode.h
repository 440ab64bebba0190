/* From a classed body and the base to what changed: read the streams, then find every change in the base.
 *
 * docs/format.md, "Classed body". The base is scanned once, block by block: the changes of a block are those whose ranks
 * lie below the counts at its end; their words are found by bisection, their places by selecting a bit of a mask.
 */
#ifndef SPARSEWIRE_DECODE_H
#define SPARSEWIRE_DECODE_H

#include "streams.h"

/* The targets of a block: changed elements by rank and class, then by place. */
struct targets {
    uint32_t rank[SW_BLOCK + 64];
    uint32_t class_of[SW_BLOCK + 64];
    uint32_t word[SW_BLOCK + 64];
    uint8_t step[(SW_BLOCK + 64) * 8];
    uint8_t step_at[SW_BLOCK * 8]; /* by position in the block */
};

/* Moves the targets whose rank is below the counts at the end of the block to the list; returns how many. */
SW_INLINE uint32_t collect_targets(struct targets *targets, const struct decoder *d, uint64_t *cursor,
                                   const struct counts *counts, uint32_t width) {
    uint32_t num = 0;
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) {
        const uint32_t *ranks = d->ranks + cursor[class_];
        const uint32_t bound = counts->of[class_];
        uint32_t count = 0;
#if defined(SW_AVX512)
        uint32_t here;
        do {
            const __m512i sixteen = _mm512_loadu_si512(ranks + count);
            here = popcount64(_mm512_cmplt_epu32_mask(sixteen, _mm512_set1_epi32((int32_t)bound)));
            _mm512_storeu_si512(targets->rank + num + count, sixteen);
            _mm512_storeu_si512(targets->class_of + num + count, _mm512_set1_epi32((int32_t)class_));
            memcpy(targets->step + (num + count) * width, d->steps + (cursor[class_] + count) * width, 16 * width);
            count += here;
        } while (here == 16);
#else
        for (; ranks[count] < bound; count++) {
            targets->rank[num + count] = ranks[count];
            targets->class_of[num + count] = class_;
            store_element(targets->step, num + count, load_element(d->steps, cursor[class_] + count, width), width);
        }
#endif
        cursor[class_] += count;
        num += count;
    }
    return num;
}

/* Finds the word of every target: the last one that begins at or below its rank. */
static void find_words(struct targets *targets, const struct block *block, uint32_t num, uint32_t num_words) {
    uint32_t first_half = 0;
    while ((first_half ? 2 * first_half : 1) < num_words) first_half = first_half ? 2 * first_half : 1;
#if defined(SW_AVX512)
    for (uint32_t i = 0; i < num; i += 16) {
        const __m512i rank = _mm512_loadu_si512(targets->rank + i);
        /* Places of words are kept times 16: the row, to which the class is added. Lanes beyond the end are harmless. */
        __m512i place = _mm512_and_si512(_mm512_loadu_si512(targets->class_of + i), _mm512_set1_epi32(15));
        for (uint32_t half = first_half; half; half >>= 1) {
            const __m512i next = _mm512_add_epi32(place, _mm512_set1_epi32((int32_t)(half * SW_MAX_CLASSES)));
            const __m512i begins = _mm512_i32gather_epi32(next, block->before, 4);
            place = _mm512_mask_mov_epi32(place, _mm512_cmple_epu32_mask(begins, rank), next);
        }
        _mm512_storeu_si512(targets->word + i, _mm512_srli_epi32(place, 4));
    }
#else
    for (uint32_t i = 0; i < num; i++) {
        const uint32_t *column = &block->before[0][targets->class_of[i]];
        const uint32_t rank = targets->rank[i];
        uint32_t place = 0;
        for (uint32_t half = first_half * SW_MAX_CLASSES; half >= SW_MAX_CLASSES; half >>= 1) {
            place += half & (0 - (uint32_t)(column[place + half] <= rank));
        }
        targets->word[i] = place / SW_MAX_CLASSES;
    }
#endif
}

SW_INLINE int64_t place_changes(struct decoder *d, const struct segments *segments, struct records *records,
                                uint32_t width) {
    struct block block;
    struct targets targets;
    struct counts counts;
    uint8_t tail[SW_WORD * 8];
    uint64_t cursor[SW_MAX_CLASSES];
    uint64_t num = 0;
    memset(&counts, 0, sizeof counts);
    memset(targets.class_of, 0, sizeof targets.class_of);
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) cursor[class_] = d->entry[class_].first;
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const uint64_t size = segment_row(segments, SW_COUNT)[segment];
        const uint64_t num_before = num;
        for (uint64_t at = 0; at < size;) {
            const uint8_t *old = segment_bits(segments, SW_OLD, segment) + at * width;
            const uint64_t left = size - at;
            uint32_t num_words = left >= SW_BLOCK ? SW_BLOCK_WORDS : (uint32_t)(left / SW_WORD);
            uint64_t taken = (uint64_t)num_words * SW_WORD;
            uint32_t padding = 0;
            if (num_words == 0) {
                memset(tail, 0, sizeof tail);
                memcpy(tail, old, left * width);
                old = tail;
                num_words = 1;
                taken = left;
                padding = (uint32_t)(SW_WORD - left);
            }
            classify_block(&block, &counts, &d->classes, old, NULL, num_words, width);
            counts.of[0] -= padding; /* zeros, which every choice of cuts puts into class 0 */
            const uint32_t count = collect_targets(&targets, d, cursor, &counts, width);
            if (count) {
                for (uint32_t word = num_words; word & (word - 1); word++) {
                    for (uint32_t class_ = 0; class_ < SW_MAX_CLASSES; class_++) block.before[word][class_] = UINT32_MAX;
                }
                memset(block.changed, 0, num_words * sizeof block.changed[0]);
                find_words(&targets, &block, count, num_words);
                for (uint32_t i = 0; i < count; i++) {
                    const uint32_t word = targets.word[i];
                    const uint32_t class_ = targets.class_of[i];
                    const uint64_t mask = class_mask(&block, word, class_);
                    const uint32_t bit = select64(mask, targets.rank[i] - block.before[word][class_]);
                    block.changed[word] |= UINT64_C(1) << bit;
                    store_element(targets.step_at, word * SW_WORD + bit, load_element(targets.step, i, width), width);
                }
                forget_changes(&block);
                for (uint32_t word = 0; word < num_words; word++) note_changes(&block, word, block.changed[word]);
                list_changes(&block, num_words);
                for (uint32_t i = 0; i < count; i++) {
                    const uint32_t position = block.at[i];
                    const uint64_t before = load_element(old, position, width);
                    records->positions[num + i] = (uint32_t)at + position;
                    store_element(records->old, num + i, before, width);
                    store_element(records->new_, num + i, before + load_element(targets.step_at, position, width), width);
                }
                num += count;
            }
            at += taken;
        }
        segment_row(segments, SW_NUM_CHANGED)[segment] = num - num_before;
    }
    uint64_t expected = 0;
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) expected += d->entry[class_].num_changed;
    if (num != expected) return SW_WRONG_BASE;
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) {
        const struct class_entry *entry = &d->entry[class_];
        if (entry->inverse && entry->num_changed + entry->num_unchanged != counts.of[class_]) return SW_WRONG_BASE;
    }
    records->num = num;
    return 0;
}

/* The same with one class, whose ranks are places in the space of all segments: the base is read at changes only. */
SW_INLINE int64_t place_unclassed(struct decoder *d, const struct segments *segments, struct records *records,
                                  uint32_t width) {
    const struct class_entry *entry = &d->entry[0];
    const uint32_t *ranks = d->ranks + entry->first;
    uint64_t origin = 0;
    uint64_t num = 0;
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const uint8_t *old = segment_bits(segments, SW_OLD, segment);
        const uint64_t stop = origin + segment_row(segments, SW_COUNT)[segment];
        const uint64_t num_before = num;
        for (; num < entry->num_changed && ranks[num] < stop; num++) {
            const uint32_t position = ranks[num] - (uint32_t)origin;
            const uint64_t before = load_element(old, position, width);
            records->positions[num] = position;
            store_element(records->old, num, before, width);
            store_element(records->new_, num, before + load_element(d->steps, entry->first + num, width), width);
        }
        segment_row(segments, SW_NUM_CHANGED)[segment] = num - num_before;
        origin = stop;
    }
    if (num != entry->num_changed) return SW_WRONG_BASE;
    if (entry->inverse && entry->num_changed + entry->num_unchanged != origin) return SW_WRONG_BASE;
    records->num = num;
    return 0;
}

/* Gives changes their new bits again, now that it is known which of them are in the change before and so are predicted. */
static int64_t settle_predictions(const struct decoder *d, const struct segments *segments, struct records *records,
                                  struct again *again, const struct last_change *last) {
    enum { W = SW_PREDICTED_WIDTH };
    /* Of every class the next plain step and the next one from a prediction, and where those end. */
    uint64_t next[SW_MAX_CLASSES][2], stop[SW_MAX_CLASSES][2];
    uint32_t has_predictions[SW_MAX_CLASSES];
    find_again(again, segments, records, 1, last);
    give_hints(again, records, d->gain, 0);
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) {
        const struct class_entry *entry = &d->entry[class_];
        has_predictions[class_] = entry->num_predicted != 0;
        next[class_][0] = entry->first;
        next[class_][1] = stop[class_][0] = entry->first + entry->num_changed - entry->num_predicted;
        stop[class_][1] = entry->first + entry->num_changed;
    }
    uint32_t none_moved = 0;
    for (uint64_t i = 0; i < records->num; i++) {
        const uint32_t old = (uint32_t)load_element(records->old, i, W);
        const uint32_t class_ = d->classes.of_key[key_of(old, W)];
        const uint32_t hint = again->hints[i];
        const uint32_t predicted = hint >> 16 & has_predictions[class_];
        const uint32_t from = predicted ? hint : old;
        const uint64_t place = next[class_][predicted]++;
        if (SW_UNLIKELY(place >= stop[class_][predicted])) return SW_WRONG_LAST_CHANGE;
        const uint32_t new_ = (from + (uint32_t)load_element(d->steps, place, W)) & 0xFFFF;
        none_moved |= new_ == old;
        store_element(records->new_, i, new_, W);
    }
    return none_moved ? SW_WRONG_LAST_CHANGE : 0;
}

SW_INLINE int64_t decode_segments(struct sparsewire_decode *job, uint32_t width) {
    const struct segments segments = {job->num_segments, job->table};
    struct decoder d;
    struct records records;
    uint64_t num_elements = 0;
    for (uint64_t i = 0; i < segments.num; i++) num_elements += segment_row(&segments, SW_COUNT)[i];
    int64_t refused = read_head(&d, job->body, job->body_bytes, job->num_changed, num_elements, width);
    if (refused) return refused;
    const uint64_t records_bytes =
        lay_out_records(&records, job->scratch, job->num_changed + SW_SLACK, width, 0);
    const struct last_change last = {job->num_last, job->last_places, job->last_bits};
    struct again again;
    const uint64_t again_bytes = d.gain ? lay_out_again(&again, NULL, job->num_changed) : 0;
    const uint64_t needed =
        records_bytes + again_bytes + lay_out_decoder(&d, NULL, job->body_bytes, job->num_changed, width);
    if (needed > job->scratch_bytes) {
        job->scratch_bytes = needed;
        return SW_TOO_SMALL;
    }
    if (d.gain) lay_out_again(&again, job->scratch + records_bytes, job->num_changed);
    lay_out_decoder(&d, job->scratch + records_bytes + again_bytes, job->body_bytes, job->num_changed, width);
    memcpy(d.copy, job->body, job->body_bytes);
    memset(d.copy + job->body_bytes, 0, SW_BODY_PADDING);
    move_streams(&d, job->body);
    d.wrong_base = 0;
    if (!read_unary(&d)) return SW_DAMAGED_GAPS;
    read_ranks(&d, num_elements);
    if (d.num_wide) {
        if (!read_tokens(&d, width)) return SW_DAMAGED_TOKENS;
        if (!read_wide_steps(&d, width)) return SW_DAMAGED_STEPS;
    }
    if (!read_unit_steps(&d, width)) return SW_DAMAGED_STEPS;
    if (d.gain && !last.places) return SW_WRONG_LAST_CHANGE;
    if (d.wrong_base) return SW_WRONG_BASE;
    refused = d.num_classes == 1 ? place_unclassed(&d, &segments, &records, width)
                                 : place_changes(&d, &segments, &records, width);
    if (refused) return refused;
    if (d.gain) {
        refused = settle_predictions(&d, &segments, &records, &again, &last);
        if (refused) return refused;
    }
    finish_records(&segments, &records, 1, width);
    job->indices_at = (uint64_t)((uint8_t *)records.indices - job->scratch);
    job->old_at = (uint64_t)(records.old - job->scratch);
    job->new_at = (uint64_t)(records.new_ - job->scratch);
    return 0;
}

#endif
