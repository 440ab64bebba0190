/* Steps of wide classes as tokens and raw bits, their tables of frequencies, and what both sides compute from those.
 *
 * docs/format.md, "Steps of a wide class" and "Token table". Everything is integer arithmetic, so that every build
 * and the NumPy form agree to the bit.
 */
#ifndef SPARSEWIRE_TOKENS_H
#define SPARSEWIRE_TOKENS_H

#include "abi.h"
#include "platform.h"

enum { SW_MAX_TOKENS = 8 * 64 - 16, SW_PREDICTED_FLAG = 1, SW_FREQUENCY_BITS = 12, SW_FREQUENCIES = 1 << SW_FREQUENCY_BITS, SW_STATES = 8 };

#define SW_LOWEST_STATE (1u << 16)

SW_INLINE uint32_t num_tokens_of(uint32_t width) { return 8 * 8 * width - 16; }

struct token { uint32_t token; uint32_t num_raw; uint64_t raw; };

/* `step` is new - old modulo 2^(8 * width), not 0. */
SW_INLINE struct token token_of(uint64_t step, uint32_t width) {
    const uint32_t bits = 8 * width;
    const uint64_t half = UINT64_C(1) << (bits - 1);
    const uint64_t all = half | (half - 1);
    uint32_t negative = (step & half) != 0;
    uint64_t size = negative ? (0 - step) & all : step;
    const uint32_t flip = size > half >> 1;
    if (flip) {
        /* Half the range towards zero, and through it. */
        size = half - size;
        negative = !negative && size;
    }
    struct token found;
    uint32_t place = (uint32_t)size;
    found.num_raw = 0;
    found.raw = 0;
    if (size >= 4) {
        const uint32_t top = highest_bit(size);
        place = 2 * top + (uint32_t)((size >> (top - 1)) & 1);
        found.num_raw = top - 1;
        found.raw = size & ((UINT64_C(1) << (top - 1)) - 1);
    }
    found.token = flip ? 4 * bits - 8 + 2 * place + negative : 2 * (place - 1) + negative;
    return found;
}

/* What a token stands for: step = (base + raw) negated if `negative`, plus `offset`. */
struct meaning { uint64_t base; uint64_t offset; uint32_t num_raw; uint32_t negative; };

SW_INLINE struct meaning meaning_of(uint32_t token, uint32_t width) {
    const uint32_t bits = 8 * width;
    const uint32_t first_flipped = 4 * bits - 8;
    const uint32_t flip = token >= first_flipped;
    const uint32_t place = flip ? (token - first_flipped) / 2 : token / 2 + 1;
    struct meaning found;
    found.negative = token & 1;
    found.offset = flip ? UINT64_C(1) << (bits - 1) : 0;
    found.num_raw = 0;
    found.base = place;
    if (place >= 4) {
        const uint32_t top = place / 2;
        found.num_raw = top - 1;
        found.base = (2 + (uint64_t)(place & 1)) << (top - 1);
    }
    return found;
}

SW_INLINE uint32_t weight_of_code(uint32_t code) { return (2 + ((code - 1) & 1)) << ((code - 1) >> 1); }

/* The code whose weight is nearest in ratio to count / total. */
static uint32_t code_of_count(uint64_t count, uint64_t total) {
    const uint64_t share = (count << 16) / total;
    uint32_t code = 1;
    for (uint32_t next = 2; next < 32; next++) {
        if ((uint64_t)weight_of_code(next) * weight_of_code(next - 1) <= share * share) code = next;
    }
    return code;
}

/* Fills frequencies, 0 for absent tokens, from codes, 0 for absent tokens; at least one is present. */
static void frequencies_of_codes(const uint8_t *codes, uint32_t num_tokens, uint16_t *frequencies) {
    uint64_t sum = 0;
    uint32_t present = 0;
    uint32_t heaviest = 0;
    for (uint32_t token = 0; token < num_tokens; token++) {
        if (!codes[token]) continue;
        sum += weight_of_code(codes[token]);
        present++;
        if (codes[token] > codes[heaviest]) heaviest = token; /* weights ascend with codes */
    }
    uint32_t left = SW_FREQUENCIES;
    for (uint32_t token = 0; token < num_tokens; token++) {
        frequencies[token] = 0;
        if (!codes[token]) continue;
        frequencies[token] =
            (uint16_t)(1 + (uint64_t)weight_of_code(codes[token]) * (SW_FREQUENCIES - present) / sum);
        left -= frequencies[token];
    }
    frequencies[heaviest] = (uint16_t)(frequencies[heaviest] + left);
}

/* Fills codes from how often each token occurs among `num`; returns the highest token present. */
static uint32_t codes_of_counts(const uint32_t *counts, uint32_t num_tokens, uint64_t num, uint8_t *codes) {
    uint32_t highest = 0;
    for (uint32_t token = 0; token < num_tokens; token++) {
        codes[token] = counts[token] ? (uint8_t)code_of_count(counts[token], num) : 0;
        if (counts[token]) highest = token;
    }
    return highest;
}

/* floor(256 * log2(value)) of 1 to 4,096, by squaring. */
static uint32_t log2_256(uint32_t value) {
    uint32_t found = highest_bit(value);
    uint64_t mantissa = (uint64_t)value << (31 - found);
    for (uint32_t i = 0; i < 8; i++) {
        mantissa = mantissa * mantissa >> 31;
        const uint32_t bit = (uint32_t)(mantissa >> 32);
        mantissa >>= bit;
        found = 2 * found + bit;
    }
    return found;
}

/* About how many 1/256 bits a part of a wide class takes: its table, tokens and raw bits. */
static uint64_t cost_of_part(const uint32_t *counts, uint64_t num, int predicted, uint32_t width) {
    const uint32_t first = predicted ? 2 : 0;
    const uint32_t num_tokens = num_tokens_of(width) + first;
    uint8_t codes[SW_MAX_TOKENS];
    uint16_t frequencies[SW_MAX_TOKENS];
    uint64_t cost = 0;
    uint32_t present = 0;
    const uint32_t highest = codes_of_counts(counts, num_tokens, num, codes);
    frequencies_of_codes(codes, num_tokens, frequencies);
    for (uint32_t token = 0; token <= highest; token++) {
        if (!counts[token]) continue;
        const uint32_t num_raw = token < first ? 0 : meaning_of(token - first, width).num_raw;
        cost += counts[token] * (uint64_t)(256 * (SW_FREQUENCY_BITS + num_raw) - log2_256(frequencies[token]));
        present++;
    }
    const uint32_t table_bytes = (highest > 127 ? 2 : 1) + (highest + 1 + 5 * present + 7) / 8;
    return cost + 256 * 8 * (uint64_t)table_bytes;
}

#endif
