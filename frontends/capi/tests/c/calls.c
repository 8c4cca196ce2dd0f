/* Calls every function of quinion.h: as it is meant, and with arguments that are wrong.
 *
 *   calls FOLDER SERVER    a folder that is empty, and the name of a server with the object mem://t/a
 *
 * It is run under AddressSanitizer and UndefinedBehaviorSanitizer, and under valgrind: so what is checked is also that
 * no call touches memory that is not its own, and that all of it is given back. */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1u << 20)
/* An offset with which a length of 2 is too much. */
#define FAR ((uint64_t)INT64_MAX - 1)

static char path[4096];

static void write_file(size_t bytes) {
    FILE *file = fopen(path, "w");
    CHECK(file);
    for (size_t i = 0; i < bytes; i++) fputc((int)(i % 251), file);
    CHECK(fclose(file) == 0);
}

static qn_cache *new_cache_with(uint32_t flags) {
    qn_cache_options options = {.size = sizeof options, .memory = 16 * MIB, .flags = flags};
    qn_cache *cache = (qn_cache *)&options;
    CHECK(qn_cache_open(&options, &cache) == 0 && cache);
    return cache;
}

static qn_cache *new_cache(void) { return new_cache_with(0); }

static void caches(void) {
    qn_cache *cache = (qn_cache *)path;
    FAILS(qn_cache_open(NULL, NULL), EINVAL, "is NULL");
    qn_cache_options options = {0};
    FAILS(qn_cache_open(&options, &cache), EINVAL, "set its field size to sizeof(struct qn_cache_options)");
    CHECK(!cache);
    options.size = SIZE_MAX;
    FAILS(qn_cache_open(&options, &cache), EINVAL, "set its field size");
    options = (qn_cache_options){.size = sizeof options, .flags = 1u << 31};
    FAILS(qn_cache_open(&options, &cache), EINVAL, "0x80000000");
    options = (qn_cache_options){.size = sizeof options, .reserved = 1};
    FAILS(qn_cache_open(&options, &cache), EINVAL, "reserved");
    options = (qn_cache_options){.size = sizeof options, .memory = 1};
    FAILS(qn_cache_open(&options, &cache), EINVAL, "cannot build a cache");
    options = (qn_cache_options){.size = sizeof options, .memory = 16 * MIB, .disk_folder = "/dev/null/x", .disk_bytes = 1};
    CHECK(qn_cache_open(&options, &cache) < 0 && !cache);

    /* Memory is taken at once where that is asked for; a NULL cache is refused. */
    cache = new_cache_with(QN_CACHE_POPULATE);
    qn_stats taken = {.size = sizeof taken};
    CHECK(qn_cache_stats(cache, &taken) == 0 && taken.used_bytes > 8 * MIB && taken.used_bytes <= 16 * MIB);
    int64_t had = qn_cache_populate(cache, 1);
    CHECK(had > (int64_t)(8 * MIB) && had <= (int64_t)taken.used_bytes && qn_cache_close(cache) == 0);
    cache = new_cache();
    CHECK(qn_cache_stats(cache, &taken) == 0 && (int64_t)taken.used_bytes < had);
    int64_t some = qn_cache_populate(cache, 4 * MIB), all = qn_cache_populate(cache, UINT64_MAX);
    CHECK(some >= (int64_t)(4 * MIB) && some <= all && all > (int64_t)(8 * MIB) && all <= (int64_t)(16 * MIB));
    FAILS(qn_cache_populate(NULL, 1), EINVAL, "the cache is NULL");
    CHECK(qn_cache_close(cache) == 0);

    /* A struct of a newer release, which asks for nothing new, and then for something. */
    struct { qn_cache_options known; uint64_t more[4]; } newer = {.known = {.size = sizeof newer, .memory = 16 * MIB}};
    newer.known.readahead = QN_NO_READAHEAD;
    newer.known.flags = QN_CACHE_THREADS;
    CHECK(qn_cache_open(&newer.known, &cache) == 0);
    newer.more[3] = 1;
    qn_cache *other;
    FAILS(qn_cache_open(&newer.known, &other), EINVAL, "does not know");
    CHECK(!other);

    qn_stats stats = {.size = sizeof stats};
    CHECK(qn_cache_stats(cache, &stats) == 0 && stats.size == sizeof stats && stats.memory_bytes == 16 * MIB);
    /* An older caller has a shorter struct: what lies behind it stays. */
    uint64_t two[3] = {16, 0, 77};
    CHECK(qn_cache_stats(cache, (qn_stats *)two) == 0 && two[0] == 16 && two[1] == 16 * MIB && two[2] == 77);
    stats.size = 3;
    FAILS(qn_cache_stats(cache, &stats), EINVAL, "sizeof(struct qn_stats)");
    FAILS(qn_cache_stats(cache, NULL), EINVAL, "is NULL");
    FAILS(qn_cache_stats(NULL, &stats), EINVAL, "the cache is NULL");
    uint64_t value = 7;
    CHECK(qn_cache_stat(cache, "memory_max_bytes", &value) == 0 && value == 16 * MIB);
    FAILS(qn_cache_stat(cache, "hitz", &value), ENOENT, "evicted_pages");
    FAILS(qn_cache_stat(cache, "\xff", &value), EINVAL, "UTF-8");
    FAILS(qn_cache_stat(cache, NULL, &value), EINVAL, "is NULL");
    FAILS(qn_cache_stat(cache, "hits", NULL), EINVAL, "is NULL");
    FAILS(qn_cache_resize(cache, 1), EINVAL, "resize");
    CHECK(qn_cache_resize(cache, 16 * MIB) == 0 && qn_cache_sync(cache) == 0 && qn_cache_check(cache) == 0);
    FAILS(qn_cache_resize(NULL, 0), EINVAL, "is NULL");
    FAILS(qn_cache_sync(NULL), EINVAL, "is NULL");
    FAILS(qn_cache_check(NULL), EINVAL, "is NULL");
    FAILS(qn_cache_close(NULL), EINVAL, "is NULL");
    CHECK(qn_cache_close(cache) == 0);
}

