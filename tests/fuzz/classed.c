/* Fuzz target of the native kernel: hostile bodies against a base, and arbitrary changes there and back.
 *
 * An input is a byte of options, u16 elements, u16 changes stated, u8 cuts, the old bits, and then either a body to decode or
 * the new bits to encode. With option 32, elements of two bytes have a change before: it stands between the base and the body,
 * or after the new bits, as u16 entries and for each u16 unchanged places and u16 bits. All instruction sets of the machine must do the same: refuse with one code, or give the same
 * bytes; what is encoded must decode to what it was made from. Arrays have exactly the size that the interface asks for,
 * so the address sanitizer sees any access beyond.
 *
 * With libFuzzer: clang -g -O1 -fsanitize=fuzzer,address,undefined, and the kernel's objects. Without it, -DSW_STANDALONE
 * gives a main that replays the files named and then mutates them for a number of seconds: see tests/sync/test_native_fuzz.py.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

int32_t sparsewire_best_isa(void);
int64_t sparsewire_encode(int32_t isa, struct sparsewire_encode *job);
int64_t sparsewire_decode(int32_t isa, struct sparsewire_decode *job);

enum { HEAD = 6, MAX_SEGMENTS = 4 };

static void fail(const char *what) {
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

static void *copy_of(const void *bytes, size_t size) {
    void *copy = malloc(size ? size : 1);
    if (!copy) fail("no memory");
    if (size) memcpy(copy, bytes, size);
    return copy;
}

/* The change before, in arrays of its exact size; NULL places when there is none. */
struct last { uint64_t num; int64_t *places; uint8_t *bits; };

/* Takes it from the data, which it moves on, as far as it lies within `count` elements. */
static struct last take_last(const uint8_t **data, size_t *size, uint64_t count) {
    struct last last = {0, NULL, NULL};
    if (*size < 2) return last;
    uint64_t stated = (*data)[0] | (*data)[1] << 8;
    *data += 2;
    *size -= 2;
    if (stated > *size / 4) stated = *size / 4;
    int64_t *places = malloc(8 * stated + 8);
    uint8_t *bits = malloc(2 * stated + 2);
    if (!places || !bits) fail("no memory");
    int64_t place = -1;
    for (; last.num < stated; last.num++) {
        const uint8_t *entry = *data + 4 * last.num;
        place += 1 + (entry[0] | entry[1] << 8);
        if ((uint64_t)place >= count) break;
        places[last.num] = place;
        memcpy(bits + 2 * last.num, entry + 2, 2);
    }
    last.places = copy_of(places, 8 * last.num);
    last.bits = copy_of(bits, 2 * last.num);
    free(places);
    free(bits);
    *data += 4 * stated;
    *size -= 4 * stated;
    return last;
}

static void free_last(struct last *last) {
    free(last->places);
    free(last->bits);
}

struct outcome { int64_t code; uint64_t num; int64_t *indices; uint8_t *old, *new_; uint64_t *digests; };

static void free_outcome(struct outcome *outcome) {
    free(outcome->indices);
    free(outcome->old);
    free(outcome->new_);
    free(outcome->digests);
}

/* Cuts `count` elements into segments whose bits are separate allocations. */
static uint64_t *make_table(const uint8_t *old, const uint8_t *new_, uint64_t count, uint32_t width, uint64_t num) {
    uint64_t *table = calloc(SW_ROWS * num, sizeof *table);
    uint64_t at = 0;
    if (!table) fail("no memory");
    for (uint64_t i = 0; i < num; i++) {
        const uint64_t size = i + 1 < num ? count / num / (i + 1) : count - at;
        table[SW_OLD * num + i] = (uint64_t)(uintptr_t)copy_of(old + at * width, size * width);
        table[SW_NEW * num + i] = new_ ? (uint64_t)(uintptr_t)copy_of(new_ + at * width, size * width) : 0;
        table[SW_COUNT * num + i] = size;
        table[SW_START * num + i] = at;
        table[SW_MODE * num + i] = SW_CLASSED;
        at += size;
    }
    return table;
}

static void free_table(uint64_t *table, uint64_t num) {
    for (uint64_t i = 0; i < 2 * num; i++) free((void *)(uintptr_t)table[i]);
    free(table);
}

