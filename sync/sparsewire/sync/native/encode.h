/* From the records of a scan to a classed body: distribute to classes, then one stream after the other.
 *
 * docs/format.md, "Classed body". The streams are written into scratch, because the head that precedes them states
 * their lengths; they are small against what the scan reads.
 */
#ifndef SPARSEWIRE_ENCODE_H
#define SPARSEWIRE_ENCODE_H

#include "predict.h"
#include "scan.h"
#include "tokens.h"

/* Elements between the lists of two classes in scratch: whole words of a list are looked at at its end. */
enum { SW_GUARD = 64, SW_MAX_PARTS = 2 * SW_MAX_CLASSES,
       SW_MAX_HEAD_BYTES = 2 + 15 + 16 * (1 + 9 * 4 + 2 * (3 + SW_MAX_TOKENS)) + 28 };

struct bit_writer { uint8_t *at; uint64_t bits; uint32_t filled; };

/* Appends the `count` low bits of `value`, which has no others; count is at most 56. */
SW_INLINE void put_bits(struct bit_writer *out, uint64_t value, uint32_t count) {
    out->bits |= value << out->filled;
    out->filled += count;
    store64(out->at, out->bits);
    out->at += out->filled >> 3;
    out->bits >>= out->filled & 56;
    out->filled &= 7;
}

/* Pads to a byte and returns the length of the stream that began at `start`. */
SW_INLINE uint64_t close_bits(struct bit_writer *out, const uint8_t *start) {
    if (out->filled) *out->at++ = (uint8_t)out->bits;
    return (uint64_t)(out->at - start);
}

SW_INLINE uint8_t *put_varint(uint8_t *at, uint64_t value) {
    for (; value > 0x7F; value >>= 7) *at++ = (uint8_t)(value | 0x80);
    *at++ = (uint8_t)value;
    return at;
}

/* Everything that is written on the way, all in the caller's scratch. */
struct encoder {
    uint64_t num[SW_MAX_CLASSES];      /* changes of each class */
    uint64_t first[SW_MAX_CLASSES];    /* where its list begins in the next two */
    uint32_t *ranks;
    uint8_t *steps;
    uint32_t *gaps;                    /* of one class */
    uint16_t *tokens;                  /* of all wide classes */
    uint64_t num_tokens;
    uint32_t num_parts;                /* of wide classes: their plain steps, their predicted ones */
    uint64_t first_token[SW_MAX_PARTS + 1];
    uint16_t (*frequencies)[SW_MAX_TOKENS]; /* of each part */
    uint8_t *minus_one;                /* a word of steps -1, and one of steps 1 */
    uint8_t *plus_one;
    uint8_t *head;
    uint8_t *remainders;
    uint8_t *unary;
    uint8_t *signs;
    uint8_t *raw;
    uint8_t *exceptions;
    uint16_t *words;                   /* filled from its end */
    uint8_t *body;                     /* all streams, assembled */
    int has_last;                      /* the next ones exist */
    uint32_t *hints;                   /* aligned with ranks: SW_HINTED and the step from the prediction, or 0 */
    const uint32_t *record_hints;      /* the same by record */
    uint8_t *plain_steps;              /* of one class: those without a hint, and those from predictions */
    uint8_t *predicted_steps;
    uint8_t *hinted_steps;             /* the plain steps that predicted ones stand for */
    uint64_t words_capacity;
};

