/* Which class each element of a block belongs to, and how many of each class came before every word of it.
 *
 * A block is up to 64 words of 64 elements. classify_block reads the old elements once and leaves, for each word, the
 * running count of every class at its beginning and either a mask a class (vector levels) or a class a byte (all levels);
 * rank_of and place_of then turn positions into ranks and back. Elements of a word that the caller padded are
 * counted like others: whoever pads takes them off again.
 */
#ifndef SPARSEWIRE_CLASSES_H
#define SPARSEWIRE_CLASSES_H

#include "compare.h"

/* The class of every key, in the forms that the levels look it up in. */
struct classes {
    uint32_t num_classes;
    uint8_t of_key[256];
    uint8_t window[128]; /* class of key first_key + i */
    uint8_t first_key;
    uint8_t in_window;   /* all cuts lie in a window of keys that one lookup can serve */
    uint8_t cuts[SW_MAX_CLASSES];
};

struct block {
#if defined(SW_AVX512) || defined(SW_AVX2)
    uint64_t masks[SW_BLOCK_WORDS][SW_MAX_CLASSES] __attribute__((aligned(64)));
#endif
    uint32_t before[SW_BLOCK_WORDS][SW_MAX_CLASSES] __attribute__((aligned(64)));
    uint8_t class_of[SW_BLOCK] __attribute__((aligned(64)));
    uint64_t changed[SW_BLOCK_WORDS];
    uint8_t touched[SW_BLOCK_WORDS]; /* words in which something changed */
    uint32_t num_touched;
    uint32_t num_changed;
    uint16_t at[SW_BLOCK + 64];
};

struct counts { uint32_t of[SW_MAX_CLASSES] __attribute__((aligned(64))); };

#if defined(SW_AVX2)
enum { SW_WINDOW = 64 };
#else
enum { SW_WINDOW = 128 };
#endif

/* The key of an element: its exponent field, or as many bits below its sign as fit a byte. */
SW_INLINE uint32_t key_of(uint64_t element, uint32_t width) {
    switch (width) {
    case 1: return element & 0x7F;
    case 2: return (element >> 7) & 0xFF;
    case 4: return (element >> 23) & 0xFF;
    default: {
        const int32_t key = (int32_t)((element >> 52) & 0x7FF) - 896;
        return key < 0 ? 0 : key > 255 ? 255 : (uint32_t)key;
    }
    }
}

/* Returns 0 unless the cuts are at most 15 and ascend strictly from at least 1. */
static int prepare_classes(struct classes *classes, const uint8_t *cuts, uint32_t num_cuts) {
    uint32_t last = 0;
    if (num_cuts >= SW_MAX_CLASSES) return 0;
    for (uint32_t cut = 0; cut < num_cuts; cut++) {
        if (cuts[cut] <= last) return 0;
        last = classes->cuts[cut] = cuts[cut];
    }
    classes->num_classes = num_cuts + 1;
    uint32_t class_ = 0;
    for (uint32_t key = 0; key < 256; key++) {
        while (class_ < num_cuts && cuts[class_] <= key) class_++;
        classes->of_key[key] = (uint8_t)class_;
    }
    const uint32_t first = num_cuts ? cuts[0] - 1u : 0;
    classes->first_key = (uint8_t)first;
    classes->in_window = last < first + SW_WINDOW;
    for (uint32_t place = 0; place < 128; place++) {
        classes->window[place] = classes->of_key[first + place < 256 ? first + place : 255];
    }
    return 1;
}

SW_INLINE void forget_changes(struct block *block) { block->num_touched = block->num_changed = 0; }

/* Takes note of what changed in a word; words come in order. */
SW_INLINE void note_changes(struct block *block, uint32_t word, uint64_t changed) {
    block->changed[word] = changed;
    block->touched[block->num_touched] = (uint8_t)word;
    block->num_touched += changed != 0;
    block->num_changed += popcount64(changed);
}

/* Notes the changes of a word, unless `new_`, which is the block's, is NULL. */
SW_INLINE void compare_word(struct block *block, const uint8_t *old, const uint8_t *new_, uint32_t word, uint32_t width) {
    prefetch_word(old, width);
    if (!new_) return;
    new_ += (size_t)word * SW_WORD * width;
    prefetch_word(new_, width);
    note_changes(block, word, changed_in_word(old, new_, width));
}