static struct outcome decode(int32_t isa, const uint8_t *bytes, size_t size, uint64_t num_changed, const uint8_t *old,
                             uint64_t count, uint32_t width, uint64_t num_segments, const struct last *last) {
    uint8_t *body = copy_of(bytes, size);
    uint64_t *table = make_table(old, NULL, count, width, num_segments);
    struct sparsewire_decode job = {.width = width, .body = body, .body_bytes = size, .num_changed = num_changed,
                                    .num_segments = num_segments, .table = table, .num_last = last->num,
                                    .last_places = last->places, .last_bits = last->bits};
    struct outcome outcome = {0};
    outcome.code = sparsewire_decode(isa, &job);
    if (outcome.code == SW_TOO_SMALL) {
        if (job.scratch_bytes > (1 << 20) + 64 * (size + count) * 8) fail("scratch is out of proportion");
        job.scratch = malloc(job.scratch_bytes);
        if (!job.scratch) fail("no memory");
        outcome.code = sparsewire_decode(isa, &job);
        if (outcome.code == SW_TOO_SMALL) fail("scratch of the size asked for is too small");
    }
    if (outcome.code == 0) {
        outcome.num = num_changed;
        outcome.indices = copy_of(job.scratch + job.indices_at, 8 * num_changed);
        outcome.old = copy_of(job.scratch + job.old_at, width * num_changed);
        outcome.new_ = copy_of(job.scratch + job.new_at, width * num_changed);
        outcome.digests = copy_of(table + SW_NUM_CHANGED * num_segments, 3 * 8 * num_segments);
        for (uint64_t i = 0; i < num_changed; i++) {
            if ((uint64_t)outcome.indices[i] >= count) fail("an index beyond the base");
            if (i && outcome.indices[i] <= outcome.indices[i - 1]) fail("indices do not ascend");
            if (memcmp(outcome.old + i * width, old + (uint64_t)outcome.indices[i] * width, width)) fail("old bits");
            if (!memcmp(outcome.old + i * width, outcome.new_ + i * width, width)) fail("a change that changes nothing");
        }
    }
    free(job.scratch);
    free_table(table, num_segments);
    free(body);
    return outcome;
}

static void check_body(const uint8_t *body, size_t size, uint64_t num_changed, const uint8_t *old, uint64_t count,
                       uint32_t width, uint64_t num_segments, const struct last *last, const uint8_t *expected_new) {
    struct outcome first = decode(SW_ISA_BASE, body, size, num_changed, old, count, width, num_segments, last);
    for (int32_t isa = SW_ISA_BASE + 1; isa <= sparsewire_best_isa(); isa++) {
        struct outcome other = decode(isa, body, size, num_changed, old, count, width, num_segments, last);
        if (other.code != first.code) fail("instruction sets disagree whether a body is sound");
        if (first.code == 0 && (memcmp(first.indices, other.indices, 8 * num_changed) ||
                                memcmp(first.new_, other.new_, width * num_changed) ||
                                memcmp(first.digests, other.digests, 24 * num_segments))) {
            fail("instruction sets decode differently");
        }
        free_outcome(&other);
    }
    if (expected_new) {
        if (first.code) fail("what was encoded is refused");
        uint64_t next = 0;
        for (uint64_t i = 0; i < count; i++) {
            if (!memcmp(old + i * width, expected_new + i * width, width)) continue;
            if (next == num_changed || (uint64_t)first.indices[next] != i ||
                memcmp(first.new_ + next * width, expected_new + i * width, width)) {
                fail("decoded is not what was encoded");
            }
            next++;
        }
        if (next != num_changed) fail("more decoded than encoded");
    }
    free_outcome(&first);
}

static void check_round_trip(const uint8_t *old, const uint8_t *new_, uint64_t count, uint32_t width, uint64_t num_segments,
                             const uint8_t *cuts, uint32_t num_cuts, const struct last *last) {
    uint8_t *first = NULL;
    uint64_t first_bytes = 0;
    for (int32_t isa = SW_ISA_BASE; isa <= sparsewire_best_isa(); isa++) {
        uint64_t *table = make_table(old, new_, count, width, num_segments);
        struct sparsewire_encode job = {.width = width, .num_cuts = num_cuts, .cuts = cuts, .num_segments = num_segments,
                                        .table = table, .crowded = 8, .num_last = last->num,
                                        .last_places = last->places, .last_bits = last->bits};
        int64_t code = sparsewire_encode(isa, &job);
        if (code == SW_TOO_SMALL) {
            job.scratch = malloc(job.scratch_bytes);
            if (!job.scratch) fail("no memory");
            code = sparsewire_encode(isa, &job);
        }
        if (code) fail("an encode is refused");
        const uint8_t *body = job.scratch + job.body_at;
        if (isa == SW_ISA_BASE) {
            first_bytes = job.body_bytes;
            first = copy_of(body, first_bytes);
            if (job.num_changed) {
                /* Unchanged segments are left out of the body: one segment of changed ones alone is decoded. */
                uint8_t *base = malloc(count * width), *target = malloc(count * width);
                uint64_t left = 0;
                if (!base || !target) fail("no memory");
                for (uint64_t i = 0; i < num_segments; i++) {
                    if (table[SW_MODE * num_segments + i] != SW_CLASSED) continue;
                    const uint64_t start = table[SW_START * num_segments + i] * width;
                    const uint64_t bytes = table[SW_COUNT * num_segments + i] * width;
                    memcpy(base + left, old + start, bytes);
                    memcpy(target + left, new_ + start, bytes);
                    left += bytes;
                }
                check_body(body, first_bytes, job.num_changed, base, left / width, width, num_segments, last, target);
                free(base);
                free(target);
            }
        } else if (job.body_bytes != first_bytes || memcmp(first, body, first_bytes)) {
            fail("instruction sets encode differently");
        }
        free(job.scratch);
        free_table(table, num_segments);
    }
    free(first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < HEAD) return 0;
    const uint32_t width = 1u << (data[0] & 3);
    const uint64_t num_segments = 1 + (data[0] >> 2 & 3);
    const int encode = data[0] >> 4 & 1;
    const int has_last = width == 2 && data[0] >> 5 & 1;
    struct last last = {0, NULL, NULL};
    uint64_t count = data[1] | data[2] << 8;
    const uint64_t num_changed = data[3] | data[4] << 8;
    uint32_t num_cuts = data[5] & 15;
    data += HEAD;
    size -= HEAD;
    if (!encode) {
        if (count * width > size) count = size / width;
        const uint8_t *old = data;
        data += count * width;
        size -= count * width;
        if (has_last) last = take_last(&data, &size, count);
        check_body(data, size, num_changed, old, count, width, num_segments, &last, NULL);
        free_last(&last);
        return 0;
    }
    if (num_cuts > size) return 0;
    for (uint32_t i = 0; i < num_cuts; i++) {
        if (data[i] <= (i ? data[i - 1] : 0)) num_cuts = i;
    }
    const uint8_t *cuts = data;
    data += num_cuts;
    size -= num_cuts;
    if (2 * count * width > size) count = size / width / 2;
    const uint8_t *rest = data + 2 * count * width;
    size -= 2 * count * width;
    if (has_last) last = take_last(&rest, &size, count);
    check_round_trip(data, data + count * width, count, width, num_segments, cuts, num_cuts, &last);
    free_last(&last);
    return 0;
}