/* Lays out scratch; returns the bytes used. With `base` NULL it only counts. */
static uint64_t lay_out_encoder(struct encoder *e, uint8_t *base, uint64_t num_elements, uint64_t num_changed,
                                uint32_t width) {
    uint64_t used = 0;
    const uint64_t listed = num_changed + SW_MAX_CLASSES * SW_GUARD + SW_GUARD;
    e->ranks = take_scratch(base, &used, 4 * listed);
    e->steps = take_scratch(base, &used, width * listed);
    e->gaps = take_scratch(base, &used, 4 * listed);
    e->tokens = take_scratch(base, &used, 2 * listed);
    e->frequencies = take_scratch(base, &used, 2 * SW_MAX_TOKENS * SW_MAX_PARTS);
    e->minus_one = take_scratch(base, &used, SW_WORD * 8);
    e->plus_one = take_scratch(base, &used, SW_WORD * 8);
    const uint64_t streams_at = used;
    e->head = take_scratch(base, &used, SW_MAX_HEAD_BYTES);
    /* Rice codes of a class take no more bits than it has elements: parameter 0 reaches that. */
    e->remainders = take_scratch(base, &used, num_elements / 8 + 64);
    e->unary = take_scratch(base, &used, num_elements / 8 + 64);
    e->signs = take_scratch(base, &used, num_changed / 8 + 64);
    e->raw = take_scratch(base, &used, width * num_changed + 64);
    e->exceptions = take_scratch(base, &used, (num_changed / 256 + 2 * SW_MAX_CLASSES) * (5 + width) + 64);
    e->words = take_scratch(base, &used, 2 * num_changed + 64);
    e->words_capacity = num_changed + 32;
    e->body = take_scratch(base, &used, used - streams_at);
    if (e->has_last) {
        e->hints = take_scratch(base, &used, 4 * listed);
        e->plain_steps = take_scratch(base, &used, width * num_changed);
        e->predicted_steps = take_scratch(base, &used, width * num_changed);
        e->hinted_steps = take_scratch(base, &used, width * num_changed);
    }
    return used;
}

SW_INLINE void move_record(struct encoder *e, const struct records *records, uint64_t from, uint32_t *next, int hinted,
                           uint32_t width) {
    const uint32_t to = next[records->classes[from]]++;
    e->ranks[to] = records->ranks[from];
    if (hinted) e->hints[to] = e->record_hints[from];
    store_element(e->steps, to, load_element(records->new_, from, width) - load_element(records->old, from, width), width);
}

/* Asks for all of an array at once: the scan has driven it out of the caches, and it is used in too many places at a time
 * for the processor to see a pattern. */