#if defined(SW_AVX512)
/* The keys of 64 elements, a byte each. */
SW_INLINE __m512i keys_of_word(const uint8_t *from, uint32_t width) {
    switch (width) {
    case 1: return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(0x7F));
    case 2: {
        /* Shifted left by one, the upper byte of every element is its key: byte 2i + 1 for element i. */
        const __m512i low = _mm512_slli_epi16(_mm512_loadu_si512(from), 1);
        const __m512i high = _mm512_slli_epi16(_mm512_loadu_si512(from + 64), 1);
        const __m512i ramp = _mm512_cvtepu8_epi16(_mm256_setr_epi8(
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
            30, 31));
        /* Words of the index hold (4i + 1, 4i + 3): the odd bytes in order. */
        const __m512i odd = _mm512_add_epi16(_mm512_slli_epi16(ramp, 2),
            _mm512_add_epi16(_mm512_slli_epi16(ramp, 10), _mm512_set1_epi16(0x0301)));
        return _mm512_permutex2var_epi8(low, odd, high);
    }
    case 4: {
        __m128i part[4];
        for (int i = 0; i < 4; i++) {
            const __m512i x = _mm512_slli_epi32(_mm512_loadu_si512(from + 64 * i), 1);
            part[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 24));
        }
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(part[1], part[0])),
                                  _mm256_set_m128i(part[3], part[2]), 1);
    }
    default: {
        uint64_t part[8];
        for (int i = 0; i < 8; i++) {
            __m512i x = _mm512_srli_epi64(_mm512_slli_epi64(_mm512_loadu_si512(from + 64 * i), 1), 53);
            x = _mm512_max_epi64(_mm512_sub_epi64(x, _mm512_set1_epi64(896)), _mm512_setzero_si512());
            x = _mm512_min_epi64(x, _mm512_set1_epi64(255));
            part[i] = (uint64_t)_mm_cvtsi128_si64(_mm512_cvtepi64_epi8(x));
        }
        return _mm512_loadu_si512(part);
    }
    }
}

