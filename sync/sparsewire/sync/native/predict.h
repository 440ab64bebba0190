/* Which changes the change before has too, and where each of those elements was headed: docs/format.md, "Predictions".
 *
 * Single precision, every operation rounded on its own (the build forbids contraction), on operands and results that are
 * never subnormal, so that every level and the NumPy form agree whatever the process has set.
 */
#ifndef SPARSEWIRE_PREDICT_H
#define SPARSEWIRE_PREDICT_H

#include "records.h"

enum { SW_PREDICTED_WIDTH = 2, SW_GAIN_UNIT = 128, SW_NUM_GAINS = 12 };

/* The change before: places in the space of all segments of the job, ascending, and the bits that it replaced. */
struct last_change { uint64_t num; const int64_t *places; const uint8_t *bits; };

/* Changes that the change before has too, by their numbers among the records, and what it replaced there. */
struct again {
    uint64_t num;
    uint32_t *records;
    uint16_t *before;
    uint32_t *hints; /* by record: SW_HINTED and a value of 16 bits, or 0 */
};

#define SW_HINTED (1u << 16)

SW_INLINE float single_of(uint32_t bits) {
    const uint32_t wide = bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Exponents 32 to 254: neither tiny nor infinite. */
SW_INLINE uint32_t is_usable(uint32_t bits) { return ((bits >> 7 & 0xFF) - 32u) < 223u; }

SW_INLINE uint32_t predict_bits(uint32_t old, uint32_t before, float gain) {
    const float value = single_of(old);
    const float step = value - single_of(before);
    const float moved = value + gain * step;
    uint32_t bits;
    memcpy(&bits, &moved, 4);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF;
    const uint32_t usable = is_usable(old) & is_usable(before) & ((rounded & 0x7F80) != 0x7F80);
    return usable ? rounded : old;
}

static uint64_t lay_out_again(struct again *again, uint8_t *base, uint64_t num_changed) {
    uint64_t used = 0;
    again->num = 0;
    again->records = take_scratch(base, &used, 4 * num_changed);
    again->before = take_scratch(base, &used, 2 * num_changed);
    again->hints = take_scratch(base, &used, 4 * num_changed);
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

/* Records and places that are merged, and where the next pair goes. */
struct merge { uint64_t record, records_end, place, places_end, found; };

/* One step of the merge number i. Which of the two comes next cannot be foreseen, so nothing branches. */
#define SW_MERGE_STEP(i)                                                                          \
    do {                                                                                          \
        const int64_t ours = positions[record##i], theirs = places[place##i] - origin;            \
        found_records[found##i] = (uint32_t)record##i;                                            \
        found_before[found##i] = (uint16_t)load_element(bits, place##i, SW_PREDICTED_WIDTH);      \
        found##i += ours == theirs;                                                               \
        record##i += ours <= theirs;                                                              \
        place##i += theirs <= ours;                                                               \
    } while (0)

#define SW_MERGE_OPEN(i) uint64_t record##i = merges[i].record, place##i = merges[i].place, found##i = merges[i].found
#define SW_MERGE_CLOSE(i) (merges[i].record = record##i, merges[i].place = place##i, merges[i].found = found##i)

/* Takes `num` steps of each of four merges, or of one, none of which runs out of records or places in them. */
SW_INLINE void merge_steps(struct again *again, const uint32_t *positions, const struct last_change *last, int64_t origin,
                           struct merge *merges, int four, uint64_t num) {
    uint32_t *restrict const found_records = again->records;
    uint16_t *restrict const found_before = again->before;
    const int64_t *const places = last->places;
    const uint8_t *const bits = last->bits;
    SW_MERGE_OPEN(0);
    if (four) {
        SW_MERGE_OPEN(1);
        SW_MERGE_OPEN(2);
        SW_MERGE_OPEN(3);
        for (; num; num--) {
            SW_MERGE_STEP(0);
            SW_MERGE_STEP(1);
            SW_MERGE_STEP(2);
            SW_MERGE_STEP(3);
        }
        SW_MERGE_CLOSE(1);
        SW_MERGE_CLOSE(2);
        SW_MERGE_CLOSE(3);
    } else {
        for (; num; num--) SW_MERGE_STEP(0);
    }
    SW_MERGE_CLOSE(0);
}

SW_INLINE uint64_t safe_steps(const struct merge *m) {
    const uint64_t records = m->records_end - m->record, places = m->places_end - m->place;
    return records < places ? records : places;
}

/* Merges the records, which belong to segments as finish_records says, with the change before. Each step waits for the one
 * before, so four parts of a segment go at once. */
static void find_again(struct again *again, const struct segments *segments, const struct records *records, int all,
                       const struct last_change *last) {
    enum { PARTS = 4, WORTH_PARTING = 256 };
    uint64_t at = 0, place = 0, found = 0;
    int64_t origin = 0;
    for (uint64_t segment = 0; segment < segments->num; segment++) {
        const int64_t size = (int64_t)segment_row(segments, SW_COUNT)[segment];
        const int taken = all || segment_row(segments, SW_MODE)[segment] == SW_CLASSED;
        const uint64_t num = taken ? segment_row(segments, SW_NUM_CHANGED)[segment] : 0;
        place = first_place(last, place, origin);
        const uint64_t stop = first_place(last, place, origin + size);
        const uint32_t num_parts = num >= WORTH_PARTING ? PARTS : 1;
        struct merge merges[PARTS];
        uint64_t begins[PARTS];
        for (uint32_t i = 0; i < num_parts; i++) {
            struct merge *m = &merges[i];
            /* No part finds more than it has records, so each has room where they stand. */
            begins[i] = m->record = m->found = at + i * num / num_parts;
            m->records_end = at + (i + 1) * num / num_parts;
            m->place = i ? first_place(last, place, origin + records->positions[m->record]) : place;
            m->places_end = stop;
            if (i) merges[i - 1].places_end = m->place;
        }
        if (num_parts == PARTS) {
            for (;;) {
                uint64_t steps = safe_steps(&merges[0]);
                for (uint32_t i = 1; i < PARTS; i++) {
                    const uint64_t left = safe_steps(&merges[i]);
                    steps = left < steps ? left : steps;
                }
                if (!steps) break;
                merge_steps(again, records->positions, last, origin, merges, 1, steps);
            }
        }
        for (uint32_t i = 0; i < num_parts; i++) {
            struct merge *m = &merges[i];
            for (uint64_t steps; (steps = safe_steps(m)) != 0;) {
                merge_steps(again, records->positions, last, origin, m, 0, steps);
            }
            const uint64_t count = m->found - begins[i];
            memmove(again->records + found, again->records + begins[i], 4 * count);
            memmove(again->before + found, again->before + begins[i], 2 * count);
            found += count;
        }
        at += num;
        place = stop;
        origin += size;
    }
    again->num = found;
}

/* Bits of up to so many pairs, widened: for loops over vectors. Also the sample that gains are tried on. */
enum { SW_BATCH = 1024 };

struct batch { uint32_t old[SW_BATCH], before[SW_BATCH], new_[SW_BATCH]; };

/* Fills hints: for every pair its prediction, or with `steps` the new bits minus that. */
static void give_hints(struct again *again, const struct records *records, uint32_t gain, int steps) {
    struct batch batch;
    const float factor = (float)gain / SW_GAIN_UNIT;
    memset(again->hints, 0, 4 * records->num);
    for (uint64_t at = 0; at < again->num; at += SW_BATCH) {
        const uint32_t count = again->num - at < SW_BATCH ? (uint32_t)(again->num - at) : SW_BATCH;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t record = again->records[at + i];
            batch.old[i] = (uint32_t)load_element(records->old, record, SW_PREDICTED_WIDTH);
            batch.new_[i] = steps ? (uint32_t)load_element(records->new_, record, SW_PREDICTED_WIDTH) : 0;
            batch.before[i] = again->before[at + i];
        }
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t predicted = predict_bits(batch.old[i], batch.before[i], factor);
            batch.new_[i] = SW_HINTED | ((steps ? batch.new_[i] - predicted : predicted) & 0xFFFF);
        }
        for (uint32_t i = 0; i < count; i++) again->hints[again->records[at + i]] = batch.new_[i];
    }
}

/* The bits of a step's magnitude: the exponent of that number, which single precision holds exactly. */
SW_INLINE uint32_t length_of_step(uint32_t step) {
    const int32_t size = (int16_t)step;
    const float magnitude = (float)(size < 0 ? -size : size);
    int32_t bits;
    memcpy(&bits, &magnitude, 4);
    const int32_t length = (bits >> 23) - 126;
    return (uint32_t)(length > 0 ? length : 0);
}

/* The gain that leaves the shortest steps, tried on those of a sample of the pairs that last moved by more than a unit. */
static uint32_t choose_gain(const struct again *again, const struct records *records) {
    static const uint8_t gains[SW_NUM_GAINS] = {112, 116, 120, 124, 128, 108, 104, 96, 80, 64, 136, 144};
    struct batch sample;
    const uint64_t stride = (again->num + SW_BATCH - 1) / SW_BATCH;
    uint32_t count = 0;
    for (uint64_t i = 0; i < again->num; i += stride) {
        const uint32_t record = again->records[i];
        const uint32_t old = (uint32_t)load_element(records->old, record, SW_PREDICTED_WIDTH);
        sample.old[count] = old;
        sample.before[count] = again->before[i];
        sample.new_[count] = (uint32_t)load_element(records->new_, record, SW_PREDICTED_WIDTH);
        count += (uint16_t)(old - again->before[i] + 1) > 2;
    }
    uint32_t best = 0, lowest = UINT32_MAX;
    for (uint32_t k = 0; k < SW_NUM_GAINS; k++) {
        const float gain = (float)gains[k] / SW_GAIN_UNIT;
        uint32_t cost = 0;
        for (uint32_t i = 0; i < count; i++) {
            cost += length_of_step(sample.new_[i] - predict_bits(sample.old[i], sample.before[i], gain));
        }
        if (cost < lowest) {
            lowest = cost;
            best = k;
        }
    }
    return gains[best];
}

#endif