SW_INLINE void recall(const void *array, uint64_t bytes) {
    const uint8_t *from = array;
    for (uint64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* Sorts ranks and steps by class, each class in the order of the records. Four quarters of the records go at once, each to
 * its own part of every list, so that no store has to wait for the place that the one before has taken. */
SW_INLINE void distribute(struct encoder *e, const struct records *records, int hinted, uint32_t width) {
    enum { QUARTERS = 4 };
    const uint64_t quarter = records->num / QUARTERS;
    const uint8_t *classes = records->classes;
    uint32_t next[QUARTERS][SW_MAX_CLASSES];
    memset(next, 0, sizeof next);
    recall(classes, records->num);
    recall(records->ranks, 4 * records->num);
    recall(records->old, width * records->num);
    recall(records->new_, width * records->num);
    recall(e->ranks, 4 * (records->num + SW_MAX_CLASSES * SW_GUARD));
    recall(e->steps, width * (records->num + SW_MAX_CLASSES * SW_GUARD));
    for (uint64_t i = 0; i < quarter; i++) {
        for (uint32_t part = 0; part < QUARTERS; part++) next[part][classes[part * quarter + i]]++;
    }
    for (uint64_t i = QUARTERS * quarter; i < records->num; i++) next[QUARTERS - 1][classes[i]]++;
    uint32_t first = 0;
    for (uint32_t class_ = 0; class_ < SW_MAX_CLASSES; class_++) {
        e->first[class_] = first;
        for (uint32_t part = 0; part < QUARTERS; part++) {
            const uint32_t count = next[part][class_];
            next[part][class_] = first;
            first += count;
        }
        e->num[class_] = first - e->first[class_];
        first += SW_GUARD;
    }
    for (uint64_t i = 0; i < quarter; i++) {
        for (uint32_t part = 0; part < QUARTERS; part++) move_record(e, records, part * quarter + i, next[part], hinted, width);
    }
    for (uint64_t i = QUARTERS * quarter; i < records->num; i++) move_record(e, records, i, next[QUARTERS - 1], hinted, width);
}

/* Gaps between changed ranks; returns how many. */
static uint64_t plain_gaps(uint32_t *restrict gaps, const uint32_t *restrict ranks, uint64_t num) {
    gaps[0] = ranks[0];
    for (uint64_t i = 1; i < num; i++) gaps[i] = ranks[i] - ranks[i - 1] - 1;
    return num;
}

/* Changed elements before each unchanged one; returns how many. */
static uint64_t inverse_gaps(uint32_t *gaps, const uint32_t *ranks, uint64_t num, uint64_t size) {
    uint64_t count = 0;
    uint32_t run = 0;
    uint64_t expected = 0; /* the rank that follows the last change */
    for (uint64_t i = 0; i <= num; i++) {
        const uint64_t rank = i < num ? ranks[i] : size;
        for (; expected < rank; expected++, run = 0) gaps[count++] = run;
        run++;
        expected = rank + 1;
    }
    return count;
}

/* All gaps of a class add up to less than 2^24. */
static uint32_t sum_shifted(const uint32_t *gaps, uint64_t count, uint32_t shift) {
    uint32_t sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += gaps[i] >> shift;
    return sum;
}

/* The smallest parameter that the next one does not improve; sum(r) - sum(r + 1) falls with r, so any start will do. */
static uint32_t choose_parameter(const uint32_t *gaps, uint64_t count, uint32_t *num_zeros) {
    uint32_t r = 0;
    uint32_t here = sum_shifted(gaps, count, 0);
    if (count && here / count) {
        r = highest_bit(here / count);
        here = sum_shifted(gaps, count, r);
    }
    uint32_t above = sum_shifted(gaps, count, r + 1);
    if (here - above > count) {
        do {
            here = above;
            r++;
            above = sum_shifted(gaps, count, r + 1);
        } while (here - above > count);
    } else {
        while (r) {
            const uint32_t below = sum_shifted(gaps, count, r - 1);
            if (below - here > count) break;
            here = below;
            r--;
        }
    }
    *num_zeros = here;
    return r;
}

static void put_remainders(struct bit_writer *out, const uint32_t *gaps, uint64_t count, uint32_t r) {
    const uint64_t mask = (UINT64_C(1) << r) - 1;
    struct bit_writer local = *out;
    uint64_t i = 0;
    if (!r) return;
    for (; i + 2 <= count; i += 2) put_bits(&local, (gaps[i] & mask) | (gaps[i + 1] & mask) << r, 2 * r);
    if (i < count) put_bits(&local, gaps[i] & mask, r);
    *out = local;
}

static void put_unary(struct bit_writer *out, const uint32_t *gaps, uint64_t count, uint32_t r) {
    struct bit_writer local = *out;
    uint64_t i = 0;
    while (i < count) {
        for (; i + 3 <= count; i += 3) {
            const uint32_t q0 = gaps[i] >> r, q1 = gaps[i + 1] >> r, q2 = gaps[i + 2] >> r;
            if (SW_UNLIKELY((q0 | q1 | q2) > 15)) break;
            const uint64_t bits = UINT64_C(1) << q0 | UINT64_C(2) << (q0 + q1) | UINT64_C(4) << (q0 + q1 + q2);
            put_bits(&local, bits, q0 + q1 + q2 + 3);
        }
        /* Once for what the fast loop left, then back to it. */
        for (uint64_t stop = i + 3 < count ? i + 3 : count; i < stop; i++) {
            uint32_t zeros = gaps[i] >> r;
            for (; zeros > 48; zeros -= 48) put_bits(&local, 0, 48);
            put_bits(&local, UINT64_C(1) << zeros, zeros + 1);
        }
    }
    *out = local;
}

/* Which of the up to 64 steps from `at` on are -1 or neither -1 nor 1. */
SW_INLINE void compare_steps(const struct encoder *e, uint64_t at, uint64_t left, uint64_t *minus, uint64_t *other,
                             uint32_t width) {
    const uint8_t *steps = e->steps + at * width;
    const uint64_t valid = left >= 64 ? ~UINT64_C(0) : low_bits(~UINT64_C(0), (uint32_t)left);
    const uint64_t not_minus = changed_in_word(steps, e->minus_one, width);
    *minus = ~not_minus & valid;
    *other = not_minus & changed_in_word(steps, e->plus_one, width) & valid;
}

/* Steps of a class that are neither 1 nor -1, or any number beyond the limit once it is passed. */
SW_INLINE uint64_t count_exceptions(const struct encoder *e, uint64_t first, uint64_t num, uint64_t limit, uint32_t width) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < num && count <= limit; i += 64) {
        uint64_t minus, other;
        compare_steps(e, first + i, num - i, &minus, &other, width);
        count += popcount64(other);
    }
    return count;
}