static void opens(void) {
    qn_cache *cache = new_cache();
    qn_file *file = (qn_file *)path;
    FAILS(qn_open(NULL, path, NULL, &file), EINVAL, "the cache is NULL");
    CHECK(!file);
    FAILS(qn_open(cache, NULL, NULL, &file), EINVAL, "the path is NULL");
    FAILS(qn_open(cache, path, NULL, NULL), EINVAL, "is NULL");
    FAILS(qn_open(cache, "/nonexistent/x", NULL, &file), ENOENT, "/nonexistent/x");
    FAILS(qn_open(cache, "/", NULL, &file), EISDIR, "directory");
    FAILS(qn_open(cache, "/proc/self/maps", NULL, &file), EINVAL, "cannot open");
    qn_open_options options = {0};
    FAILS(qn_open(cache, path, &options, &file), EINVAL, "sizeof(struct qn_open_options)");
    options = (qn_open_options){.size = sizeof options, .flags = 64};
    FAILS(qn_open(cache, path, &options, &file), EINVAL, "0x40");
    options = (qn_open_options){.size = sizeof options, .coherence = 9};
    FAILS(qn_open(cache, path, &options, &file), EINVAL, "coherence 9");
    options = (qn_open_options){.size = sizeof options, .durability = 9};
    FAILS(qn_open(cache, path, &options, &file), EINVAL, "durability 9");
    options = (qn_open_options){.size = sizeof options, .reserved = 9};
    FAILS(qn_open(cache, path, &options, &file), EINVAL, "reserved");
    options = (qn_open_options){.size = sizeof options, .flags = QN_OPEN_TRUNCATE};
    FAILS(qn_open(cache, path, &options, &file), EINVAL, "add QN_OPEN_WRITE");
    for (uint32_t coherence = QN_COHERENCE_CHECK; coherence <= QN_COHERENCE_IMMUTABLE; coherence++) {
        options = (qn_open_options){.size = sizeof options, .coherence = coherence};
        CHECK(qn_open(cache, path, &options, &file) == 0 && qn_close(file) == 0);
    }
    FAILS(qn_open_fd(cache, -1, NULL, &file), EBADF, "descriptor -1");
    FAILS(qn_open_fd(cache, 1000, NULL, &file), EBADF, "descriptor 1000");
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && qn_open_fd(cache, fd, NULL, &file) == 0 && close(fd) == 0);
    CHECK(qn_length(file) == 100000);
    FAILS(qn_close(NULL), EINVAL, "the file is NULL");
    /* The file keeps the cache. */
    CHECK(qn_cache_close(cache) == 0);
    char byte;
    CHECK(qn_pread(file, &byte, 1, 300) == 1 && byte == 300 % 251);
    CHECK(qn_close(file) == 0);
}

