/* Checks, decodes and places many chunks in one call, without the interpreter.
 *
 * native.py builds a job and calls tracefile_decode with it, from any number of threads at once: each takes the
 * next chunk until there are none. The checksum and the decompressor are functions of the crc32c and numcodecs
 * packages, passed in as pointers, so this file needs nothing but a C compiler. All numbers of a job are int64;
 * counts are of ids where they are not of bytes.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CRC_BYTES = 4, BLOSC_HEADER_BYTES = 16 };

typedef uint32_t (*checksum_function)(uint32_t crc, const unsigned char *data, unsigned long length);
typedef int (*decompress_function)(const void *source, void *target, size_t target_bytes, int threads);

typedef struct {
    _Atomic int64_t next; /* the chunk to take next */
    _Atomic int64_t bad;  /* the first chunk found bad; `chunks` while there is none */
    int64_t chunks;
    int64_t chunk_bytes; /* decoded */
    int64_t row_chunks;  /* the grid's width: chunk numbers count row chunks of the first layers first */
    int64_t chunk_width; /* ids of one layer of a chunk */
    int64_t id_bytes;
    int64_t out_width; /* ids of one layer of the output */
    int64_t out_id_bytes;
    int64_t out;        /* address */
    int64_t checksum;   /* address */
    int64_t decompress; /* address; 0: chunks are not compressed */
    int64_t row_copies;
    int64_t layer_copies;
    /* Of each chunk its number, then of each its address, its encoded bytes, and the address that is to hold it
     * decoded or 0. Then the row copies and the layer copies, each ordered by its chunk. */
    int64_t tables[];
} job;

typedef struct {
    int64_t chunk; /* along rows */
    int64_t from, to, count;
} row_copy;

typedef struct {
    int64_t chunk; /* along layers */
    int64_t from, to;
} layer_copy;

static uint32_t little_endian(const unsigned char *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The first of `count` records of `width` numbers whose first number is `chunk` or more. */
static int64_t first_of(const int64_t *records, int64_t count, int64_t width, int64_t chunk) {
    int64_t low = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (records[(low + half) * width] < chunk) {
            low += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

/* memcpy, because neither side need be aligned; compilers make vector moves of it. */
#define WIDEN(from_type, to_type)                                   \
    for (int64_t i = 0; i < count; i++) {                           \
        from_type id;                                               \
        memcpy(&id, from + i * (int64_t)sizeof id, sizeof id);      \
        to_type wide = id;                                          \
        memcpy(to + i * (int64_t)sizeof wide, &wide, sizeof wide);  \
    }                                                               \
    break;

static void copy_ids(unsigned char *to, int64_t to_bytes, const unsigned char *from, int64_t from_bytes,
                     int64_t count) {
    switch (from_bytes * 16 + to_bytes) {
    case 0x12: WIDEN(uint8_t, uint16_t)
    case 0x14: WIDEN(uint8_t, uint32_t)
    case 0x18: WIDEN(uint8_t, uint64_t)
    case 0x24: WIDEN(uint16_t, uint32_t)
    case 0x28: WIDEN(uint16_t, uint64_t)
    default: memcpy(to, from, (size_t)(count * from_bytes)); /* the same width on both sides */
    }
}

static void place(const job *work, int64_t number, const unsigned char *block) {
    const row_copy *rows = (const row_copy *)(work->tables + 4 * work->chunks);
    const layer_copy *layers = (const layer_copy *)(rows + work->row_copies);
    int64_t row_chunk = number % work->row_chunks, layer_chunk = number / work->row_chunks;
    int64_t first_row = first_of(&rows->chunk, work->row_copies, sizeof *rows / sizeof(int64_t), row_chunk);
    int64_t layer = first_of(&layers->chunk, work->layer_copies, sizeof *layers / sizeof(int64_t), layer_chunk);
    unsigned char *out = (unsigned char *)(uintptr_t)work->out;
    for (; layer < work->layer_copies && layers[layer].chunk == layer_chunk; layer++) {
        const unsigned char *from = block + layers[layer].from * work->chunk_width * work->id_bytes;
        unsigned char *to = out + layers[layer].to * work->out_width * work->out_id_bytes;
        for (int64_t row = first_row; row < work->row_copies && rows[row].chunk == row_chunk; row++) {
            copy_ids(to + rows[row].to * work->out_id_bytes, work->out_id_bytes,
                     from + rows[row].from * work->id_bytes, work->id_bytes, rows[row].count);
        }
    }
}

enum { DAMAGED, DECODED, NO_MEMORY };

/* Check and decode chunk i, and place what is wanted of it. */
static int decode(const job *work, int64_t i, unsigned char **scratch) {
    const unsigned char *source = (const unsigned char *)(uintptr_t)work->tables[work->chunks + i];
    int64_t payload = work->tables[2 * work->chunks + i] - CRC_BYTES;
    unsigned char *keep = (unsigned char *)(uintptr_t)work->tables[3 * work->chunks + i];
    checksum_function checksum = (checksum_function)(uintptr_t)work->checksum;
    decompress_function decompress = (decompress_function)(uintptr_t)work->decompress;
    const unsigned char *block = source;
    /* Before anything else: what follows trusts the bytes. */
    if (payload < 0 || ~checksum(~UINT32_C(0), source, (unsigned long)payload) != little_endian(source + payload))
        return DAMAGED;
    if (!decompress) {
        if (payload != work->chunk_bytes)
            return DAMAGED;
        if (keep)
            memcpy(keep, source, (size_t)payload);
    } else {
        if (payload < BLOSC_HEADER_BYTES || little_endian(source + 4) != work->chunk_bytes ||
            little_endian(source + 12) != payload)
            return DAMAGED;
        /* Only now: a damaged document may name any size, but so large a chunk is not there. */
        if (!keep && !*scratch && !(*scratch = malloc((size_t)work->chunk_bytes)))
            return NO_MEMORY;
        unsigned char *target = keep ? keep : *scratch;
        if (decompress(source, target, (size_t)work->chunk_bytes, 1) != work->chunk_bytes)
            return DAMAGED;
        block = target;
    }
    place(work, work->tables[i], block);
    return DECODED;
}

/* Work on a job until none of its chunks is left to take. Returns 0, or -1 where there is no memory. */
__attribute__((visibility("default"))) int tracefile_decode(job *work) {
    unsigned char *scratch = NULL;
    int result = DECODED;
    while (result == DECODED) {
        int64_t i = atomic_fetch_add(&work->next, 1);
        int64_t bad = atomic_load(&work->bad);
        if (i >= work->chunks || i > bad)
            break; /* all are taken, or one before it is bad already */
        result = decode(work, i, &scratch);
        while (result == DAMAGED && i < bad && !atomic_compare_exchange_weak(&work->bad, &bad, i)) {
        }
    }
    free(scratch);
    return result == NO_MEMORY ? -1 : 0;
}

/* The sha256 of the source that this was built from. */
__attribute__((visibility("default"))) const char tracefile_source[] = SOURCE_HASH;
