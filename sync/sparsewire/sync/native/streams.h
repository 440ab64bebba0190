/* What the bytes of a classed body say without the base: head, ranks and steps of every class.
 *
 * docs/format.md, "Classed body". Nothing that the bytes state is used before it is bounded: the head gives every length,
 * scratch is laid out from it, and streams are read from a padded copy, so that no load leaves it. What only the base
 * can refute is noted, and reported after all that the bytes alone show, as the NumPy form does.
 */
#ifndef SPARSEWIRE_STREAMS_H
#define SPARSEWIRE_STREAMS_H

#include "classes.h"
#include "predict.h"
#include "tokens.h"

enum { SW_LIST_GUARD = 64, SW_BODY_PADDING = 64, SW_MAX_PARAMETER = 24 };

struct reader { const uint8_t *at; const uint8_t *end; int failed; };

SW_INLINE const uint8_t *take(struct reader *in, uint64_t bytes) {
    if (bytes > (uint64_t)(in->end - in->at)) {
        in->failed = 1;
        return in->at;
    }
    const uint8_t *from = in->at;
    in->at += bytes;
    return from;
}

static uint64_t take_byte(struct reader *in) {
    const uint8_t *from = take(in, 1);
    return in->failed ? 0 : *from;
}

static uint64_t take_varint(struct reader *in) {
    uint64_t value = 0;
    for (uint32_t place = 0; place < 9; place++) {
        const uint64_t byte = take_byte(in);
        value |= (byte & 0x7F) << (7 * place);
        if (byte < 0x80) return value;
    }
    in->failed = 1;
    return 0;
}

/* The bits of a field of up to 57 bits; eight bytes from there on must be readable. */
SW_INLINE uint64_t field_at(const uint8_t *stream, uint64_t bit, uint64_t mask) {
    return (load64(stream + (bit >> 3)) >> (bit & 7)) & mask;
}

SW_INLINE int padding_is_zero(const uint8_t *stream, uint64_t num_bits) {
    return !(num_bits & 7) || !(stream[num_bits >> 3] >> (num_bits & 7));
}

struct class_entry {
    uint64_t num_changed, num_unchanged, num_exceptions, num_gaps;
    uint64_t num_predicted; /* the last of its steps are those from predictions */
    uint64_t first;         /* where its list begins */
    uint32_t parameter;
    uint8_t inverse, wide;
};

/* Tokens that share a table: the plain steps of a wide class, or its predicted ones. */
struct token_part { uint64_t num; uint32_t class_; int predicted; };

enum { SW_MAX_TOKEN_PARTS = 2 * SW_MAX_CLASSES };

struct decoder {
    struct class_entry entry[SW_MAX_CLASSES];
    struct token_part parts[SW_MAX_TOKEN_PARTS];
    uint16_t frequencies[SW_MAX_TOKEN_PARTS][SW_MAX_TOKENS];
    uint32_t num_parts;
    uint32_t gain; /* 0 when nothing is predicted */
    struct classes classes;
    uint32_t num_classes;
    uint64_t num_gaps, num_wide, num_unchanged;
    uint64_t remainder_bytes, unary_bytes, sign_bytes, num_words, raw_bytes;
    uint64_t head_bytes;
    uint32_t wrong_base;
    const uint8_t *remainders, *unary, *signs, *states, *words, *raw, *exceptions, *end;
    /* Scratch. */
    uint8_t *copy;
    uint32_t *ones;      /* place of every one bit of the unary stream */
    uint32_t *ranks;     /* of changed elements, class after class, each list followed by a guard of the highest number */
    uint32_t *unchanged; /* ranks of one inverse class */
    uint8_t *steps;      /* aligned with ranks */
    uint16_t *tokens;
};