static void reads(void) {
    qn_cache *cache = new_cache();
    qn_file *file;
    CHECK(qn_open(cache, path, NULL, &file) == 0);
    unsigned char buffer[5000];
    FAILS(qn_pread_with(file, buffer, 100, 0, QN_READ_CACHED_ONLY), EAGAIN,
          "without QN_READ_NOWAIT and QN_READ_CACHED_ONLY; or, after QN_READ_NOWAIT,");
    CHECK(qn_pread(file, buffer, sizeof buffer, 4000) == sizeof buffer);
    for (size_t i = 0; i < sizeof buffer; i++) CHECK(buffer[i] == (4000 + i) % 251);
    CHECK(qn_pread_with(file, buffer, 100, 4096, QN_READ_CACHED_ONLY | QN_READ_NOWAIT) == 100);
    CHECK(qn_pread_with(file, buffer, 100, 50000, QN_READ_UNCACHED) == 100 && buffer[0] == 50000 % 251);
    CHECK(qn_pread(file, buffer, 100, 99990) == 10 && qn_pread(file, buffer, 100, 100000) == 0);
    CHECK(qn_pread(file, NULL, 0, 0) == 0 && qn_pread(file, NULL, 0, UINT64_MAX) == 0);
    FAILS(qn_pread(file, NULL, 1, 0), EINVAL, "the buffer is NULL");
    FAILS(qn_pread(NULL, buffer, 1, 0), EINVAL, "the file is NULL");
    FAILS(qn_pread(file, buffer, 2, FAR), EINVAL, "2^63 - 1");
    FAILS(qn_pread(file, buffer, 1, UINT64_MAX), EINVAL, "2^63 - 1");
    FAILS(qn_pread(file, buffer, SIZE_MAX, 0), EINVAL, "2^63 - 1");
    FAILS(qn_pread_with(file, buffer, 1, 0, 8), EINVAL, "0x8");
    FAILS(qn_pread_with(NULL, buffer, 1, 0, 0), EINVAL, "is NULL");

    CHECK(qn_advise(file, QN_ADVICE_RANDOM) == 0);
    FAILS(qn_advise(file, 4), EINVAL, "advice 4");
    FAILS(qn_advise(NULL, 0), EINVAL, "is NULL");
    CHECK(qn_dont_need(file, 0, 1000000) > 0);
    FAILS(qn_dont_need(file, FAR, 2), EINVAL, "2^63 - 1");
    FAILS(qn_dont_need(NULL, 0, 1), EINVAL, "is NULL");
    CHECK(qn_will_need(file, 0, 8192) == 8192);
    FAILS(qn_will_need(file, FAR, 2), EINVAL, "2^63 - 1");
    FAILS(qn_will_need(NULL, 0, 1), EINVAL, "is NULL");
    CHECK(qn_revalidate(file) >= 0);
    FAILS(qn_revalidate(NULL), EINVAL, "is NULL");
    FAILS(qn_length(NULL), EINVAL, "is NULL");
    CHECK(qn_close(file) == 0 && qn_cache_close(cache) == 0);
}

static void batches(void) {
    qn_cache *cache = new_cache(), *cache2 = new_cache();
    qn_file *file, *file2, *memory;
    CHECK(qn_open(cache, path, NULL, &file) == 0 && qn_open(cache2, path, NULL, &file2) == 0);
    qn_memory_file_options options = {.size = sizeof options, .length = 1000};
    CHECK(qn_memory_file(cache, &options, &memory) == 0);
    unsigned char buffers[40][600];
    qn_read reads[40];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 40; i++) {
            qn_file *from = i % 5 == 4 ? memory : i % 2 ? file2 : file;
            reads[i] = (qn_read){from, buffers[39 - i], 600, (uint64_t)i * 2510, 99};
        }
        CHECK(qn_pread_batch(reads, 40, 0) == 0);
        for (int i = 0; i < 40; i++) {
            int64_t expected = i % 5 == 4 ? 0 : i == 39 ? 600 : 600;
            if (i * 2510 + 600 > 100000) expected = 100000 - i * 2510;
            CHECK(reads[i].result == expected);
            for (int64_t at = 0; at < expected; at++) CHECK(buffers[39 - i][at] == at % 251);
        }
    }
    CHECK(qn_pread_batch(NULL, 0, 0) == 0);
    FAILS(qn_pread_batch(NULL, 1, 0), EINVAL, "array");
    FAILS(qn_pread_batch(reads, SIZE_MAX, 0), EINVAL, "array");
    FAILS(qn_pread_batch(reads, 40, 64), EINVAL, "0x40");
    CHECK(reads[0].result == -EINVAL);
    reads[7].buffer = buffers[3] + 599;
    FAILS(qn_pread_batch(reads, 40, 0), EINVAL, "overlap");
    CHECK(reads[39].result == -EINVAL);
    reads[7].buffer = buffers[39 - 7];
    reads[8].file = NULL;
    FAILS(qn_pread_batch(reads, 40, 0), EINVAL, "file of a read is NULL");
    /* One that fails does not stop the others. */
    qn_read two[2] = {{memory, buffers[0], 10, 0, 0}, {file, buffers[1], 10, 251, 0}};
    FAILS(qn_pread_batch(two, 2, QN_READ_NOWAIT), EOPNOTSUPP, "memory file");
    CHECK(two[0].result == -EOPNOTSUPP && two[1].result == 10 && buffers[1][9] == 9);
    CHECK(qn_close(file) == 0 && qn_close(file2) == 0 && qn_close(memory) == 0);
    CHECK(qn_cache_close(cache) == 0 && qn_cache_close(cache2) == 0);
}

