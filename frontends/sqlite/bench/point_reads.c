/* Point reads: random reads by primary key, by threads with a connection each, through a VFS.
 *
 *   cc -O2 point_reads.c -o point_reads -lsqlite3 -lpthread
 *   point_reads make DB ROWS                                    rows of 1,000 bytes
 *   point_reads DB VFS EXTENSION THREADS SECONDS MMAP_BYTES     VFS: quinion or unix; EXTENSION: - for none
 *
 * Behind the VFS may stand what else the URI is to have, as quinion&server=main. With POINT_READS_WAIT in the environment it
 * says "ready" when it is warm, and waits for a line: so several processes begin at one time (processes.py).
 *
 * Each row that is read is compared with what it must be. Prints one line of JSON: operations a second, percentiles in
 * nanoseconds, CPU seconds of the process, and its memory. Warm: it reads all rows once before the clock starts.
 */
#include <pthread.h>
#include <sqlite3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { ROW_BYTES = 1000, SAMPLES = 1 << 20 };

static const char *path, *vfs;
static long long rows, mmap_bytes;
static double seconds;

struct worker {
    pthread_t thread;
    uint64_t seed, operations;
    uint32_t *samples;
    size_t count;
};

static void fail(sqlite3 *db, const char *what) {
    fprintf(stderr, "%s: %s\n", what, db ? sqlite3_errmsg(db) : "no connection");
    exit(1);
}

static uint64_t next(uint64_t *seed) {
    *seed ^= *seed << 13, *seed ^= *seed >> 7, *seed ^= *seed << 17;
    return *seed;
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static void execute(sqlite3 *db, const char *statement) {
    if (sqlite3_exec(db, statement, NULL, NULL, NULL)) fail(db, statement);
}

static sqlite3 *connect_to(const char *name) {
    sqlite3 *db;
    char uri[4096];
    snprintf(uri, sizeof uri, "file:%s?vfs=%s", path, name);
    if (sqlite3_open_v2(uri, &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_URI | SQLITE_OPEN_NOMUTEX, NULL))
        fail(db, uri);
    return db;
}

static void fill(unsigned char *row, long long number) {
    for (int at = 0; at < ROW_BYTES; at++) row[at] = (unsigned char)(number * 31 + at);
}

static void make(long long count) {
    sqlite3 *db = connect_to("unix");
    sqlite3_stmt *insert;
    unsigned char row[ROW_BYTES];
    execute(db, "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB); BEGIN");
    if (sqlite3_prepare_v2(db, "INSERT INTO t VALUES (?, ?)", -1, &insert, NULL)) fail(db, "insert");
    for (long long number = 0; number < count; number++) {
        fill(row, number);
        sqlite3_bind_int64(insert, 1, number);
        sqlite3_bind_blob(insert, 2, row, ROW_BYTES, SQLITE_STATIC);
        if (sqlite3_step(insert) != SQLITE_DONE) fail(db, "insert");
        sqlite3_reset(insert);
    }
    execute(db, "COMMIT");
    sqlite3_finalize(insert);
    sqlite3_close(db);
}

static void look(sqlite3 *db, sqlite3_stmt *select, long long number) {
    unsigned char row[ROW_BYTES];
    fill(row, number);
    sqlite3_bind_int64(select, 1, number);
    if (sqlite3_step(select) != SQLITE_ROW || memcmp(sqlite3_column_blob(select, 0), row, ROW_BYTES)) fail(db, "a row is wrong");
    sqlite3_reset(select);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    sqlite3 *db = connect_to(vfs);
    sqlite3_stmt *select;
    char pragma[64];
    snprintf(pragma, sizeof pragma, "PRAGMA mmap_size = %lld", mmap_bytes);
    execute(db, pragma);
    execute(db, "PRAGMA cache_size = -2000; BEGIN");
    if (sqlite3_prepare_v2(db, "SELECT v FROM t WHERE k = ?", -1, &select, NULL)) fail(db, "select");
    double end = now() + seconds;
    for (; worker->operations % 64 || now() < end; worker->operations++) {
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        look(db, select, (long long)(next(&worker->seed) % (uint64_t)rows));
        clock_gettime(CLOCK_MONOTONIC, &after);
        int64_t took = (after.tv_sec - before.tv_sec) * 1000000000LL + after.tv_nsec - before.tv_nsec;
        worker->samples[worker->count++ % SAMPLES] = took > UINT32_MAX ? UINT32_MAX : (uint32_t)took;
    }
    sqlite3_finalize(select);
    sqlite3_close(db);
    return NULL;
}

static int order(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    sqlite3 *first, *loader;
    sqlite3_stmt *statement;
    if (argc == 4 && !strcmp(argv[1], "make")) {
        path = argv[2];
        make(atoll(argv[3]));
        return 0;
    }
    if (argc != 7) {
        fprintf(stderr, "point_reads make DB ROWS, or point_reads DB VFS EXTENSION THREADS SECONDS MMAP_BYTES\n");
        return 2;
    }
    path = argv[1], vfs = argv[2], seconds = atof(argv[5]), mmap_bytes = atoll(argv[6]);
    int threads = atoi(argv[4]);
    if (strcmp(argv[3], "-")) {
        char *wrong = NULL;
        if (sqlite3_open(":memory:", &loader)) fail(loader, "open");
        sqlite3_enable_load_extension(loader, 1);
        if (sqlite3_load_extension(loader, argv[3], NULL, &wrong)) fail(loader, wrong ? wrong : "load");
    }
    first = connect_to(vfs);
    if (sqlite3_prepare_v2(first, "SELECT max(k) + 1 FROM t", -1, &statement, NULL) || sqlite3_step(statement) != SQLITE_ROW)
        fail(first, "count");
    rows = sqlite3_column_int64(statement, 0);
    sqlite3_finalize(statement);
    execute(first, "BEGIN; SELECT sum(length(v)) FROM t; COMMIT");
    if (getenv("POINT_READS_WAIT")) {
        puts("ready");
        fflush(stdout);
        getchar();
    }

    struct worker *workers = calloc((size_t)threads, sizeof *workers);
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    double begun = now();
    for (int at = 0; at < threads; at++) {
        workers[at].seed = 88172645463325252ULL + (uint64_t)at * 7919;
        workers[at].samples = calloc(SAMPLES, sizeof(uint32_t));
        pthread_create(&workers[at].thread, NULL, work, &workers[at]);
    }
    uint64_t operations = 0;
    size_t count = 0;
    uint32_t *all = calloc((size_t)threads * SAMPLES, sizeof *all);
    for (int at = 0; at < threads; at++) {
        pthread_join(workers[at].thread, NULL);
        operations += workers[at].operations;
        size_t kept = workers[at].count < SAMPLES ? workers[at].count : SAMPLES;
        memcpy(all + count, workers[at].samples, kept * sizeof *all);
        count += kept;
    }
    double took = now() - begun;
    getrusage(RUSAGE_SELF, &after);
    qsort(all, count, sizeof *all, order);
    double cpu = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) + (after.ru_stime.tv_sec - before.ru_stime.tv_sec) +
                 (after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec - before.ru_stime.tv_usec) / 1e6;
    printf("{\"vfs\":\"%s\",\"threads\":%d,\"mmap\":%lld,\"ops_per_second\":%.0f,\"p50_ns\":%u,\"p99_ns\":%u,\"cpu_us_per_op\":%.3f,"
           "\"max_rss_mib\":%ld}\n",
           vfs, threads, mmap_bytes, (double)operations / took, all[count / 2], all[count * 99 / 100], cpu * 1e6 / (double)operations,
           after.ru_maxrss >> 10);
    return 0;
}