/* Reads a token table into frequencies. */
static int read_table(struct reader *in, uint16_t *frequencies, uint32_t num_tokens) {
    uint8_t codes[SW_MAX_TOKENS + 8];
    uint8_t table[(6 * SW_MAX_TOKENS + 7) / 8 + 8];
    memset(codes, 0, sizeof codes);
    memset(table, 0, sizeof table);
    const uint64_t highest = take_varint(in);
    if (in->failed || highest >= num_tokens) return 0;
    const uint64_t presence_bytes = (highest + 8) / 8;
    if (presence_bytes > (uint64_t)(in->end - in->at)) return 0;
    memcpy(table, in->at, presence_bytes);
    uint64_t num_present = 0;
    for (uint64_t token = 0; token <= highest; token++) num_present += (table[token >> 3] >> (token & 7)) & 1;
    const uint64_t num_bits = highest + 1 + 5 * num_present;
    const uint8_t *from = take(in, (num_bits + 7) / 8);
    if (in->failed) return 0;
    memcpy(table, from, (num_bits + 7) / 8);
    if (!padding_is_zero(table, num_bits) || !field_at(table, highest, 1)) return 0;
    uint64_t bit = highest + 1;
    for (uint64_t token = 0; token <= highest; token++) {
        if (!field_at(table, token, 1)) continue;
        codes[token] = (uint8_t)field_at(table, bit, 31);
        if (!codes[token]) return 0;
        bit += 5;
    }
    frequencies_of_codes(codes, num_tokens, frequencies);
    return 1;
}

/* Adds a part of a wide class, whose table comes next in the head. */
static int read_part(struct reader *in, struct decoder *d, uint32_t class_, uint64_t num, int predicted, uint32_t width) {
    uint16_t *frequencies = d->frequencies[d->num_parts];
    d->parts[d->num_parts++] = (struct token_part){num, class_, predicted};
    if (!read_table(in, frequencies, num_tokens_of(width) + (predicted ? 2 : 0))) return 0;
    return !predicted || !frequencies[1];
}