static void writes(void) {
    qn_cache *cache = new_cache();
    qn_file *reader, *file;
    CHECK(qn_open(cache, path, NULL, &reader) == 0);
    FAILS(qn_pwrite(reader, "x", 1, 0), EBADF, "opened for reading only; open it with QN_OPEN_WRITE");
    qn_open_options options = {.size = sizeof options, .flags = QN_OPEN_WRITE, .durability = QN_DURABLE_ON_SYNC};
    CHECK(qn_open(cache, path, &options, &file) == 0);
    CHECK(qn_pwrite(file, "hello", 5, 4094) == 5);
    char buffer[6] = {0};
    CHECK(qn_pread(reader, buffer, 5, 4094) == 5 && strcmp(buffer, "hello") == 0);
    CHECK(qn_append(file, "end", 3) == 100000 && qn_length(reader) == 100003);
    CHECK(qn_sync(file, QN_SYNC_DATA) == 0 && qn_sync(file, QN_SYNC_ALL) == 0);
    struct stat status;
    CHECK(stat(path, &status) == 0 && status.st_size == 100003);
    FAILS(qn_sync(file, 2), EINVAL, "kind of sync 2");
    FAILS(qn_sync(NULL, 0), EINVAL, "is NULL");
    CHECK(qn_truncate(file, 50) == 0 && qn_length(file) == 50 && qn_allocate(file, 0, 100) == 0 && qn_length(file) == 50);
    CHECK(qn_punch_hole(file, 0, 10) == 0 && qn_pread(file, buffer, 1, 3) == 1 && buffer[0] == 0);
    FAILS(qn_truncate(file, UINT64_MAX), EINVAL, "2^63 - 1");
    FAILS(qn_truncate(NULL, 0), EINVAL, "is NULL");
    FAILS(qn_punch_hole(file, FAR, 2), EINVAL, "2^63 - 1");
    FAILS(qn_punch_hole(NULL, 0, 1), EINVAL, "is NULL");
    FAILS(qn_allocate(file, FAR, 2), EINVAL, "2^63 - 1");
    FAILS(qn_allocate(NULL, 0, 1), EINVAL, "is NULL");
    FAILS(qn_pwrite(file, "xy", 2, FAR), EINVAL, "2^63 - 1");
    FAILS(qn_pwrite(file, NULL, 1, 0), EINVAL, "is NULL");
    FAILS(qn_pwrite(NULL, "x", 1, 0), EINVAL, "is NULL");
    CHECK(qn_pwrite(file, NULL, 0, 0) == 0);
    FAILS(qn_append(file, NULL, 1), EINVAL, "is NULL");
    FAILS(qn_append(NULL, "x", 1), EINVAL, "is NULL");
    CHECK(qn_close(file) == 0 && qn_close(reader) == 0 && qn_cache_sync(cache) == 0 && qn_cache_close(cache) == 0);
}

static void pins(void) {
    qn_cache *cache = new_cache();
    qn_file *file;
    CHECK(qn_open(cache, path, NULL, &file) == 0);
    qn_pin *pin = (qn_pin *)path;
    FAILS(qn_pin_range(file, FAR, 2, &pin), EINVAL, "2^63 - 1");
    CHECK(!pin);
    FAILS(qn_pin_range(NULL, 0, 1, &pin), EINVAL, "is NULL");
    FAILS(qn_pin_range(file, 0, 1, NULL), EINVAL, "is NULL");
    CHECK(qn_pin_range(file, 1000, 60000, &pin) == 0 && qn_pin_length(pin) == 60000);
    const qn_run *runs;
    size_t count, at = 0;
    CHECK(qn_pin_runs(pin, &runs, &count) == 0 && sizeof(qn_run) == sizeof(struct iovec));
    /* The pin keeps its bytes when the file and the cache are closed. */
    CHECK(qn_close(file) == 0 && qn_cache_close(cache) == 0);
    const struct iovec *vector = (const struct iovec *)runs;
    for (size_t run = 0; run < count; run++)
        for (size_t i = 0; i < vector[run].iov_len; i++, at++)
            CHECK(((const unsigned char *)vector[run].iov_base)[i] == (1000 + at) % 251);
    CHECK(at == 60000);
    const void *data = NULL;
    int mapped = qn_pin_mapped(pin, &data);
    CHECK(mapped == (count > 1 ? -EOPNOTSUPP : 0) && (mapped || data == runs[0].data));
    FAILS(qn_pin_mapped(pin, NULL), EINVAL, "is NULL");
    FAILS(qn_pin_mapped(NULL, &data), EINVAL, "is NULL");
    FAILS(qn_pin_runs(pin, NULL, &count), EINVAL, "is NULL");
    FAILS(qn_pin_runs(pin, &runs, NULL), EINVAL, "is NULL");
    FAILS(qn_pin_runs(NULL, &runs, &count), EINVAL, "is NULL");
    FAILS(qn_pin_length(NULL), EINVAL, "is NULL");
    FAILS(qn_unpin(NULL), EINVAL, "is NULL");
    CHECK(qn_unpin(pin) == 0);
}