SW_INLINE void classify_block(struct block *block, struct counts *counts, const struct classes *classes,
                              const uint8_t *old, const uint8_t *new_, uint32_t num_words, uint32_t width) {
    forget_changes(block);
    const __m512i table_low = _mm512_loadu_si512(classes->window);
    const __m512i table_high = _mm512_loadu_si512(classes->window + 64);
    const __m512i first_key = _mm512_set1_epi8((char)classes->first_key);
    /* A GF(2) product with the rows of the identity transposes every 8 x 8 bits; its bytes come in reverse. */
    const __m512i identity = _mm512_set1_epi64((int64_t)UINT64_C(0x8040201008040201));
    const __m512i reverse = _mm512_set4_epi32(0x08090A0B, 0x0C0D0E0F, 0x00010203, 0x04050607);
    const __m512i ramp8 = _mm512_set1_epi64((int64_t)UINT64_C(0x3830282018100800));
    const __m512i ones = _mm512_set1_epi64(-1);
    const __m512i not0 = _mm512_mask_mov_epi64(ones, 0xAA, _mm512_setzero_si512());
    const __m512i not1 = _mm512_mask_mov_epi64(ones, 0xCC, _mm512_setzero_si512());
    const __m512i not2 = _mm512_mask_mov_epi64(ones, 0xF0, _mm512_setzero_si512());
    const __m512i even_words = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i before = _mm512_load_si512(counts->of);
    const int in_window = classes->in_window || width == 1;
    for (uint32_t word = 0; word < num_words; word++) {
        const uint8_t *from = old + (size_t)word * SW_WORD * width;
        compare_word(block, from, new_, word, width);
        const __m512i keys = keys_of_word(from, width);
        __m512i places;
        __m512i class_of;
        if (in_window) {
            places = _mm512_min_epu8(_mm512_subs_epu8(keys, first_key), _mm512_set1_epi8(127));
            class_of = _mm512_permutex2var_epi8(table_low, places, table_high);
        } else {
            const __m512i quarter0 = _mm512_loadu_si512(classes->of_key);
            const __m512i quarter1 = _mm512_loadu_si512(classes->of_key + 64);
            const __m512i quarter2 = _mm512_loadu_si512(classes->of_key + 128);
            const __m512i quarter3 = _mm512_loadu_si512(classes->of_key + 192);
            class_of = _mm512_mask_blend_epi8(_mm512_movepi8_mask(keys),
                                              _mm512_permutex2var_epi8(quarter0, keys, quarter1),
                                              _mm512_permutex2var_epi8(quarter2, keys, quarter3));
        }
        _mm512_store_si512(block->class_of + word * SW_WORD, class_of);
        const __m512i bits = _mm512_gf2p8affine_epi64_epi8(identity, _mm512_shuffle_epi8(class_of, reverse), 0);
        const __m512i plane0 = _mm512_permutexvar_epi8(ramp8, bits);
        const __m512i plane1 = _mm512_permutexvar_epi8(_mm512_add_epi8(ramp8, _mm512_set1_epi8(1)), bits);
        const __m512i plane2 = _mm512_permutexvar_epi8(_mm512_add_epi8(ramp8, _mm512_set1_epi8(2)), bits);
        const __m512i plane3 = _mm512_permutexvar_epi8(_mm512_add_epi8(ramp8, _mm512_set1_epi8(3)), bits);
        __m512i mask = _mm512_xor_si512(plane0, not0);
        mask = _mm512_ternarylogic_epi64(mask, plane1, not1, 0x60);
        mask = _mm512_ternarylogic_epi64(mask, plane2, not2, 0x60);
        const __m512i low = _mm512_andnot_si512(plane3, mask);
        const __m512i high = _mm512_and_si512(plane3, mask);
        _mm512_store_si512(block->masks[word], low);
        _mm512_store_si512(block->masks[word] + 8, high);
        _mm512_store_si512(block->before[word], before);
        before = _mm512_add_epi32(before, _mm512_permutex2var_epi32(_mm512_popcnt_epi64(low), even_words,
                                                                   _mm512_popcnt_epi64(high)));
    }
    _mm512_store_si512(counts->of, before);
}
#elif defined(SW_AVX2)
/* The keys of 32 elements, a byte each. */
SW_INLINE __m256i keys_of_half(const uint8_t *from, uint32_t width) {
    const __m256i *at = (const __m256i *)from;
    switch (width) {
    case 1: return _mm256_and_si256(_mm256_loadu_si256(at), _mm256_set1_epi8(0x7F));
    case 2: {
        const __m256i low = _mm256_srli_epi16(_mm256_slli_epi16(_mm256_loadu_si256(at), 1), 8);
        const __m256i high = _mm256_srli_epi16(_mm256_slli_epi16(_mm256_loadu_si256(at + 1), 1), 8);
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8);
    }
    case 4: {
        __m256i part[4];
        for (int i = 0; i < 4; i++) {
            part[i] = _mm256_srli_epi32(_mm256_slli_epi32(_mm256_loadu_si256(at + i), 1), 24);
        }
        const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(part[0], part[1]),
                                                   _mm256_packus_epi32(part[2], part[3]));
        return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    default: {
        uint8_t keys[32];
        for (uint32_t i = 0; i < 32; i++) keys[i] = (uint8_t)key_of(load64(from + 8 * i), 8);
        return _mm256_loadu_si256((const __m256i *)keys);
    }
    }
}

/* Classes of 32 keys by four 16-entry lookups when all cuts lie in a window of 64 keys, else by counting cuts. */
SW_INLINE __m256i classes_of_half(__m256i keys, const struct classes *classes, const __m256i *tables) {
    if (classes->in_window) {
        const __m256i top = _mm256_set1_epi8(0x70);
        const __m256i first_key = _mm256_set1_epi8((char)classes->first_key);
        const __m256i place = _mm256_min_epu8(_mm256_subs_epu8(keys, first_key), _mm256_set1_epi8(63));
        __m256i found = _mm256_setzero_si256();
        for (int part = 0; part < 4; part++) {
            /* Places of another sixteenth end up above 0x80, for which the lookup gives zero. */
            const __m256i inside = _mm256_adds_epu8(_mm256_xor_si256(place, _mm256_set1_epi8((char)(part << 4))), top);
            found = _mm256_or_si256(found, _mm256_shuffle_epi8(tables[part], inside));
        }
        return found;
    }
    __m256i found = _mm256_setzero_si256();
    for (uint32_t cut = 0; cut + 1 < classes->num_classes; cut++) {
        const __m256i bound = _mm256_set1_epi8((char)classes->cuts[cut]);
        found = _mm256_sub_epi8(found, _mm256_cmpeq_epi8(_mm256_max_epu8(keys, bound), keys));
    }
    return found;
}

