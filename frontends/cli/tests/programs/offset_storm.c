/*
 * Offset storm: threads, duplicates and children read one read-only descriptor while its offset is handed over between
 * the kernel and the cache, and every byte is accounted for.
 *
 *   offset_storm storm FILE SECONDS SEED    FILE holds the numbers 0, 1, 2, .. of four bytes each
 *   offset_storm fifo FILE                  a real-time reader on the processor of a thread that hands the offset over
 *
 * The storm goes in phases. In a phase the offset only grows, so the reads at the offset and the relative seeks must
 * tile the range from the beginning of the phase to its end: a byte that two readers got, or that none got, or an
 * offset that was set back, leaves an overlap or a hole.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 3, CALLS = 8, READ_MAX = 4096, CLAIMS_MAX = 64, PHASES = 4 };

struct claim { long from, to; };
struct claims { struct claim of[CLAIMS_MAX]; int count; };

static const char *path;
static long file_bytes;
static int fd;
static volatile int ends;
/* Whether this phase is beyond the end of the file: only seeks, which the kernel has to compute. */
static volatile int beyond;
static pthread_barrier_t begin, end;
static struct claims claims[THREADS + 1];

static void fail(const char *what, long a, long b) {
    char text[200];
    int len = snprintf(text, sizeof text, "%s: %ld %ld (errno %d)\n", what, a, b, errno);
    if (write(2, text, len) != len) _exit(3);
    _exit(1);
}
static void expect(const char *what, long is, long should) {
    if (is != should) fail(what, is, should);
}
static unsigned next(unsigned *seed, unsigned below) {
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % below;
}
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* The position of `len` bytes, which must be consecutive in the file. */
static long place(const uint32_t *bytes, long len) {
    if (len <= 0 || len % 4) fail("length", len, 0);
    for (long i = 1; i < len / 4; i++)
        if (bytes[i] != bytes[0] + i) fail("torn", bytes[0], bytes[i]);
    return 4l * bytes[0];
}
static void note(struct claims *to, long from, long len) {
    if (to->count == CLAIMS_MAX) fail("room", 0, 0);
    if (len) to->of[to->count++] = (struct claim){from, from + len};
}
static void claim(struct claims *to, const uint32_t *bytes, long len) {
    note(to, place(bytes, len), len);
}
static long highest(const struct claims *of) {
    long highest = 0;
    for (int i = 0; i < of->count; i++)
        if (of->of[i].to > highest) highest = of->of[i].to;
    return highest;
}

/* Calls that do not hand the offset over. */
static void plain(struct claims *to, unsigned *seed) {
    uint32_t bytes[READ_MAX / 4];
    unsigned kind = beyond ? 10 : next(seed, 16);
    long len = 4 * (1 + next(seed, READ_MAX / 4)), at, half = len / 8 * 4;
    if (kind < 8) {
        expect("read", read(fd, bytes, len), len);
        claim(to, bytes, len);
    } else if (kind < 10) {
        struct iovec parts[2] = {{bytes, half}, {(char *)bytes + half, len - half}};
        expect("readv", readv(fd, parts, 2), len);
        claim(to, bytes, len);
    } else if (kind < 12) {
        at = lseek(fd, len, SEEK_CUR);
        note(to, at - len, len);
    } else if (kind < 14) {
        at = 4 * (long)next(seed, (file_bytes - READ_MAX) / 4);
        expect("pread", pread(fd, bytes, len, at), len);
        expect("pread at", place(bytes, len), at);
    } else if (kind < 15) {
        at = lseek(fd, 0, SEEK_CUR);
        if (at < highest(to)) fail("offset set back", at, highest(to));
    } else {
        struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_CUR, .l_len = 1};
        expect("F_GETLK", fcntl(fd, F_GETLK, &lock), 0);
    }
}

/* Reads, or seeks, at the offset of `by`. */
static struct claim one(int by, long len) {
    uint32_t bytes[READ_MAX / 4];
    long from;
    if (beyond) {
        from = lseek(by, len, SEEK_CUR) - len;
    } else {
        expect("read of another", read(by, bytes, len), len);
        from = place(bytes, len);
    }
    return (struct claim){from, from + len};
}

/* Calls that hand the offset over. */
static void handing(struct claims *to, unsigned *seed) {
    struct claim child;
    int pipes[2], status;
    long len = 4 * (1 + next(seed, READ_MAX / 4));
    switch (next(seed, 5)) {
    case 0: {
        int other = dup(fd);
        if (other < 0) fail("dup", other, 0);
        child = one(other, len);
        note(to, child.from, len);
        expect("close of dup", close(other), 0);
        break;
    }
    case 1:
        expect("pipe", pipe(pipes), 0);
        pid_t pid = fork();
        if (pid == 0) {
            for (int i = 0; i < 3; i++) {
                child = one(fd, len);
                if (write(pipes[1], &child, sizeof child) != sizeof child) _exit(2);
            }
            _exit(0);
        }
        close(pipes[1]);
        while (read(pipes[0], &child, sizeof child) == sizeof child) note(to, child.from, child.to - child.from);
        close(pipes[0]);
        expect("wait", waitpid(pid, &status, 0), pid);
        expect("status", status, 0);
        break;
    case 2:
        expect("F_SETFL", fcntl(fd, F_SETFL, O_NONBLOCK), 0);
        break;
    default: {
        void *object = dlopen("libm.so.6", RTLD_NOW);
        if (!object) fail("dlopen", 0, 0);
        dlclose(object);
    }
    }
}