static void memory_files(void) {
    qn_cache *cache = new_cache();
    qn_file *file;
    qn_memory_file_options options = {.size = sizeof options, .length = (uint64_t)1 << 40, .name = "scratch"};
    CHECK(qn_memory_file(cache, &options, &file) == 0 && qn_length(file) == (int64_t)1 << 40);
    CHECK(qn_pwrite(file, "abc", 3, (uint64_t)1 << 39) == 3);
    char buffer[4] = {0};
    CHECK(qn_pread(file, buffer, 3, (uint64_t)1 << 39) == 3 && strcmp(buffer, "abc") == 0);
    qn_pin *pin;
    CHECK(qn_pin_range(file, ((uint64_t)1 << 39) - 100000, 100003, &pin) == 0 && qn_pin_length(pin) == 100003);
    CHECK(qn_pwrite(file, "xyz", 3, (uint64_t)1 << 39) == 3);
    const qn_run *runs;
    size_t count;
    CHECK(qn_pin_runs(pin, &runs, &count) == 0 && count >= 2);
    CHECK(memcmp((const char *)runs[count - 1].data + runs[count - 1].length - 3, "abc", 3) == 0);
    const void *data;
    FAILS(qn_pin_mapped(pin, &data), EOPNOTSUPP, "qn_pin_runs");
    CHECK(qn_unpin(pin) == 0);
    CHECK(qn_allocate(file, 0, 4 << 20) == 0 && qn_pwrite(file, "first", 5, 0) == 5 && qn_pwrite(file, "last", 4, 3 << 20) == 4);
    CHECK(qn_pin_range(file, 0, (3 << 20) + 4, &pin) == 0 && qn_pin_runs(pin, &runs, &count) == 0);
    int mapped = qn_pin_mapped(pin, &data);
    CHECK(mapped == 0 || (mapped == -EOPNOTSUPP && count > 48));
    CHECK(mapped || (memcmp(data, "first", 5) == 0 && memcmp((const char *)data + (3 << 20), "last", 4) == 0));
    CHECK(qn_unpin(pin) == 0);
    FAILS(qn_pin_range(file, 0, (size_t)1 << 39, &pin), ENOBUFS, "runs");
    CHECK(qn_append(file, "e", 1) == (int64_t)1 << 40 && qn_sync(file, QN_SYNC_ALL) == 0);
    CHECK(qn_punch_hole(file, 0, (uint64_t)1 << 40) == 0 && qn_truncate(file, 100) == 0 && qn_allocate(file, 0, 50) == 0);
    FAILS(qn_advise(file, QN_ADVICE_NORMAL), EOPNOTSUPP, "memory file");
    FAILS(qn_will_need(file, 0, 1), EOPNOTSUPP, "memory file");
    FAILS(qn_dont_need(file, 0, 1), EOPNOTSUPP, "memory file");
    FAILS(qn_revalidate(file), EOPNOTSUPP, "memory file");
    CHECK(qn_close(file) == 0);
    options.size = 1;
    FAILS(qn_memory_file(cache, &options, &file), EINVAL, "sizeof(struct qn_memory_file_options)");
    options = (qn_memory_file_options){.size = sizeof options, .length = UINT64_MAX};
    FAILS(qn_memory_file(cache, &options, &file), EINVAL, "2^63 - 1");
    options = (qn_memory_file_options){.size = sizeof options, .flags = 2};
    FAILS(qn_memory_file(cache, &options, &file), EINVAL, "0x2");
    options = (qn_memory_file_options){.size = sizeof options, .name = "\xc3"};
    FAILS(qn_memory_file(cache, &options, &file), EINVAL, "UTF-8");
    FAILS(qn_memory_file(NULL, NULL, &file), EINVAL, "is NULL");
    FAILS(qn_memory_file(cache, NULL, NULL), EINVAL, "is NULL");
    options = (qn_memory_file_options){.size = sizeof options, .pin_wait_ms = 1, .flags = QN_MEMORY_UNEVICTABLE};
    CHECK(qn_memory_file(cache, &options, &file) == 0 && qn_pwrite(file, "abc", 3, 0) == 3);
    CHECK(qn_pin_range(file, 0, 3, &pin) == 0);
    FAILS(qn_pwrite(file, "x", 1, 0), EBUSY, "with a pin_wait_ms of 0");
    CHECK(qn_unpin(pin) == 0 && qn_pwrite(file, "x", 1, 0) == 1 && qn_close(file) == 0 && qn_cache_close(cache) == 0);
}

