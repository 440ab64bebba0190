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

#define SPARSEWIRE_ABI 1

enum { SW_MAX_CLASSES = 16, SW_BLOCK_WORDS = 64, SW_WORD = 64, SW_BLOCK = SW_BLOCK_WORDS * SW_WORD };

/* Elements that a scratch array must have beyond its content, because whole vectors are written. */
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
    SW_TOO_SMALL = -7           /* an output or scratch array is too small: a bug of the caller */
};

/* What to do with a segment (in), and what was found (out). Numbers are the modes of docs/format.md. */
enum sparsewire_mode {
    SW_UNCHANGED = 0,  /* out: no element differs */
    SW_SKIP = 2,       /* in and out: leave the segment out */
    SW_CLASSED = 3,    /* in: take it however dense it is; out: its changes are among the records */
    SW_AUTO = 254,     /* in: take it if it changed and at most one element in `crowded` of them */
    SW_CROWDED = 255   /* out: denser than that; counted, but left out */
};

/* Finds what changed and where it stands among the elements of its class; see scan.h. */
struct sparsewire_scan {
    uint32_t width;
    uint32_t num_cuts;
    const uint8_t *cuts; /* strictly ascending keys; at most 15 */
    uint64_t num_segments;
    const void *const *old_bits;
    const void *const *new_bits;
    const uint64_t *counts;   /* elements of each segment */
    uint64_t crowded;         /* a segment with more than count / crowded changes is crowded */
    uint8_t *modes;           /* in and out, one a segment */
    uint64_t *num_changed;    /* out, one a segment that is not skipped */
    uint64_t capacity;        /* elements that each of the arrays below has room for, slack included */
    uint32_t *positions;      /* out: place of each change in its segment */
    uint32_t *ranks;          /* out: its place among the elements of its class in all classed segments */
    uint8_t *classes;         /* out */
    void *old_changed;        /* out: its bits before */
    void *new_changed;        /* out: and after */
    uint64_t *class_sizes;    /* out: elements of each of the 16 classes in all classed segments */
};

/* Writes a classed body from the records of a scan; see encode.h. */
struct sparsewire_encode {
    uint32_t width;
    uint32_t num_cuts;
    const uint8_t *cuts;
    uint64_t num_changed;
    const uint32_t *ranks;
    const uint8_t *classes;
    const void *old_changed;
    const void *new_changed;
    const uint64_t *class_sizes;
    void *scratch;
    uint64_t scratch_bytes;
    uint8_t *body;
    uint64_t body_bytes;
};

/* Reads a classed body against the base; see decode.h. */
struct sparsewire_decode {
    uint32_t width;
    uint32_t reserved;
    const uint8_t *body;
    uint64_t body_bytes;
    uint64_t num_changed;     /* as the chunk's header states */
    uint64_t num_segments;
    const void *const *old_bits;
    const uint64_t *counts;
    void *scratch;
    uint64_t scratch_bytes;
    uint64_t capacity;        /* elements that each of the next three has room for, slack included */
    uint32_t *positions;      /* out: place of each change in its segment */
    void *old_changed;        /* out */
    void *new_changed;        /* out */
    uint64_t *num_per_segment; /* out: changes of each segment */
};

/* Turns positions in segments into positions in tensors and sums up digests; see digest.h. */
struct sparsewire_finish {
    uint32_t width;
    uint32_t reserved;
    uint64_t num_segments;
    const uint64_t *starts;       /* flat position at which each segment begins in its tensor */
    const uint64_t *num_changed;  /* changes of each segment, in order */
    const uint32_t *positions;
    const void *old_changed;
    const void *new_changed;
    int64_t *indices;             /* out: flat positions in the tensors */
    uint64_t *digests;            /* out: two for each segment, new terms minus old ones */
};

#endif