/* Reads and bounds the head; the streams that follow are bounded too, but not looked at. */
static int64_t read_head(struct decoder *d, const uint8_t *body, uint64_t body_bytes, uint64_t num_changed,
                         uint64_t num_elements, uint32_t width) {
    struct reader in = {body, body + body_bytes, 0};
    const uint64_t flags = take_byte(&in);
    const uint64_t num_classes = take_byte(&in);
    uint64_t total = 0, remainder_bits = 0;
    if (in.failed) return SW_DAMAGED_HEAD;
    if (flags & ~(uint64_t)SW_PREDICTED_FLAG || (flags && width != SW_PREDICTED_WIDTH)) return SW_UNSUPPORTED;
    if (num_classes < 1 || num_classes > SW_MAX_CLASSES || num_elements > SW_MAX_ELEMENTS) return SW_DAMAGED_HEAD;
    d->num_classes = (uint32_t)num_classes;
    const uint8_t *cuts = take(&in, num_classes - 1);
    if (in.failed || !prepare_classes(&d->classes, cuts, (uint32_t)num_classes - 1)) return SW_DAMAGED_HEAD;
    d->num_gaps = d->num_wide = d->num_unchanged = 0;
    d->num_parts = d->gain = 0;
    int any_predicted = 0;
    for (uint32_t class_ = 0; class_ < num_classes; class_++) {
        struct class_entry *entry = &d->entry[class_];
        memset(entry, 0, sizeof *entry);
        entry->first = total + class_ * SW_LIST_GUARD;
        entry->num_changed = take_varint(&in);
        if (in.failed) return SW_DAMAGED_HEAD;
        if (!entry->num_changed) continue;
        const uint64_t form = take_byte(&in);
        entry->parameter = form & 31;
        entry->inverse = form >> 5 & 1;
        entry->wide = form >> 6 & 1;
        if (entry->inverse) entry->num_unchanged = take_varint(&in);
        if (form >> 7 && entry->wide) {
            entry->num_predicted = take_varint(&in);
            if (!flags || !entry->num_predicted || entry->num_predicted > entry->num_changed) return SW_DAMAGED_HEAD;
            any_predicted = 1;
        } else if (form >> 7) {
            entry->num_exceptions = take_varint(&in);
            const uint64_t most = entry->num_changed / 256 > 2 ? entry->num_changed / 256 : 2;
            if (!entry->num_exceptions || entry->num_exceptions > entry->num_changed ||
                entry->num_exceptions > most) {
                return SW_DAMAGED_HEAD;
            }
        }
        if (in.failed || entry->parameter > SW_MAX_PARAMETER || entry->num_changed > num_elements ||
            entry->num_unchanged > num_elements) {
            return SW_DAMAGED_HEAD;
        }
        if (entry->wide) {
            const uint64_t num_plain = entry->num_changed - entry->num_predicted;
            if (num_plain && !read_part(&in, d, class_, num_plain, 0, width)) return SW_DAMAGED_TOKENS;
            if (entry->num_predicted && !read_part(&in, d, class_, entry->num_predicted, 1, width)) return SW_DAMAGED_TOKENS;
            d->num_wide += entry->num_changed;
        }
        entry->num_gaps = entry->inverse ? entry->num_unchanged : entry->num_changed;
        total += entry->num_changed;
        d->num_gaps += entry->num_gaps;
        d->num_unchanged += entry->num_unchanged;
        remainder_bits += entry->num_gaps * entry->parameter;
        if (total + d->num_unchanged > num_elements) return SW_DAMAGED_HEAD;
    }
    if (total != num_changed) return SW_DAMAGED_HEAD;
    if (flags) d->gain = (uint32_t)take_byte(&in);
    if (any_predicted != (flags != 0) || (flags && !d->gain)) return SW_DAMAGED_HEAD;
    d->unary_bytes = take_varint(&in);
    d->num_words = d->num_wide ? take_varint(&in) : 0;
    d->raw_bytes = d->num_wide ? take_varint(&in) : 0;
    d->remainder_bytes = (remainder_bits + 7) / 8;
    d->sign_bytes = (num_changed - d->num_wide + 7) / 8;
    /* What no writer exceeds: a parameter saves its remainders or is 0, and all gaps lie within the elements. */
    if (in.failed || remainder_bits > num_elements || d->unary_bytes > (d->num_gaps + num_elements + 7) / 8) {
        return SW_DAMAGED_HEAD;
    }
    d->head_bytes = (uint64_t)(in.at - body);
    d->remainders = take(&in, d->remainder_bytes);
    d->unary = take(&in, d->unary_bytes);
    d->signs = take(&in, d->sign_bytes);
    d->states = take(&in, d->num_wide ? 4 * SW_STATES : 0);
    if (d->num_words > body_bytes) return SW_DAMAGED_HEAD;
    d->words = take(&in, 2 * d->num_words);
    d->raw = take(&in, d->raw_bytes);
    d->exceptions = in.at;
    d->end = in.end;
    if (in.failed || !padding_is_zero(d->remainders, remainder_bits) ||
        !padding_is_zero(d->signs, num_changed - d->num_wide)) {
        return SW_DAMAGED_HEAD;
    }
    return 0;
}

/* Points the streams at the padded copy of the body. */
static void move_streams(struct decoder *d, const uint8_t *body) {
    const uint8_t **const streams[] = {&d->remainders, &d->unary, &d->signs, &d->states,
                                       &d->words,      &d->raw,   &d->exceptions, &d->end};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) *streams[i] = d->copy + (*streams[i] - body);
}