static void pools(void) {
    qn_cache *cache = new_cache();
    qn_pool *pool, *again;
    qn_pool_options options = {.size = sizeof options, .limit = 4 * MIB, .protected_bytes = MIB};
    CHECK(qn_pool_add(cache, "tables", &options, &pool) == 0);
    FAILS(qn_pool_add(cache, "tables", &options, &again), EINVAL, "tables");
    FAILS(qn_pool_add(cache, NULL, NULL, &again), EINVAL, "is NULL");
    FAILS(qn_pool_add(NULL, "x", NULL, &again), EINVAL, "is NULL");
    FAILS(qn_pool_add(cache, "x", NULL, NULL), EINVAL, "is NULL");
    options.size = 8;
    FAILS(qn_pool_add(cache, "x", &options, &again), EINVAL, "sizeof(struct qn_pool_options)");
    qn_open_options opened = {.size = sizeof opened, .pool = pool};
    qn_memory_file_options made = {.size = sizeof made, .pool = pool};
    qn_file *file, *memory, *adopted;
    CHECK(qn_open(cache, path, &opened, &file) == 0 && qn_memory_file(cache, &made, &memory) == 0);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && qn_open_fd(cache, fd, &opened, &adopted) == 0 && close(fd) == 0 && qn_close(adopted) == 0);
    CHECK(qn_pwrite(memory, "x", 1, 8 * MIB) == 1);
    qn_pool_usage usage = {.size = sizeof usage};
    CHECK(qn_pool_stats(pool, &usage) == 0 && usage.limit == 4 * MIB && usage.used_bytes >= 4096);
    CHECK(usage.protected_bytes == MIB);
    /* A memory file without a spill file keeps its pages, so the pool fills up. */
    static char mib[MIB];
    uint64_t at = 0;
    while (at < 8 * MIB && qn_pwrite(memory, mib, MIB, at) == MIB) at += MIB;
    FAILS(qn_pwrite(memory, mib, 1, 7 * MIB), ENOBUFS, "raise the limit by qn_pool_set_limit()");
    FAILS(qn_pool_stats(pool, NULL), EINVAL, "is NULL");
    FAILS(qn_pool_stats(NULL, &usage), EINVAL, "is NULL");
    CHECK(qn_pool_set_protected(pool, 0) == 0 && qn_pool_set_limit(pool, 0) == 0);
    CHECK(qn_pool_stats(pool, &usage) == 0 && usage.limit == 0 && usage.protected_bytes == 0);
    CHECK(qn_pool_set_protected(pool, UINT64_MAX) == -EINVAL && qn_pool_set_limit(pool, 1) == -EINVAL);
    FAILS(qn_pool_set_limit(NULL, 0), EINVAL, "is NULL");
    FAILS(qn_pool_set_protected(NULL, 0), EINVAL, "is NULL");
    FAILS(qn_pool_close(NULL), EINVAL, "is NULL");
    CHECK(qn_pool_close(pool) == 0 && qn_close(memory) == 0 && qn_close(file) == 0 && qn_cache_close(cache) == 0);
}

/* A backend in memory. */
struct store {
    pthread_mutex_t lock;
    char bytes[100000];
    uint64_t length;
    int released, fails;
};

static int64_t store_read(void *context, void *buffer, size_t length, uint64_t offset) {
    struct store *store = context;
    pthread_mutex_lock(&store->lock);
    int64_t answer = -store->fails;
    if (answer == 0 && offset < store->length) {
        answer = (int64_t)(store->length - offset < length ? store->length - offset : length);
        memcpy(buffer, store->bytes + offset, (size_t)answer);
    }
    pthread_mutex_unlock(&store->lock);
    return answer;
}

static int64_t store_write(void *context, const void *buffer, size_t length, uint64_t offset) {
    struct store *store = context;
    if (offset + length > sizeof store->bytes) return -ENOSPC;
    pthread_mutex_lock(&store->lock);
    memcpy(store->bytes + offset, buffer, length);
    if (offset + length > store->length) store->length = offset + length;
    pthread_mutex_unlock(&store->lock);
    return (int64_t)length;
}

static int store_sync(void *context, uint32_t kind, uint64_t offset, uint64_t length) {
    (void)context, (void)offset, (void)length;
    return kind == QN_SYNC_DATA || kind == QN_SYNC_ALL ? 0 : -EINVAL;
}

static int store_truncate(void *context, uint64_t length) {
    struct store *store = context;
    if (length > sizeof store->bytes) return -EFBIG;
    pthread_mutex_lock(&store->lock);
    if (length > store->length) memset(store->bytes + store->length, 0, length - store->length);
    store->length = length;
    pthread_mutex_unlock(&store->lock);
    return 0;
}