SW_INLINE uint8_t *put_unit_steps(const struct encoder *e, uint64_t first, uint64_t num, struct bit_writer *signs,
                                  uint8_t *exceptions, uint32_t width) {
    uint64_t expected = 0;
    for (uint64_t i = 0; i < num; i += 64) {
        uint64_t minus, other;
        compare_steps(e, first + i, num - i, &minus, &other, width);
        const uint32_t count = num - i >= 64 ? 64 : (uint32_t)(num - i);
        const uint32_t half = count < 32 ? count : 32;
        put_bits(signs, minus & 0xFFFFFFFFu, half);
        put_bits(signs, minus >> 32, count - half);
        for (; SW_UNLIKELY(other != 0); other &= other - 1) {
            const uint64_t ordinal = i + trailing_zeros(other);
            exceptions = put_varint(exceptions, ordinal - expected);
            store_element(exceptions, 0, load_element(e->steps, first + ordinal, width), width);
            exceptions += width;
            expected = ordinal + 1;
        }
    }
    return exceptions;
}

/* A step of a part as a token: those from predictions may be 0, and come two later. */
SW_INLINE struct token token_in_part(uint64_t step, int predicted, uint32_t width) {
    struct token found = token_of(step, width);
    if (predicted) found.token = step ? found.token + 2 : 0;
    return found;
}

/* Adds the tokens of a part to the common list, raw bits to their stream, and the table to the head; fills the counts of all
 * tokens there are. */
SW_INLINE uint8_t *put_part(struct encoder *e, const uint8_t *steps, uint64_t num, int predicted, struct bit_writer *raw,
                            uint8_t *head, uint32_t *counts, uint32_t width) {
    const uint32_t num_tokens = num_tokens_of(width) + (predicted ? 2 : 0);
    uint32_t counted[2][SW_MAX_TOKENS];
    uint8_t codes[SW_MAX_TOKENS];
    uint16_t *tokens = e->tokens + e->num_tokens;
    struct bit_writer local = *raw;
    memset(counted, 0, sizeof counted);
    for (uint64_t i = 0; i < num; i++) {
        const struct token found = token_in_part(load_element(steps, i, width), predicted, width);
        tokens[i] = (uint16_t)found.token;
        counted[i & 1][found.token]++;
        if (width == 8 && found.num_raw > 32) {
            put_bits(&local, found.raw & 0xFFFFFFFFu, 32);
            put_bits(&local, found.raw >> 32, found.num_raw - 32);
        } else {
            put_bits(&local, found.raw, found.num_raw);
        }
    }
    *raw = local;
    for (uint32_t token = 0; token < num_tokens; token++) counts[token] = counted[0][token] + counted[1][token];
    const uint32_t highest = codes_of_counts(counts, num_tokens, num, codes);
    frequencies_of_codes(codes, num_tokens, e->frequencies[e->num_parts]);
    e->num_tokens += num;
    e->first_token[++e->num_parts] = e->num_tokens;
    head = put_varint(head, highest);
    struct bit_writer table = {head, 0, 0};
    for (uint32_t token = 0; token <= highest; token++) put_bits(&table, codes[token] != 0, 1);
    for (uint32_t token = 0; token <= highest; token++) {
        if (codes[token]) put_bits(&table, codes[token], 5);
    }
    return head + close_bits(&table, head);
}