#if defined(SW_STANDALONE)
#include <time.h>

enum { MAX_INPUTS = 4096, MAX_BYTES = 1 << 16 };

static uint64_t state = 0x9E3779B97F4A7C15u;

static uint64_t draw(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (state >> 11) % below : 0;
}

/* A few random edits, most of them behind the base, where the body is. */
static size_t mutate(uint8_t *data, size_t size, const uint8_t *other, size_t other_size) {
    for (uint64_t edits = 1 + draw(4); edits && size > HEAD; edits--) {
        const uint64_t count = data[1] | data[2] << 8;
        const uint64_t begin = HEAD + count * (1u << (data[0] & 3));
        const int in_body = draw(8) != 0 && begin < size;
        const size_t at = in_body ? begin + draw(draw(2) ? size - begin : (size - begin < 48 ? size - begin : 48)) : draw(size);
        switch (draw(7)) {
        case 0: data[at] ^= (uint8_t)(1u << draw(8)); break;
        case 1: data[at] = (uint8_t)draw(256); break;
        case 2: data[at] = (uint8_t)(data[at] + draw(5) - 2); break;
        case 3: size = at; break;
        case 4:
            if (size < MAX_BYTES) {
                memmove(data + at + 1, data + at, size - at);
                data[at] = (uint8_t)draw(256);
                size++;
            }
            break;
        case 5:
            memmove(data + at, data + at + 1, size - at - 1);
            size--;
            break;
        default:
            if (other_size) {
                const size_t from = draw(other_size);
                size_t bytes = 1 + draw(32);
                if (bytes > other_size - from) bytes = other_size - from;
                if (bytes > size - at) bytes = size - at;
                memcpy(data + at, other + from, bytes);
            }
        }
    }
    return size;
}

int main(int argc, char **argv) {
    static uint8_t *inputs[MAX_INPUTS];
    static size_t sizes[MAX_INPUTS];
    static uint8_t data[MAX_BYTES + 1];
    int num = 0;
    if (argc < 3) {
        fprintf(stderr, "usage: %s SECONDS SEED FILE...\n", argv[0]);
        return 2;
    }
    state ^= strtoull(argv[2], NULL, 10) * 0xBF58476D1CE4E5B9u;
    for (int i = 3; i < argc && num < MAX_INPUTS; i++, num++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) fail(argv[i]);
        sizes[num] = fread(data, 1, MAX_BYTES, file);
        fclose(file);
        inputs[num] = copy_of(data, sizes[num]);
        LLVMFuzzerTestOneInput(inputs[num], sizes[num]);
    }
    const time_t stop = time(NULL) + strtol(argv[1], NULL, 10);
    uint64_t runs = 0;
    for (; num && time(NULL) < stop; runs++) {
        const int from = (int)draw((uint64_t)num), other = (int)draw((uint64_t)num);
        memcpy(data, inputs[from], sizes[from]);
        const size_t size = mutate(data, sizes[from], inputs[other], sizes[other]);
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%d files replayed, %llu mutations\n", num, (unsigned long long)runs);
    return 0;
}
#endif
