/* The exported functions: each takes the instruction set to run on, which must be one that the processor has. */
#include "abi.h"

#define SW_EXPORT __attribute__((visibility("default")))

#define SW_DECLARE(level)                                                                                            \
    int64_t encode_##level(struct sparsewire_encode *job);                                                           \
    int64_t decode_##level(struct sparsewire_decode *job);                                                           \
    int64_t sample_##level(uint32_t width, uint64_t num_segments, uint64_t *table, uint64_t *elements,                 \
                           uint64_t *counts);                                                                        \
    int64_t digest_range_##level(uint32_t width, const void *bits, uint64_t count, uint64_t start, uint64_t *digest); \
    int64_t digest_positions_##level(uint32_t width, const int64_t *indices, const void *bits, uint64_t count,       \
                                     uint64_t *digest);                                                              \
    int64_t scatter_##level(uint32_t width, void *target, uint64_t size, const int64_t *indices, const void *values, \
                            uint64_t count);                                                                         \
    int64_t compare_##level(uint32_t width, const void *old_bits, const void *new_bits, uint64_t count);               \
    int64_t split_##level(uint32_t width, uint64_t num_segments, uint64_t *table, uint8_t *const *planes);             \
    int64_t join_##level(uint32_t width, uint64_t num_segments, uint64_t *table, uint8_t *const *planes);              \
    int64_t crc32_##level(uint32_t crc, const uint8_t *bytes, uint64_t size);

SW_DECLARE(base)

#if defined(__x86_64__)
SW_DECLARE(avx2)
SW_DECLARE(avx512)
#define SW_CALL(name, ...)                                        \
    switch (isa) {                                                \
    case SW_ISA_AVX512: return name##_avx512(__VA_ARGS__);        \
    case SW_ISA_AVX2: return name##_avx2(__VA_ARGS__);            \
    default: return name##_base(__VA_ARGS__);                     \
    }
#else
#define SW_CALL(name, ...) \
    (void)isa;             \
    return name##_base(__VA_ARGS__);
#endif

/* Compared by the loader before anything else is called: structs and meanings belong to one number. */
SW_EXPORT int32_t sparsewire_abi(void) { return SPARSEWIRE_ABI; }

/* The best instruction set of this processor. */
SW_EXPORT int32_t sparsewire_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                     __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("pclmul");
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                       __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("gfni");
    return avx2 && avx512 ? SW_ISA_AVX512 : avx2 ? SW_ISA_AVX2 : SW_ISA_BASE;
#else
    return SW_ISA_BASE;
#endif
}

SW_EXPORT int64_t sparsewire_encode(int32_t isa, struct sparsewire_encode *job) { SW_CALL(encode, job) }

SW_EXPORT int64_t sparsewire_decode(int32_t isa, struct sparsewire_decode *job) { SW_CALL(decode, job) }

/* Adds up elements by key and changes by key and token of a sample of the segments; see sample.h. */
SW_EXPORT int64_t sparsewire_sample(int32_t isa, uint32_t width, uint64_t num_segments, uint64_t *table, uint64_t *elements,
                                    uint64_t *counts) {
    SW_CALL(sample, width, num_segments, table, elements, counts)
}

SW_EXPORT int64_t sparsewire_digest_range(int32_t isa, uint32_t width, const void *bits, uint64_t count, uint64_t start,
                                          uint64_t *digest) {
    SW_CALL(digest_range, width, bits, count, start, digest)
}

SW_EXPORT int64_t sparsewire_digest_positions(int32_t isa, uint32_t width, const int64_t *indices, const void *bits,
                                              uint64_t count, uint64_t *digest) {
    SW_CALL(digest_positions, width, indices, bits, count, digest)
}

/* Writes values at indices, all of which must be below `size`; else nothing is written. */
SW_EXPORT int64_t sparsewire_scatter(int32_t isa, uint32_t width, void *target, uint64_t size, const int64_t *indices,
                                     const void *values, uint64_t count) {
    SW_CALL(scatter, width, target, size, indices, values, count)
}

/* The number of elements that differ, by a bare loop: what no codec can be faster than. */
SW_EXPORT int64_t sparsewire_compare(int32_t isa, uint32_t width, const void *old_bits, const void *new_bits,
                                     uint64_t count) {
    SW_CALL(compare, width, old_bits, new_bits, count)
}

/* Turns the new bits of segments into byte planes, one address for each byte of an element, lowest byte first; each has as
 * many bytes as there are elements. Fills the rows of digests with those of the new bits. Width 2, 4 or 8. */
SW_EXPORT int64_t sparsewire_split(int32_t isa, uint32_t width, uint64_t num_segments, uint64_t *table,
                                   uint8_t *const *planes) {
    SW_CALL(split, width, num_segments, table, planes)
}

/* The inverse: writes the new bits of segments, and their digests. */
SW_EXPORT int64_t sparsewire_join(int32_t isa, uint32_t width, uint64_t num_segments, uint64_t *table,
                                  uint8_t *const *planes) {
    SW_CALL(join, width, num_segments, table, planes)
}

/* The checksum of bytes that follow others with checksum `crc`; 0 at the beginning. Bit by bit, thus slow, on BASE. */
SW_EXPORT int64_t sparsewire_crc32(int32_t isa, uint32_t crc, const uint8_t *bytes, uint64_t size) {
    SW_CALL(crc32, crc, bytes, size)
}
