/* Which changes the change before has too, and where each of those elements was headed: docs/format.md, "Predictions".
 *
 * Single precision, every operation rounded on its own (the build forbids contraction), on operands and results that are
 * never subnormal, so that every level and the NumPy form agree whatever the process has set.
 */
#ifndef SPARSEWIRE_PREDICT_H
#define SPARSEWIRE_PREDICT_H

#include "records.h"

enum { SW_PREDICTED_WIDTH = 2, SW_GAIN_UNIT = 128, SW_GAIN_SAMPLE = 1024, SW_NUM_GAINS = 12 };

/* The change before: places in the space of all segments of the job, ascending, and the bits that it replaced. */
struct last_change { uint64_t num; const int64_t *places; const uint8_t *bits; };

/* Changes that the change before has too: their numbers among the records, and the bits before it. */
struct again { uint64_t num; uint32_t *records; uint16_t *before; };

SW_INLINE float single_of(uint32_t bits) {
    const uint32_t wide = bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Exponents 32 to 254: neither tiny nor infinite. */
SW_INLINE uint32_t is_usable(uint32_t bits) { return ((bits >> 7 & 0xFF) - 32u) < 223u; }

SW_INLINE uint16_t predict_bits(uint32_t old, uint32_t before, float gain) {
    const float value = single_of(old);
    const float step = value - single_of(before);
    const float moved = value + gain * step;
    uint32_t bits;
    memcpy(&bits, &moved, 4);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF;
    const uint32_t usable = is_usable(old) & is_usable(before) & ((rounded & 0x7F80) != 0x7F80);
    return (uint16_t)(usable ? rounded : old);
}

static uint64_t lay_out_again(struct again *again, uint8_t *base, uint64_t num_changed) {
    uint64_t used = 0;
    /* One more than there can be: a pair is written before it is known to be one. */
    again->num = 0;
    again->records = take_scratch(base, &used, 4 * (num_changed + 1));
    again->before = take_scratch(base, &used, 2 * (num_changed + 1));
    return used;
}

/* The first of the places from `at` on that is not below `bound`. */
static uint64_t first_place(const struct last_change *last, uint64_t at, int64_t bound) {
    uint64_t stop = last->num;
    while (at < stop) {
        const uint64_t middle = at + (stop - at) / 2;
        if (last->places[middle] < bound) at = middle + 1;
        else stop = middle;
    }
    return at;
}

/* Merges the records, which belong to segments as finish_records says, with the change before. */
static void find_again(struct again *again, const struct segments *segments, const struct records *records, int all,
                       const struct last_change *last) {
    uint64_t at = 0, place = 0, found = 0;
    int64_t origin = 0;
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const int64_t size = (int64_t)segment_row(segments, SW_COUNT)[segment];
        const int taken = all || segment_row(segments, SW_MODE)[segment] == SW_CLASSED;
        const uint64_t end = at + (taken ? segment_row(segments, SW_NUM_CHANGED)[segment] : 0);
        place = first_place(last, place, origin);
        const uint64_t stop = first_place(last, place, origin + size);
        while (at < end && place < stop) {
            const int64_t ours = origin + records->positions[at];
            const int64_t theirs = last->places[place];
            again->records[found] = (uint32_t)at;
            again->before[found] = (uint16_t)load_element(last->bits, place, SW_PREDICTED_WIDTH);
            found += ours == theirs;
            at += ours <= theirs;
            place += theirs <= ours;
        }
        at = end;
        place = stop;
        origin += size;
    }
    again->num = found;
}

SW_INLINE uint32_t length_of_step(uint16_t step) {
    const uint16_t back = (uint16_t)(0 - step);
    const uint32_t size = step < back ? step : back;
    return size ? 1 + highest_bit(size) : 0;
}

/* The gain that leaves the shortest steps, tried on a sample of those elements that last moved by more than a unit. */
static uint32_t choose_gain(const struct again *again, const struct records *records) {
    static const uint8_t gains[SW_NUM_GAINS] = {112, 116, 120, 124, 128, 108, 104, 96, 80, 64, 136, 144};
    uint64_t costs[SW_NUM_GAINS];
    uint64_t num_far = 0;
    memset(costs, 0, sizeof costs);
    for (uint64_t i = 0; i < again->num; i++) {
        const uint64_t old = load_element(records->old, again->records[i], SW_PREDICTED_WIDTH);
        num_far += (uint16_t)(old - again->before[i] + 1) > 2;
    }
    const uint64_t stride = (num_far + SW_GAIN_SAMPLE - 1) / SW_GAIN_SAMPLE;
    uint64_t until = 0;
    for (uint64_t i = 0; i < again->num; i++) {
        const uint32_t before = again->before[i];
        const uint32_t old = (uint32_t)load_element(records->old, again->records[i], SW_PREDICTED_WIDTH);
        if ((uint16_t)(old - before + 1) <= 2) continue;
        if (until) {
            until--;
            continue;
        }
        until = stride - 1;
        const uint32_t new_ = (uint32_t)load_element(records->new_, again->records[i], SW_PREDICTED_WIDTH);
        for (uint32_t k = 0; k < SW_NUM_GAINS; k++) {
            const uint16_t predicted = predict_bits(old, before, (float)gains[k] / SW_GAIN_UNIT);
            costs[k] += length_of_step((uint16_t)(new_ - predicted));
        }
    }
    uint32_t best = 0;
    for (uint32_t k = 1; k < SW_NUM_GAINS; k++) best = costs[k] < costs[best] ? k : best;
    return gains[best];
}

#endif