SW_INLINE __m256i popcount_lanes(__m256i x) {
    const __m256i nibbles = _mm256_set1_epi8(0x0F);
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2,
                                           2, 3, 2, 3, 3, 4);
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, nibbles));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), nibbles));
    return _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256());
}

/* The lower halves of eight 64-bit counts, in order. */
SW_INLINE __m256i narrow_counts(__m256i low, __m256i high) {
    const __m256i mixed = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88));
    return _mm256_permute4x64_epi64(mixed, 0xD8);
}

SW_INLINE void classify_block(struct block *block, struct counts *counts, const struct classes *classes,
                              const uint8_t *old, const uint8_t *new_, uint32_t num_words, uint32_t width) {
    forget_changes(block);
    const __m256i not0 = _mm256_setr_epi64x(-1, 0, -1, 0);
    const __m256i not1 = _mm256_setr_epi64x(-1, -1, 0, 0);
    __m256i tables[4];
    for (int part = 0; part < 4; part++) {
        tables[part] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(classes->window + 16 * part)));
    }
    __m256i before_low = _mm256_load_si256((const __m256i *)counts->of);
    __m256i before_high = _mm256_load_si256((const __m256i *)counts->of + 1);
    for (uint32_t word = 0; word < num_words; word++) {
        const uint8_t *from = old + (size_t)word * SW_WORD * width;
        compare_word(block, from, new_, word, width);
        const __m256i low = classes_of_half(keys_of_half(from, width), classes, tables);
        const __m256i high = classes_of_half(keys_of_half(from + 32 * width, width), classes, tables);
        _mm256_store_si256((__m256i *)(block->class_of + word * SW_WORD), low);
        _mm256_store_si256((__m256i *)(block->class_of + word * SW_WORD + 32), high);
        __m256i plane[4];
#define SW_PLANE(k)                                                                                              \
    plane[k] = _mm256_set1_epi64x((int64_t)((uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(low, 7 - (k))) |      \
                                            (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(high, 7 - (k))) << 32))
        SW_PLANE(0);
        SW_PLANE(1);
        SW_PLANE(2);
        SW_PLANE(3);
#undef SW_PLANE
        const __m256i pair = _mm256_and_si256(_mm256_xor_si256(plane[0], not0), _mm256_xor_si256(plane[1], not1));
        const __m256i without2 = _mm256_andnot_si256(plane[2], pair);
        const __m256i with2 = _mm256_and_si256(plane[2], pair);
        const __m256i mask0 = _mm256_andnot_si256(plane[3], without2);
        const __m256i mask1 = _mm256_andnot_si256(plane[3], with2);
        const __m256i mask2 = _mm256_and_si256(plane[3], without2);
        const __m256i mask3 = _mm256_and_si256(plane[3], with2);
        __m256i *masks = (__m256i *)block->masks[word];
        _mm256_store_si256(masks, mask0);
        _mm256_store_si256(masks + 1, mask1);
        _mm256_store_si256(masks + 2, mask2);
        _mm256_store_si256(masks + 3, mask3);
        _mm256_store_si256((__m256i *)block->before[word], before_low);
        _mm256_store_si256((__m256i *)block->before[word] + 1, before_high);
        before_low = _mm256_add_epi32(before_low, narrow_counts(popcount_lanes(mask0), popcount_lanes(mask1)));
        before_high = _mm256_add_epi32(before_high, narrow_counts(popcount_lanes(mask2), popcount_lanes(mask3)));
    }
    _mm256_store_si256((__m256i *)counts->of, before_low);
    _mm256_store_si256((__m256i *)counts->of + 1, before_high);
}
#else
/* Sixteen bytes that every compiler keeps in a vector register where there is one. */
typedef uint8_t sixteen __attribute__((vector_size(16)));