static int store_attributes(void *context, qn_attributes *attributes) {
    struct store *store = context;
    if (attributes->size < sizeof *attributes) return -EINVAL;
    pthread_mutex_lock(&store->lock);
    attributes->length = store->length;
    attributes->identity[0] = (uintptr_t)context;
    pthread_mutex_unlock(&store->lock);
    return 0;
}

static void store_release(void *context) {
    struct store *store = context;
    pthread_mutex_lock(&store->lock);
    store->released++;
    pthread_mutex_unlock(&store->lock);
}

/* A thread of the library may release a store after the cache was closed. */
static void wait_for_release(struct store *store) {
    for (int released = 0; !released; sched_yield()) {
        pthread_mutex_lock(&store->lock);
        released = store->released;
        pthread_mutex_unlock(&store->lock);
    }
}

static void backends(void) {
    struct store *store = calloc(1, sizeof *store);
    CHECK(store && pthread_mutex_init(&store->lock, NULL) == 0);
    store->length = 50000;
    store->bytes[49999] = 'z';
    qn_backend backend = {
        .size = sizeof backend, .context = store, .read = store_read, .write = store_write, .sync = store_sync,
        .truncate = store_truncate, .attributes = store_attributes, .release = store_release};
    qn_cache *cache = new_cache();
    qn_file *file;
    qn_open_options options = {.size = sizeof options, .flags = QN_OPEN_WRITE};
    CHECK(qn_open_backend(cache, &backend, &options, &file) == 0 && qn_length(file) == 50000);
    char byte = 0;
    store->fails = EREMOTEIO;
    FAILS(qn_pread(file, &byte, 1, 49999), EREMOTEIO, "cannot read");
    store->fails = 0;
    CHECK(qn_pread(file, &byte, 1, 49999) == 1 && byte == 'z');
    CHECK(qn_pwrite(file, "w", 1, 60000) == 1 && qn_sync(file, QN_SYNC_ALL) == 0);
    CHECK(store->bytes[60000] == 'w' && store->length == 60001);
    CHECK(qn_truncate(file, 10) == 0 && store->length == 10);
    FAILS(qn_truncate(file, 1000000), EFBIG, "1000000");
    CHECK(qn_close(file) == 0);
    qn_backend wrong = backend;
    wrong.read = NULL;
    FAILS(qn_open_backend(cache, &wrong, NULL, &file), EINVAL, "no read");
    wrong = backend, wrong.sync = NULL;
    FAILS(qn_open_backend(cache, &wrong, NULL, &file), EINVAL, "all three");
    wrong = backend, wrong.threads = 100000;
    FAILS(qn_open_backend(cache, &wrong, NULL, &file), EINVAL, "100000 threads");
    wrong = backend, wrong.size = 0;
    FAILS(qn_open_backend(cache, &wrong, NULL, &file), EINVAL, "sizeof(struct qn_backend)");
    wrong = backend, wrong.write = NULL, wrong.sync = NULL, wrong.truncate = NULL;
    struct store *second = calloc(1, sizeof *second);
    CHECK(second && pthread_mutex_init(&second->lock, NULL) == 0);
    wrong.context = second;
    FAILS(qn_open_backend(cache, &wrong, &options, &file), EBADF, "only reads");
    CHECK(second->released == 0);
    FAILS(qn_open_backend(cache, NULL, NULL, &file), EINVAL, "the backend is NULL");
    FAILS(qn_open_backend(NULL, &backend, NULL, &file), EINVAL, "is NULL");
    FAILS(qn_open_backend(cache, &backend, NULL, NULL), EINVAL, "is NULL");
    CHECK(qn_cache_close(cache) == 0);
    wait_for_release(store);
    CHECK(store->released == 1 && second->released == 0);
    free(store), free(second);
}