static uint64_t lay_out_decoder(struct decoder *d, uint8_t *base, uint64_t body_bytes, uint64_t num_changed,
                                uint32_t width) {
    uint64_t used = 0;
    const uint64_t listed = num_changed + (SW_MAX_CLASSES + 1) * SW_LIST_GUARD;
    d->copy = take_scratch(base, &used, body_bytes + SW_BODY_PADDING);
    d->ones = take_scratch(base, &used, 4 * (d->num_gaps + 64));
    d->ranks = take_scratch(base, &used, 4 * listed);
    d->unchanged = take_scratch(base, &used, 4 * (d->num_unchanged + 64));
    d->steps = take_scratch(base, &used, width * listed);
    d->tokens = take_scratch(base, &used, 2 * (d->num_wide + 64));
    return used;
}

/* Lists the one bits of the unary stream; there must be as many as gaps, the last of them in the last byte. */
static int read_unary(struct decoder *d) {
    uint64_t found = 0;
    uint32_t *ones = d->ones;
    if (!d->num_gaps) return d->unary_bytes == 0;
    if (!d->unary_bytes || d->unary_bytes > UINT32_MAX / 8 || !d->unary[d->unary_bytes - 1]) return 0;
    for (uint64_t at = 0; at < d->unary_bytes; at += 8) {
        uint64_t word = load64(d->unary + at);
        const uint64_t left = d->unary_bytes - at;
        if (left < 8) word &= (UINT64_C(1) << (8 * left)) - 1;
        const uint32_t count = popcount64(word);
        if (found + count > d->num_gaps) return 0;
        const uint32_t origin = (uint32_t)(8 * at);
#if defined(SW_AVX512)
        const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        uint32_t *to = ones + found;
        for (uint32_t part = 0; part < 64; part += 16) {
            const __mmask16 bits = (__mmask16)(word >> part);
            const __m512i places = _mm512_add_epi32(ramp, _mm512_set1_epi32((int32_t)(origin + part)));
            _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(bits, places));
            to += popcount64(bits);
        }
#else
        uint32_t *to = ones + found;
        /* In groups of four without a branch each: the list has room for what is written beyond its end. */
        for (uint32_t done = 0; done < count; done += 4) {
            for (uint32_t i = 0; i < 4; i++) {
                to[done + i] = origin + trailing_zeros(word | UINT64_C(1) << 63);
                word &= word - 1;
            }
        }
#endif
        found += count;
    }
    return found == d->num_gaps;
}

/* Ranks of changed elements of inverse classes: all that are not among the unchanged ones. */
static void complement_ranks(uint32_t *ranks, const uint32_t *unchanged, uint64_t num_unchanged, uint64_t size) {
    uint64_t count = 0;
    uint64_t rank = 0;
    for (uint64_t i = 0; i <= num_unchanged; i++) {
        const uint64_t stop = i < num_unchanged ? unchanged[i] : size;
        while (rank < stop) ranks[count++] = (uint32_t)rank++;
        rank = stop + 1;
    }
}

static void read_ranks(struct decoder *d, uint64_t num_elements) {
    uint64_t bit = 0;
    const uint32_t *ones = d->ones;
    uint32_t last_one = UINT32_MAX;
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) {
        const struct class_entry *entry = &d->entry[class_];
        uint32_t *to = entry->inverse ? d->unchanged : d->ranks + entry->first;
        const uint32_t r = entry->parameter;
        const uint64_t mask = (UINT64_C(1) << r) - 1;
        /* Sums of at most 2^24 gaps below 2^53: they cannot wrap, and the last shows whether any is out of bounds. */
        uint64_t next = 0;
        for (uint64_t i = 0; i < entry->num_gaps; i++) {
            const uint64_t zeros = (uint32_t)(ones[i] - last_one - 1);
            next += (zeros << r | field_at(d->remainders, bit, mask)) + 1;
            to[i] = (uint32_t)(next - 1);
            last_one = ones[i];
            bit += r;
        }
        ones += entry->num_gaps;
        const uint64_t size = entry->inverse ? entry->num_changed + entry->num_unchanged : num_elements;
        if (next > size) {
            d->wrong_base = 1;
        } else if (entry->inverse) {
            complement_ranks(d->ranks + entry->first, d->unchanged, entry->num_unchanged, size);
        }
        uint32_t *guard = d->ranks + entry->first + entry->num_changed;
        for (uint32_t i = 0; i < SW_LIST_GUARD; i++) guard[i] = UINT32_MAX;
    }
}

