/* Does the same at random to a file through a cache and to a twin through the kernel, and compares.
 *
 *   differential FOLDER SEED OPERATIONS
 *
 * Reads, batches, pins, writes, appends, cuts, punches and syncs; the bytes, the lengths and the errors are the same,
 * and so are the files at the end. A failure prints the seed and the operation. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Files of at most so many bytes: larger than the cache has room for. */
#define BYTES_MAX (24u << 20)
#define LENGTH_MAX 70000u

static uint64_t state;
static unsigned long long seed, operation;

/* xorshift64*: the same sequence everywhere. */
static uint64_t below(uint64_t bound) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (state * 2685821657736338717u >> 16) % bound;
}

#define SAME(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "seed %llu, operation %llu: %s does not hold; the last message: %s\n", seed, operation, \
                #condition, qn_error_message()); \
            exit(1); \
        } \
    } while (0)

static unsigned char ours[8][LENGTH_MAX], theirs[LENGTH_MAX];
static qn_cache *cache;
static qn_file *file;
static int twin;

static uint64_t offset_at_random(void) {
    off_t length = lseek(twin, 0, SEEK_END);
    switch (below(4)) {
    case 0: return below(BYTES_MAX);
    case 1: return length > 100 ? (uint64_t)length - below(100) : 0;
    default: return below((uint64_t)length + 1);
    }
}

static void read_one(void) {
    uint64_t offset = offset_at_random();
    size_t length = below(LENGTH_MAX);
    int64_t read = qn_pread(file, ours[0], length, offset);
    SAME(read == pread(twin, theirs, length, (off_t)offset) && memcmp(ours[0], theirs, (size_t)read) == 0);
}

static void read_many(void) {
    qn_read reads[8];
    for (int i = 0; i < 8; i++) reads[i] = (qn_read){file, ours[i], below(LENGTH_MAX), offset_at_random(), 0};
    SAME(qn_pread_batch(reads, 8, below(4) ? 0 : QN_READ_UNCACHED) == 0);
    for (int i = 0; i < 8; i++) {
        SAME(reads[i].result == pread(twin, theirs, reads[i].length, (off_t)reads[i].offset));
        SAME(memcmp(ours[i], theirs, (size_t)reads[i].result) == 0);
    }
}

/* A pin has the bytes of the moment at which it was taken, also after a write. */
static void pin_and_write(void) {
    uint64_t offset = offset_at_random();
    size_t length = below(LENGTH_MAX), at = 0, count;
    qn_pin *pin;
    const qn_run *runs;
    SAME(qn_pin_range(file, offset, length, &pin) == 0 && qn_pin_runs(pin, &runs, &count) == 0);
    SAME(qn_pin_length(pin) == pread(twin, theirs, length, (off_t)offset));
    memset(ours[0], (int)below(256), 100);
    SAME(qn_pwrite(file, ours[0], 100, offset) == 100 && pwrite(twin, ours[0], 100, (off_t)offset) == 100);
    for (size_t run = 0; run < count; at += runs[run++].length)
        SAME(memcmp(runs[run].data, theirs + at, runs[run].length) == 0);
    SAME((int64_t)at == qn_pin_length(pin) && qn_unpin(pin) == 0);
}

static void write_one(void) {
    uint64_t offset = offset_at_random();
    size_t length = below(LENGTH_MAX);
    for (size_t i = 0; i < length; i++) ours[0][i] = (unsigned char)(i * 31 + operation);
    if (offset + length > BYTES_MAX) return;
    SAME(qn_pwrite(file, ours[0], length, offset) == (int64_t)length);
    SAME(pwrite(twin, ours[0], length, (off_t)offset) == (ssize_t)length);
}

static void append_one(void) {
    off_t length = lseek(twin, 0, SEEK_END);
    if (length > (off_t)BYTES_MAX - 100) return;
    memset(ours[0], (int)below(256), 100);
    SAME(qn_append(file, ours[0], 100) == length && pwrite(twin, ours[0], 100, length) == 100);
}

static void punch_one(void) {
    uint64_t offset = offset_at_random(), length = 1 + below(LENGTH_MAX);
    SAME(qn_punch_hole(file, offset, length) == 0);
    SAME(fallocate(twin, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length) == 0);
}

static void cut_one(void) {
    uint64_t length = below(3) ? offset_at_random() : below(BYTES_MAX);
    SAME(qn_truncate(file, length) == 0 && ftruncate(twin, (off_t)length) == 0);
}

static void forget_or_resize(void) {
    if (below(2)) SAME(qn_dont_need(file, below(BYTES_MAX), below(BYTES_MAX)) >= 0);
    else SAME(qn_cache_resize(cache, (16 + 2 * below(9)) << 20) == 0);
}

static void step(void) {
    switch (below(20)) {
    case 0: cut_one(); break;
    case 1: punch_one(); break;
    case 2: SAME(qn_sync(file, (uint32_t)below(2)) == 0); break;
    case 3: forget_or_resize(); break;
    case 4: case 5: append_one(); break;
    case 6: case 7: pin_and_write(); break;
    case 8: case 9: case 10: read_many(); break;
    case 11: case 12: case 13: case 14: write_one(); break;
    default: read_one();
    }
    SAME(qn_length(file) == lseek(twin, 0, SEEK_END));
}

int main(int argc, char **argv) {
    char path[2][4096];
    if (argc != 4) return 2;
    seed = strtoull(argv[2], NULL, 10), state = seed * 2 + 1;
    for (int i = 0; i < 2; i++) snprintf(path[i], sizeof path[i], "%s/%s", argv[1], i ? "twin" : "cached");
    twin = open(path[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(twin >= 0);
    qn_cache_options options = {.size = sizeof options, .memory = 16 << 20, .memory_max = 32 << 20};
    qn_open_options opened = {
        .size = sizeof opened, .flags = QN_OPEN_WRITE | QN_OPEN_CREATE | QN_OPEN_TRUNCATE, .mode = 0600};
    CHECK(qn_cache_open(&options, &cache) == 0 && qn_open(cache, path[0], &opened, &file) == 0);
    unsigned long long operations = strtoull(argv[3], NULL, 10);
    for (operation = 0; operation < operations; operation++) step();
    CHECK(qn_cache_check(cache) == 0 && qn_sync(file, QN_SYNC_ALL) == 0);
    CHECK(qn_close(file) == 0 && qn_cache_close(cache) == 0);
    /* What the file system has of both. */
    int cached = open(path[0], O_RDONLY);
    off_t length = lseek(twin, 0, SEEK_END);
    CHECK(cached >= 0 && lseek(cached, 0, SEEK_END) == length);
    for (off_t at = 0; at < length; at += LENGTH_MAX) {
        ssize_t read = pread(cached, ours[0], LENGTH_MAX, at);
        CHECK(read > 0 && read == pread(twin, theirs, LENGTH_MAX, at) && memcmp(ours[0], theirs, (size_t)read) == 0);
    }
    printf("%llu operations of seed %llu gave the same bytes\n", operations, seed);
    return close(cached) || close(twin);
}