static void clients(const char *server) {
    qn_client *client = (qn_client *)path;
    FAILS(qn_connect(NULL, NULL, &client), EINVAL, "is NULL");
    CHECK(!client);
    FAILS(qn_connect("/nonexistent/socket", NULL, &client), ECONNREFUSED, "/nonexistent/socket");
    FAILS(qn_connect("", NULL, &client), EINVAL, "a server's name has 1 to 48 letters");
    FAILS(qn_connect(server, NULL, NULL), EINVAL, "is NULL");
    qn_connect_options options = {.size = 1};
    FAILS(qn_connect(server, &options, &client), EINVAL, "sizeof(struct qn_connect_options)");
    options = (qn_connect_options){.size = sizeof options, .reconnect_ms = QN_NO_RECONNECT};
    CHECK(qn_connect(server, &options, &client) == 0 && qn_client_is_connected(client) == 1);
    FAILS(qn_client_is_connected(NULL), EINVAL, "is NULL");
    qn_file *file;
    FAILS(qn_client_open(client, "mem://t/none", &file), ENOENT, "mem://t/none");
    FAILS(qn_client_open(client, "", &file), EINVAL, "empty");
    /* The open of a pipe would wait for a writer. */
    char pipe_path[sizeof path + 8];
    snprintf(pipe_path, sizeof pipe_path, "%s.pipe", path);
    CHECK(mkfifo(pipe_path, 0600) == 0);
    FAILS(qn_client_open(client, pipe_path, &file), ESPIPE, "seek");
    CHECK(unlink(pipe_path) == 0);
    FAILS(qn_client_open(client, "/tmp", &file), EISDIR, "directory");
    FAILS(qn_client_open(client, NULL, &file), EINVAL, "is NULL");
    FAILS(qn_client_open(NULL, "x", &file), EINVAL, "is NULL");
    FAILS(qn_client_open(client, "x", NULL), EINVAL, "is NULL");
    CHECK(qn_client_open(client, "mem://t/a", &file) == 0 && qn_client_close(client) == 0);
    FAILS(qn_client_close(NULL), EINVAL, "is NULL");
    CHECK(qn_length(file) == 300000);
    unsigned char buffers[4][100];
    CHECK(qn_pread(file, buffers[0], 100, 2510) == 100 && buffers[0][99] == 99 && qn_pread(file, buffers[0], 9, 300000) == 0);
    qn_read reads[4];
    for (int i = 0; i < 4; i++) reads[i] = (qn_read){file, buffers[i], 100, (uint64_t)i * 25100, 0};
    CHECK(qn_pread_batch(reads, 4, 0) == 0 && qn_will_need(file, 0, 300000) == 0);
    for (int i = 0; i < 4; i++) CHECK(reads[i].result == 100 && buffers[i][7] == 7);
    qn_pin *pin;
    const qn_run *runs;
    size_t count;
    CHECK(qn_pin_range(file, 251, 100000, &pin) == 0 && qn_pin_length(pin) == 100000 && qn_pin_runs(pin, &runs, &count) == 0);
    CHECK(((const unsigned char *)runs[0].data)[5] == 5 && qn_unpin(pin) == 0);
    FAILS(qn_pread_with(file, buffers[0], 1, 0, QN_READ_NOWAIT), EOPNOTSUPP, "file of a server");
    FAILS(qn_pwrite(file, "x", 1, 0), EOPNOTSUPP, "file of a server");
    FAILS(qn_sync(file, QN_SYNC_DATA), EOPNOTSUPP, "file of a server");
    CHECK(qn_close(file) == 0);
}

/* A forked child has nothing, and frees nothing. */
static void forks(void) {
    /* Static, so that valgrind finds in the child what is left there. */
    static qn_cache *cache;
    static qn_file *file;
    static qn_pin *pin;
    static qn_pool *pool;
    char byte;
    cache = new_cache();
    CHECK(qn_open(cache, path, NULL, &file) == 0 && qn_pin_range(file, 0, 10, &pin) == 0);
    CHECK(qn_pool_add(cache, "p", NULL, &pool) == 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        FAILS(qn_pread(file, &byte, 1, 0), ECHILD, "fork");
        FAILS(qn_length(file), ECHILD, "fork");
        FAILS(qn_cache_check(cache), ECHILD, "fork");
        qn_file *opened;
        FAILS(qn_open(cache, path, NULL, &opened), ECHILD, "fork");
        CHECK(qn_unpin(pin) == 0 && qn_pool_close(pool) == 0 && qn_cache_close(cache) == 0);
        /* By threads: valgrind fails in a child that maps a ring where the parent's was, which the child has not. */
        qn_cache *own = new_cache_with(QN_CACHE_THREADS);
        CHECK(qn_open(own, path, NULL, &opened) == 0 && qn_pread(opened, &byte, 1, 0) == 1);
        _exit(qn_close(opened) == 0 && qn_cache_close(own) == 0 ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(qn_pread(file, &byte, 1, 0) == 1);
    CHECK(qn_unpin(pin) == 0 && qn_close(file) == 0 && qn_pool_close(pool) == 0 && qn_cache_close(cache) == 0);
}

static void *other_thread(void *unused) {
    (void)unused;
    CHECK(strcmp(qn_error_message(), "") == 0);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    snprintf(path, sizeof path, "%s/file", argv[1]);
    CHECK(strcmp(qn_error_message(), "") == 0 && qn_version() == QN_VERSION);
    write_file(100000);
    caches(), opens(), reads(), batches(), pins(), memory_files(), pools(), backends(), forks(), writes();
    clients(argv[2]);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    puts("all calls are as they should be");
    return 0;
}