SW_INLINE int read_unit_steps(struct decoder *d, uint32_t width) {
    uint64_t bit = 0;
    struct reader in = {d->exceptions, d->end, 0};
    const uint64_t minus_one = ~UINT64_C(0) >> (64 - 8 * width);
    for (uint32_t class_ = 0; class_ < d->num_classes; class_++) {
        const struct class_entry *entry = &d->entry[class_];
        if (entry->wide) continue;
        uint8_t *steps = d->steps + entry->first * width;
        for (uint64_t i = 0; i < entry->num_changed; i += 32) {
            /* Lists have a guard, so whole groups may be written. */
            const uint32_t signs = (uint32_t)field_at(d->signs, bit + i, UINT32_MAX);
#if defined(SW_AVX512)
            const __m512i one8 = _mm512_set1_epi8(1), one16 = _mm512_set1_epi16(1), one32 = _mm512_set1_epi32(1),
                          one64 = _mm512_set1_epi64(1), minus = _mm512_set1_epi8(-1);
            uint8_t *to = steps + i * width;
            switch (width) {
            case 1: _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(_mm512_mask_mov_epi8(one8, signs, minus))); break;
            case 2: _mm512_storeu_si512(to, _mm512_mask_mov_epi16(one16, signs, minus)); break;
            case 4:
                for (uint32_t part = 0; part < 2; part++)
                    _mm512_storeu_si512(to + 64 * part, _mm512_mask_mov_epi32(one32, (__mmask16)(signs >> 16 * part), minus));
                break;
            default:
                for (uint32_t part = 0; part < 4; part++)
                    _mm512_storeu_si512(to + 64 * part, _mm512_mask_mov_epi64(one64, (__mmask8)(signs >> 8 * part), minus));
            }
#else
            for (uint32_t j = 0; j < 32; j++) {
                store_element(steps, i + j, UINT64_C(1) - 2 * (uint64_t)(signs >> j & 1), width);
            }
#endif
        }
        bit += entry->num_changed;
        uint64_t ordinal = 0;
        for (uint64_t i = 0; i < entry->num_exceptions; i++) {
            const uint64_t distance = take_varint(&in);
            const uint8_t *from = take(&in, width);
            if (in.failed || distance >= entry->num_changed - ordinal) return 0;
            ordinal += distance;
            const uint64_t step = load_element(from, 0, width);
            if (step == 0 || step == 1 || step == minus_one || load_element(steps, ordinal, width) != 1) return 0;
            store_element(steps, ordinal, step, width);
            ordinal++;
        }
    }
    return in.at == in.end;
}

/* Decodes tokens i .. stop - 1 with one table; words are bounded by the caller at every eighth token. */
struct token_stream { uint32_t state[SW_STATES]; const uint8_t *word; const uint8_t *end; };

