/* The C ABI of the native kernel: what dispatch.c exports and kernel.c implements once per instruction set.
 *
 * Contract. Every function is pure: it reads and writes only the memory that its arguments name, keeps no state, and may
 * run on many threads at once. Elements are unsigned integers of 1, 2, 4 or 8 bytes, little-endian, at any alignment.
 * The caller has checked dtype, contiguity and length of every array; bytes that came from outside (a chunk's body) are
 * checked here, and a function that refuses them returns one of the negative codes below. The first argument of
 * exported functions chooses the instruction set: see enum sparsewire_isa. native.py mirrors these structs.
 */
#ifndef SPARSEWIRE_ABI_H
#define SPARSEWIRE_ABI_H

#include <stddef.h>
#include <stdint.h>

#define SPARSEWIRE_ABI 2

enum { SW_MAX_CLASSES = 16, SW_BLOCK_WORDS = 64, SW_WORD = 64, SW_BLOCK = SW_BLOCK_WORDS * SW_WORD };

/* Elements that an array in scratch has beyond its content, because whole blocks and vectors are written. */
enum { SW_SLACK = SW_BLOCK };

/* Elements of one body at most: ranks are 32-bit, sums of remainders 64-bit. docs/format.md allows 2^24. */
#define SW_MAX_ELEMENTS (1u << 24)

enum sparsewire_isa { SW_ISA_BASE = 0, SW_ISA_AVX2 = 1, SW_ISA_AVX512 = 2 };

enum sparsewire_error {
    SW_DAMAGED_HEAD = -1,       /* a count, parameter or length in the head is out of bounds, or it is cut off */
    SW_DAMAGED_GAPS = -2,       /* remainders or unary stream do not hold what the head states */
    SW_DAMAGED_TOKENS = -3,     /* a token table or the token stream is unsound */
    SW_DAMAGED_STEPS = -4,      /* signs, raw bits or exceptions are unsound */
    SW_WRONG_BASE = -5,         /* the classes of the base have other sizes than the writer's */
    SW_UNSUPPORTED = -6,        /* flags that this build does not know */
    SW_TOO_SMALL = -7,          /* scratch is too small: the job states what it takes; call again */
    SW_WRONG_LAST_CHANGE = -8   /* the change before is another one than the writer's */
};

/* Segments are given as a table of numbers, one row after the other, each with an entry for every segment. */
enum sparsewire_row {
    SW_OLD,         /* in: address of its old bits */
    SW_NEW,         /* in: address of its new bits; not read by a decode */
    SW_COUNT,       /* in: elements */
    SW_START,       /* in: flat position at which it begins in its tensor */
    SW_MODE,        /* in and out: see below; only an encode looks at it */
    SW_NUM_CHANGED, /* out: changed elements */
    SW_DIGEST_A,    /* out: terms of the new bits minus those of the old ones, over the changes in the body */
    SW_DIGEST_B,
    SW_ROWS
};

/* What to do with a segment (in), and what was found (out). Numbers are the modes of docs/format.md. */
enum sparsewire_mode {
    SW_UNCHANGED = 0,  /* out: no element differs */
    SW_SKIP = 2,       /* in and out: leave the segment out */
    SW_CLASSED = 3,    /* in: take it, however few or many changed; out: it is part of the body */
    SW_AUTO = 254,     /* in: take it if it changed and at most one element in `crowded` of them */
    SW_CROWDED = 255   /* out: denser than that; counted, but left out */
};

/* Finds what changed and writes a classed body of it. Results lie in scratch, which is the caller's. */
struct sparsewire_encode {
    uint32_t width;
    uint32_t num_cuts;
    const uint8_t *cuts;       /* strictly ascending keys; at most 15 */
    uint64_t num_segments;
    uint64_t *table;
    uint64_t crowded;
    uint8_t *scratch;
    uint64_t scratch_bytes;    /* in; out, when SW_TOO_SMALL is returned: what it takes */
    uint64_t num_changed;      /* out: changes in the body */
    uint64_t indices_at;       /* out: where in scratch their flat positions lie, int64 */
    uint64_t old_at;           /* out: their bits before */
    uint64_t new_at;           /* out: and after */
    uint64_t body_at;          /* out: the body */
    uint64_t body_bytes;       /* out: 0 when nothing is in it */
    uint64_t num_last;         /* the change before, for elements of 2 bytes, which are then bfloat16; see below */
    const int64_t *last_places; /* NULL to do without */
    const uint8_t *last_bits;
};

/* Reads a classed body against the base. Results lie in scratch. The change before, which bodies with predictions need, is
 * given by ascending places in the space of all segments of the job, end to end, and the bits that it replaced there. */
struct sparsewire_decode {
    uint32_t width;
    uint32_t reserved;
    const uint8_t *body;
    uint64_t body_bytes;
    uint64_t num_changed;      /* as the chunk's header states */
    uint64_t num_segments;
    uint64_t *table;
    uint8_t *scratch;
    uint64_t scratch_bytes;    /* in; out, when SW_TOO_SMALL is returned: what it takes */
    uint64_t indices_at;       /* out, as above */
    uint64_t old_at;
    uint64_t new_at;
    uint64_t num_last;
    const int64_t *last_places; /* NULL when it is not at hand: bodies that need it are refused as SW_WRONG_LAST_CHANGE */
    const uint8_t *last_bits;
};

#endif