/* `sendfile` takes no lock of the offset, so it is called when no other thread reads. */
static void sends(struct claims *to, unsigned *seed) {
    uint32_t bytes[READ_MAX / 4];
    int pipes[2];
    long len = 4 * (1 + next(seed, READ_MAX / 4));
    expect("pipe", pipe(pipes), 0);
    expect("sendfile", sendfile(pipes[1], fd, NULL, len), len);
    expect("read of pipe", read(pipes[0], bytes, len), len);
    claim(to, bytes, len);
    close(pipes[0]), close(pipes[1]);
}

static void *reads(void *argument) {
    long which = (long)argument;
    unsigned seed = 77 * which + fd;
    for (;;) {
        pthread_barrier_wait(&begin);
        if (ends) return 0;
        for (int i = 0; i < CALLS; i++) plain(&claims[which], &seed);
        pthread_barrier_wait(&end);
    }
}

/* Opens and closes the same file all the time, so that descriptor numbers are reused at once. */
static void *reopens(void *argument) {
    unsigned seed = 5;
    uint32_t bytes[READ_MAX / 4];
    while (!ends) {
        int own = open(path, O_RDONLY);
        long at = 0;
        for (int i = 0; i < 4; i++) {
            long len = 4 * (1 + next(&seed, READ_MAX / 4));
            expect("own read", read(own, bytes, len), len);
            expect("own read at", place(bytes, len), at);
            at += len;
            if (i == 1) {
                at = 4 * (long)next(&seed, 1000);
                expect("own seek", lseek(own, at, SEEK_SET), at);
            }
        }
        expect("own offset", lseek(own, 0, SEEK_CUR), at);
        expect("own close", close(own), 0);
    }
    return 0;
}

static int by_place(const void *a, const void *b) {
    long from = ((const struct claim *)a)->from, other = ((const struct claim *)b)->from;
    return (from > other) - (from < other);
}

static void tile(long from, long to) {
    static struct claim all[(THREADS + 1) * CLAIMS_MAX];
    int count = 0;
    for (int i = 0; i <= THREADS; i++) {
        memcpy(all + count, claims[i].of, claims[i].count * sizeof all[0]);
        count += claims[i].count;
        claims[i].count = 0;
    }
    qsort(all, count, sizeof all[0], by_place);
    for (int i = 0; i < count; from = all[i++].to)
        if (all[i].from != from) fail(all[i].from < from ? "given twice" : "lost", all[i].from, from);
    expect("last offset", to, from);
}

static int storm(double seconds, unsigned seed) {
    pthread_t threads[THREADS + 1];
    double until = now() + seconds;
    int openings = 0;
    pthread_barrier_init(&begin, 0, THREADS + 1);
    pthread_barrier_init(&end, 0, THREADS + 1);
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], 0, reads, (void *)i);
    pthread_create(&threads[THREADS], 0, reopens, 0);
    for (; now() < until; openings++) {
        fd = open(path, O_RDONLY);
        if (fd < 0) fail("open", fd, 0);
        for (int phase = 0; phase < PHASES; phase++) {
            beyond = next(&seed, 3) == 0;
            long from = beyond ? file_bytes : 4 * (long)next(&seed, file_bytes / 8);
            uint32_t byte;
            expect("first read", pread(fd, &byte, 4, from % file_bytes), 4); /* it is attached */
            expect("lseek", lseek(fd, from, SEEK_SET), from);
            pthread_barrier_wait(&begin);
            for (unsigned i = next(&seed, 3); i > 0; i--) plain(&claims[THREADS], &seed);
            if (next(&seed, 2) == 0) handing(&claims[THREADS], &seed);
            pthread_barrier_wait(&end);
            if (!beyond && next(&seed, 6) == 0) sends(&claims[THREADS], &seed);
            tile(from, lseek(fd, 0, SEEK_CUR));
        }
        expect("close", close(fd), 0);
    }
    ends = 1;
    pthread_barrier_wait(&begin);
    for (int i = 0; i <= THREADS; i++) pthread_join(threads[i], 0);
    printf("no difference\n");
    fprintf(stderr, "%d openings\n", openings);
    return 0;
}

static void *hands_over(void *argument) {
    while (!ends) {
        struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_CUR, .l_len = 1};
        expect("F_GETLK", fcntl(fd, F_GETLK, &lock), 0);
    }
    return 0;
}

static int fifo(void) {
    pthread_t other;
    cpu_set_t all, one;
    uint32_t byte;
    struct sched_param priority = {.sched_priority = 1};
    fd = open(path, O_RDONLY);
    expect("first read", read(fd, &byte, 4), 4); /* it is attached */
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    for (int cpu = 0; !CPU_COUNT(&one); cpu++)
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    expect("affinity", sched_setaffinity(0, sizeof one, &one), 0);
    pthread_create(&other, 0, hands_over, 0);
    if (pthread_setschedparam(pthread_self(), SCHED_FIFO, &priority)) {
        puts("no real-time class");
        return 0;
    }
    alarm(20); /* ends a thread that waits for ever */
    for (int i = 1; i <= 500; i++) {
        usleep(200);
        expect("read", read(fd, &byte, 4), 4);
        expect("read at", byte, i);
    }
    ends = 1;
    priority.sched_priority = 0;
    pthread_setschedparam(pthread_self(), SCHED_OTHER, &priority);
    pthread_join(other, 0);
    puts("no difference");
    return 0;
}

int main(int count, char **words) {
    path = words[2];
    int file = open(path, O_RDONLY);
    file_bytes = lseek(file, 0, SEEK_END);
    close(file);
    if (count == 5 && !strcmp(words[1], "storm")) return storm(atof(words[3]), atoi(words[4]));
    if (count == 3 && !strcmp(words[1], "fifo")) return fifo();
    return 2;
}