SW_INLINE int read_tokens(struct decoder *d, uint32_t width) {
    struct token_stream in;
    uint32_t slots[SW_FREQUENCIES];  /* frequency - 1, offset in the token's range, token, from the highest bits down */
    uint8_t high[SW_FREQUENCIES];    /* what of the token does not fit above; only elements of 8 bytes need it */
    memcpy(in.state, d->states, sizeof in.state);
    in.word = d->words;
    in.end = d->words + 2 * d->num_words;
    for (uint32_t state = 0; state < SW_STATES; state++) {
        if (in.state[state] < SW_LOWEST_STATE) return 0;
    }
    uint64_t at = 0;
    for (uint32_t part = 0; part < d->num_parts; part++) {
        const uint32_t num_tokens = num_tokens_of(width) + (d->parts[part].predicted ? 2 : 0);
        uint32_t slot = 0;
        for (uint32_t token = 0; token < num_tokens; token++) {
            const uint32_t frequency = d->frequencies[part][token];
            for (uint32_t offset = 0; offset < frequency; offset++, slot++) {
                slots[slot] = (frequency - 1) << 20 | offset << 8 | (token & 0xFF);
                if (width == 8) high[slot] = (uint8_t)(token >> 8);
            }
        }
        for (const uint64_t stop = at + d->parts[part].num; at < stop;) {
            uint64_t group = (at | (SW_STATES - 1)) + 1;
            if (group > stop) group = stop;
            /* At most eight words beyond the end are looked at, which the padding allows; then it is refused. */
            for (; at < group; at++) {
                uint32_t x = in.state[at % SW_STATES];
                const uint32_t found = x & (SW_FREQUENCIES - 1);
                const uint32_t packed = slots[found];
                x = ((packed >> 20) + 1) * (x >> SW_FREQUENCY_BITS) + (packed >> 8 & (SW_FREQUENCIES - 1));
                const uint32_t hungry = x < SW_LOWEST_STATE;
                const uint32_t filled = x << 16 | (uint32_t)load_element(in.word, 0, 2);
                x = hungry ? filled : x;
                in.word += 2 * hungry;
                in.state[at % SW_STATES] = x;
                d->tokens[at] = (uint16_t)((packed & 0xFF) | (width == 8 ? (uint32_t)high[found] << 8 : 0));
            }
            if (SW_UNLIKELY(in.word > in.end)) return 0;
        }
    }
    for (uint32_t state = 0; state < SW_STATES; state++) {
        if (in.state[state] != SW_LOWEST_STATE) return 0;
    }
    return in.word == in.end;
}

SW_INLINE int read_wide_steps(struct decoder *d, uint32_t width) {
    struct meaning meanings[2 + SW_MAX_TOKENS];
    uint64_t num_bits = 0;
    uint64_t bit = 0;
    const uint16_t *tokens = d->tokens;
    /* Steps from predictions come two later: after none, and one that no table has. */
    memset(meanings, 0, 2 * sizeof meanings[0]);
    for (uint32_t token = 0; token < num_tokens_of(width); token++) meanings[2 + token] = meaning_of(token, width);
    for (uint32_t part = 0; part < d->num_parts; part++) {
        const struct meaning *of = meanings + (d->parts[part].predicted ? 0 : 2);
        for (uint64_t i = 0; i < d->parts[part].num; i++) num_bits += of[tokens[i]].num_raw;
        tokens += d->parts[part].num;
    }
    if (d->raw_bytes != (num_bits + 7) / 8 || !padding_is_zero(d->raw, num_bits)) return 0;
    tokens = d->tokens;
    for (uint32_t part = 0; part < d->num_parts; part++) {
        const struct token_part *of = &d->parts[part];
        const struct meaning *meaning = meanings + (of->predicted ? 0 : 2);
        /* The predicted steps of a class stand behind its plain ones. */
        const struct class_entry *entry = &d->entry[of->class_];
        uint8_t *steps = d->steps + (entry->first + (of->predicted ? entry->num_changed - of->num : 0)) * width;
        for (uint64_t i = 0; i < of->num; i++) {
            const struct meaning *found = &meaning[tokens[i]];
            uint64_t raw;
            if (width == 8 && found->num_raw > 32) {
                raw = field_at(d->raw, bit, UINT32_MAX) |
                      field_at(d->raw, bit + 32, (UINT64_C(1) << (found->num_raw - 32)) - 1) << 32;
            } else {
                raw = field_at(d->raw, bit, (UINT64_C(1) << found->num_raw) - 1);
            }
            bit += found->num_raw;
            const uint64_t sign = 0 - (uint64_t)found->negative;
            store_element(steps, i, (((found->base + raw) ^ sign) - sign) + found->offset, width);
        }
        tokens += of->num;
    }
    return 1;
}

#endif