/* Writes the steps of a wide class in two parts, plain and predicted, if that is smaller; returns the head, or NULL and leaves
 * everything as it was. */
SW_INLINE uint8_t *put_predicted(struct encoder *e, uint32_t class_, struct bit_writer *raw, uint8_t *head, uint32_t width) {
    const uint64_t num = e->num[class_];
    const uint32_t *hints = e->hints + e->first[class_];
    const uint8_t *steps = e->steps + e->first[class_] * width;
    const uint32_t num_tokens = num_tokens_of(width);
    const uint64_t tokens_before = e->num_tokens;
    const uint32_t parts_before = e->num_parts;
    struct bit_writer local = *raw;
    uint32_t whole[2][SW_MAX_TOKENS], predicted[SW_MAX_TOKENS];
    uint64_t num_plain = 0, num_predicted = 0;
    for (uint64_t i = 0; i < num; i++) {
        const uint32_t hinted = hints[i] >> 16;
        const uint64_t step = load_element(steps, i, width);
        /* All written, some kept: which it is cannot be foreseen. */
        store_element(e->plain_steps, num_plain, step, width);
        store_element(e->predicted_steps, num_predicted, hints[i], width);
        store_element(e->hinted_steps, num_predicted, step, width);
        num_plain += !hinted;
        num_predicted += hinted;
    }
    if (!num_predicted) return NULL;
    memset(whole, 0, sizeof whole);
    uint8_t *const begin = head;
    head = put_varint(head, num_predicted);
    uint64_t cost = 256 * 8 * (uint64_t)(head - begin + 1);
    if (num_plain) {
        head = put_part(e, e->plain_steps, num_plain, 0, &local, head, whole[0], width);
        cost += cost_of_part(whole[0], num_plain, 0, width);
    }
    head = put_part(e, e->predicted_steps, num_predicted, 1, &local, head, predicted, width);
    cost += cost_of_part(predicted, num_predicted, 1, width);
    for (uint64_t i = 0; i < num_predicted; i++) {
        whole[1][token_of(load_element(e->hinted_steps, i, width), width).token]++;
    }
    for (uint32_t token = 0; token < num_tokens; token++) whole[0][token] += whole[1][token];
    if (cost >= cost_of_part(whole[0], num, 0, width)) {
        e->num_tokens = tokens_before;
        e->num_parts = parts_before;
        return NULL;
    }
    *raw = local;
    return head;
}

/* Codes all tokens from the last to the first; returns the first word in reading order. */
static uint16_t *put_tokens(const struct encoder *e, uint32_t *states) {
    struct { uint64_t reciprocal; uint32_t frequency, bias, complement; } table[SW_MAX_TOKENS];
    uint16_t *word = e->words + e->words_capacity;
    for (int state = 0; state < SW_STATES; state++) states[state] = SW_LOWEST_STATE;
    for (uint32_t part = e->num_parts; part-- > 0;) {
        uint32_t below = 0;
        for (uint32_t token = 0; token < SW_MAX_TOKENS; token++) {
            const uint32_t frequency = e->frequencies[part][token];
            if (!frequency) continue;
            /* x / frequency for x below 2^32 is the upper half of a product; for 1 it comes out as x - 1. */
            table[token].reciprocal = frequency == 1 ? ~UINT64_C(0) : ~UINT64_C(0) / frequency + 1;
            table[token].bias = frequency == 1 ? below + SW_FREQUENCIES - 1 : below;
            table[token].frequency = frequency;
            table[token].complement = SW_FREQUENCIES - frequency;
            below += frequency;
        }
        for (uint64_t i = e->first_token[part + 1]; i-- > e->first_token[part];) {
            const uint32_t token = e->tokens[i];
            const uint32_t frequency = table[token].frequency;
            uint32_t x = states[i % SW_STATES];
            const uint32_t full = (x >> (32 - SW_FREQUENCY_BITS)) >= frequency;
            word[-1] = (uint16_t)x;
            word -= full;
            x >>= full << 4;
            const uint32_t quotient = (uint32_t)((__uint128_t)x * table[token].reciprocal >> 64);
            states[i % SW_STATES] = x + table[token].bias + quotient * table[token].complement;
        }
    }
    return word;
}