/* Every cut in turn is compared with all keys of a word: that gives classes, and how many keys are not below the cut. */
SW_INLINE void classify_block(struct block *block, struct counts *counts, const struct classes *classes,
                              const uint8_t *old, const uint8_t *new_, uint32_t num_words, uint32_t width) {
    forget_changes(block);
    const uint32_t num_classes = classes->num_classes;
    for (uint32_t word = 0; word < num_words; word++) {
        const uint8_t *from = old + (size_t)word * SW_WORD * width;
        compare_word(block, from, new_, word, width);
        uint8_t keys[SW_WORD];
        for (uint32_t i = 0; i < SW_WORD; i++) keys[i] = (uint8_t)key_of(load_element(from, i, width), width);
        sixteen part[4], class_of[4];
        memcpy(part, keys, sizeof part);
        memset(class_of, 0, sizeof class_of);
        uint32_t at_least = SW_WORD;
        memcpy(block->before[word], counts->of, sizeof counts->of);
        for (uint32_t cut = 0; cut + 1 < num_classes; cut++) {
            const uint8_t bound = classes->cuts[cut];
            sixteen count = {0};
            for (uint32_t i = 0; i < 4; i++) {
                const sixteen inside = (sixteen)(part[i] >= bound);
                class_of[i] -= inside;
                count -= inside;
            }
            uint64_t halves[2];
            memcpy(halves, &count, sizeof halves);
            const uint32_t above = (uint32_t)((halves[0] + halves[1]) * UINT64_C(0x0101010101010101) >> 56);
            counts->of[cut] += at_least - above;
            at_least = above;
        }
        counts->of[num_classes - 1] += at_least;
        memcpy(block->class_of + word * SW_WORD, class_of, sizeof class_of);
    }
}
#endif

/* A bit for each element of a word that is of a class. */
SW_INLINE uint64_t class_mask(const struct block *block, uint32_t word, uint32_t class_) {
#if defined(SW_AVX512) || defined(SW_AVX2)
    return block->masks[word][class_];
#elif defined(SW_SSE2)
    const __m128i wanted = _mm_set1_epi8((char)class_);
    const __m128i *from = (const __m128i *)(block->class_of + word * SW_WORD);
    uint64_t mask = 0;
    for (int part = 0; part < 4; part++) {
        mask |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_load_si128(from + part), wanted)) << (16 * part);
    }
    return mask;
#else
    const uint64_t wanted = class_ * UINT64_C(0x0101010101010101);
    uint64_t mask = 0;
    for (uint32_t part = 0; part < 8; part++) {
        /* Classes are below 16, so adding 0x7F carries into the top bit of exactly the bytes that are not zero. */
        const uint64_t differ = load64(block->class_of + word * SW_WORD + 8 * part) ^ wanted;
        const uint64_t same = ~(differ + UINT64_C(0x7F7F7F7F7F7F7F7F)) & UINT64_C(0x8080808080808080);
        mask |= ((same >> 7) * UINT64_C(0x0102040810204080) >> 56) << (8 * part);
    }
    return mask;
#endif
}

/* The rank of the element at `position` of the block among all elements of its class. */
SW_INLINE uint32_t rank_of(const struct block *block, uint32_t position) {
    const uint32_t word = position / SW_WORD;
    const uint32_t class_ = block->class_of[position];
    const uint64_t mask = class_mask(block, word, class_);
    return block->before[word][class_] + popcount64(low_bits(mask, position % SW_WORD));
}

/* Writes the positions of all changes that were noted, in order, to `at`. */
static void list_changes(struct block *block, uint32_t num_words) {
    uint16_t *at = block->at;
#if defined(SW_AVX512)
    if (block->num_changed > num_words) {
        const __m512i ramp =
            _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                                  21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
        for (uint32_t word = 0; word < num_words; word++) {
            const uint64_t changed = block->changed[word];
            const __m512i places = _mm512_add_epi16(ramp, _mm512_set1_epi16((int16_t)(word * SW_WORD)));
            _mm512_storeu_si512(at, _mm512_maskz_compress_epi16((__mmask32)changed, places));
            at += popcount64(changed & 0xFFFFFFFFu);
            _mm512_storeu_si512(at, _mm512_maskz_compress_epi16((__mmask32)(changed >> 32),
                                                                _mm512_add_epi16(places, _mm512_set1_epi16(32))));
            at += popcount64(changed >> 32);
        }
        return;
    }
#endif
    (void)num_words;
    /* Few words hold more than two: those two are written without asking whether they are there. */
    for (uint32_t i = 0; i < block->num_touched; i++) {
        const uint32_t origin = (uint32_t)block->touched[i] * SW_WORD;
        const uint64_t first = block->changed[block->touched[i]];
        const uint64_t second = first & (first - 1);
        uint64_t others = second & (second - 1);
        at[0] = (uint16_t)(origin + trailing_zeros(first));
        at[1] = (uint16_t)(origin + trailing_zeros(second | UINT64_C(1) << 63));
        at += 1 + (second != 0);
        for (; SW_UNLIKELY(others != 0); others &= others - 1) *at++ = (uint16_t)(origin + trailing_zeros(others));
    }
}

#endif