SW_INLINE uint8_t *put_block(uint8_t *to, const void *from, uint64_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

/* Writes the body of `records` to scratch; returns its length. */
SW_INLINE uint64_t write_body(struct encoder *e, const struct records *records, const struct counts *sizes,
                              const uint8_t *cuts, uint32_t num_classes, uint32_t gain, uint32_t width) {
    e->num_tokens = e->num_parts = 0;
    e->first_token[0] = 0;
    distribute(e, records, gain != 0, width);
    for (uint32_t i = 0; i < SW_WORD; i++) {
        store_element(e->minus_one, i, ~UINT64_C(0), width);
        store_element(e->plus_one, i, 1, width);
    }
    uint8_t *head = e->head;
    *head++ = 0;
    *head++ = (uint8_t)num_classes;
    head = put_block(head, cuts, num_classes - 1);
    struct bit_writer remainders = {e->remainders, 0, 0};
    struct bit_writer unary = {e->unary, 0, 0};
    struct bit_writer signs = {e->signs, 0, 0};
    struct bit_writer raw = {e->raw, 0, 0};
    uint8_t *exceptions = e->exceptions;
    uint32_t any_predicted = 0;
    for (uint32_t class_ = 0; class_ < num_classes; class_++) {
        const uint64_t num = e->num[class_];
        const uint64_t unchanged = sizes->of[class_] - num;
        head = put_varint(head, num);
        if (!num) continue;
        const uint32_t inverse = 8 * unchanged < 5 * num;
        const uint32_t *ranks = e->ranks + e->first[class_];
        const uint64_t num_gaps =
            inverse ? inverse_gaps(e->gaps, ranks, num, sizes->of[class_]) : plain_gaps(e->gaps, ranks, num);
        uint32_t num_zeros;
        const uint32_t r = choose_parameter(e->gaps, num_gaps, &num_zeros);
        put_remainders(&remainders, e->gaps, num_gaps, r);
        put_unary(&unary, e->gaps, num_gaps, r);
        const uint64_t limit = num / 256 > 2 ? num / 256 : 2;
        const uint64_t num_exceptions = count_exceptions(e, e->first[class_], num, limit, width);
        const uint32_t wide = num_exceptions > 2 && 256 * num_exceptions > num;
        uint8_t *const form = head++;
        *form = (uint8_t)(r | inverse << 5 | wide << 6 | (uint32_t)(!wide && num_exceptions) << 7);
        if (inverse) head = put_varint(head, unchanged);
        if (wide) {
            uint32_t counts[SW_MAX_TOKENS];
            uint8_t *const after =
                width == SW_PREDICTED_WIDTH && gain ? put_predicted(e, class_, &raw, head, width) : NULL;
            if (after) {
                any_predicted = 1;
                *form |= 1 << 7;
                head = after;
            } else {
                head = put_part(e, e->steps + e->first[class_] * width, num, 0, &raw, head, counts, width);
            }
        } else {
            if (num_exceptions) head = put_varint(head, num_exceptions);
            exceptions = put_unit_steps(e, e->first[class_], num, &signs, exceptions, width);
        }
    }
    const uint64_t remainder_bytes = close_bits(&remainders, e->remainders);
    const uint64_t unary_bytes = close_bits(&unary, e->unary);
    const uint64_t sign_bytes = close_bits(&signs, e->signs);
    const uint64_t raw_bytes = close_bits(&raw, e->raw);
    const uint64_t exception_bytes = (uint64_t)(exceptions - e->exceptions);
    uint32_t states[SW_STATES];
    const uint16_t *words = e->words + e->words_capacity;
    if (any_predicted) {
        e->head[0] = SW_PREDICTED_FLAG;
        *head++ = (uint8_t)gain;
    }
    head = put_varint(head, unary_bytes);
    if (e->num_parts) {
        words = put_tokens(e, states);
        head = put_varint(head, (uint64_t)(e->words + e->words_capacity - words));
        head = put_varint(head, raw_bytes);
    }
    const uint64_t head_bytes = (uint64_t)(head - e->head);
    const uint64_t word_bytes = 2 * (uint64_t)(e->words + e->words_capacity - words);
    const uint64_t token_bytes = e->num_parts ? sizeof states + word_bytes : 0;
    const uint64_t total =
        head_bytes + remainder_bytes + unary_bytes + sign_bytes + token_bytes + raw_bytes + exception_bytes;
    uint8_t *to = put_block(e->body, e->head, head_bytes);
    to = put_block(to, e->remainders, remainder_bytes);
    to = put_block(to, e->unary, unary_bytes);
    to = put_block(to, e->signs, sign_bytes);
    if (e->num_parts) {
        to = put_block(to, states, sizeof states);
        to = put_block(to, words, word_bytes);
    }
    to = put_block(to, e->raw, raw_bytes);
    put_block(to, e->exceptions, exception_bytes);
    return total;
}

SW_INLINE int64_t encode_segments(struct sparsewire_encode *job, uint32_t width) {
    const struct segments segments = {job->num_segments, job->table};
    struct classes classes;
    struct records records;
    struct counts sizes;
    struct encoder e;
    uint64_t num_elements = 0;
    if (!prepare_classes(&classes, job->cuts, job->num_cuts)) return SW_DAMAGED_HEAD;
    for (uint64_t i = 0; i < segments.num; i++) num_elements += segment_row(&segments, SW_COUNT)[i];
    if (num_elements > SW_MAX_ELEMENTS) return SW_DAMAGED_HEAD;
    const struct last_change last = {job->num_last, job->last_places, job->last_bits};
    struct again again;
    e.has_last = width == SW_PREDICTED_WIDTH && last.places != NULL;
    const uint64_t capacity = records_capacity(&segments, job->crowded);
    const uint64_t records_bytes = lay_out_records(&records, job->scratch, capacity, width, 1);
    const uint64_t again_bytes = e.has_last ? lay_out_again(&again, NULL, capacity) : 0;
    const uint64_t needed = records_bytes + again_bytes + lay_out_encoder(&e, NULL, num_elements, capacity, width);
    if (needed > job->scratch_bytes) {
        job->scratch_bytes = needed;
        return SW_TOO_SMALL;
    }
    scan_segments(&segments, &records, &sizes, &classes, job->crowded, width);
    finish_records(&segments, &records, 0, width);
    job->num_changed = records.num;
    job->indices_at = (uint64_t)((uint8_t *)records.indices - job->scratch);
    job->old_at = (uint64_t)(records.old - job->scratch);
    job->new_at = (uint64_t)(records.new_ - job->scratch);
    job->body_at = job->body_bytes = 0;
    if (records.num) {
        uint32_t gain = 0;
        lay_out_encoder(&e, job->scratch + records_bytes + again_bytes, num_elements, records.num, width);
        if (e.has_last) {
            lay_out_again(&again, job->scratch + records_bytes, records.num);
            find_again(&again, &segments, &records, 0, &last);
            if (again.num) {
                gain = choose_gain(&again, &records);
                give_hints(&again, &records, gain, 1);
                e.record_hints = again.hints;
            }
        }
        job->body_bytes = write_body(&e, &records, &sizes, job->cuts, classes.num_classes, gain, width);
        job->body_at = (uint64_t)(e.body - job->scratch);
    }
    return 0;
}

#endif
