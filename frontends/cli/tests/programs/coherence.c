// File operations while files are read, each case by its name; see tests/coherence.rs.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what) { perror(what); exit(2); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static void await_line(void) { char line[64]; if (!fgets(line, sizeof line, stdin)) exit(0); }
static void say(const char *text) { printf("%s\n", text); fflush(stdout); }

// ---- lost_write: one descriptor, written by one thread and read by others --------------------------------

enum { RECORDS = 300 };
static int shared_fd, writer_delay;
static pthread_barrier_t begun;

static void *write_records(void *unused) {
    pthread_barrier_wait(&begun);
    for (volatile int i = 0; i < writer_delay; i++);
    for (long i = 0; i < RECORDS; i++) if (write(shared_fd, &i, 8) != 8) abort();
    return unused;
}
static void *read_elsewhere(void *unused) {
    char bytes[512];
    pthread_barrier_wait(&begun);
    pread(shared_fd, bytes, sizeof bytes, 20000);
    return unused;
}
static int lost_write(const char *path, int seconds, int readers) {
    long rounds = 0, bad = 0;
    static char block[65536];
    memset(block, 'x', sizeof block);
    for (double end = now() + seconds; now() < end; rounds++) {
        char name[4096];
        snprintf(name, sizeof name, "%s.%ld", path, rounds % 8);
        if (rounds < 8) { // large, and read often enough to be taken over
            int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
            for (int i = 0; i < 80; i++) if (write(fd, block, sizeof block) != sizeof block) fail(name);
            if (fsync(fd) || close(fd)) fail(name);
            for (int j = 0; j < 6; j++) {
                static char bytes[16384];
                int reader = open(name, O_RDONLY);
                for (int i = 0; i < 80 * 4; i++) pread(reader, bytes, sizeof bytes, i * (off_t)sizeof bytes);
                close(reader);
            }
            usleep(300000);
        }
        shared_fd = open(name, O_RDWR);
        writer_delay = rand() % 60000;
        pthread_barrier_init(&begun, 0, 1 + readers);
        pthread_t threads[16];
        pthread_create(&threads[0], 0, write_records, 0);
        for (int i = 1; i <= readers; i++) pthread_create(&threads[i], 0, read_elsewhere, 0);
        for (int i = 0; i <= readers; i++) pthread_join(threads[i], 0);
        int wrong = lseek(shared_fd, 0, SEEK_CUR) != RECORDS * 8;
        char *map = mmap(0, 4096, PROT_READ, MAP_PRIVATE, shared_fd, 0); // the kernel's view
        for (long i = 0; i < RECORDS; i++) wrong |= ((long *)map)[i] != i;
        munmap(map, 4096);
        if (pwrite(shared_fd, block, 4096, 0) != 4096) fail(name);
        close(shared_fd);
        bad += wrong;
    }
    fprintf(stderr, "%ld rounds\n", rounds);
    printf("%ld with lost or misplaced records\n", bad);
    return bad != 0;
}

// ---- mapped_writer: stores to a dirty page do not change the file's times -----------------------------------

static int mapped_writer(const char *path) {
    int fd = open(path, O_RDWR);
    char *map = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || map == MAP_FAILED) fail(path);
    close(fd);
    memcpy(map, "version1", 8);
    say("stored 1");
    await_line();
    memcpy(map, "version2", 8);
    munmap(map, 16384);
    say("stored 2");
    await_line();
    return 0;
}

/// Prints the first bytes of a file for each line of input; opened anew each time, or once.
static int reader(const char *path, int anew) {
    int fd = open(path, O_RDONLY);
    for (;;) {
        char bytes[9] = {0};
        await_line();
        if (anew) { close(fd); fd = open(path, O_RDONLY); }
        for (int i = 0; i < 20; i++) if (pread(fd, bytes, 8, 0) != 8) fail(path);
        say(bytes);
    }
}

// ---- own_map: the child of a process that mapped a file reads it -------------------------------------------------

static int own_map(const char *path) {
    int pipes[2];
    if (pipe(pipes)) fail("pipe");
    if (fork()) { // waits until all its descendants have ended
        char byte;
        close(pipes[1]);
        read(pipes[0], &byte, 1);
        return 0;
    }
    close(pipes[0]);
    int fd = open(path, O_RDWR);
    char *map = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || map == MAP_FAILED) fail(path);
    close(fd);
    memcpy(map, "value-00", 8);
    if (fork()) {
        usleep(100000);
        _exit(0);
    }
    usleep(600000); // the parent has ended, and the file's times are old
    int reader = open(path, O_RDONLY), wrong = 0;
    for (int i = 1; i < 50; i++) {
        char stored[16], got[9] = {0};
        snprintf(stored, sizeof stored, "value-%02d", i);
        memcpy(map, stored, 8);
        pread(reader, got, 8, 0);
        wrong += strcmp(stored, got) != 0;
        usleep(5000);
    }
    printf("%d wrong\n", wrong);
    fflush(stdout);
    return 0;
}

// ---- own_write_lock: a program that has a write lease on a file reads it ----------------------------------

static volatile int broken;
static void breaks(int signal) { broken = 1; }

static int own_write_lock(const char *path) {
    signal(SIGIO, breaks);
    char bytes[4096];
    // Read before, and closed: no process has it open.
    int fd = open(path, O_RDONLY);
    for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, 0);
    close(fd);
    fd = open(path, O_RDWR);
    if (fcntl(fd, F_SETLEASE, F_WRLCK)) printf("lease: %s\n", strerror(errno));
    double begun = now();
    for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, 0);
    for (int i = 0; i < 50; i++) read(fd, bytes, sizeof bytes);
    printf("soon %d broken %d held %d\n", now() - begun < 10, broken, fcntl(fd, F_GETLEASE) == F_WRLCK);
    close(fd);
    // The lease is taken through another descriptor, which can only read.
    fd = open(path, O_RDONLY);
    for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, 0);
    int other = dup(fd);
    if (fcntl(other, F_SETLEASE, F_WRLCK)) printf("lease: %s\n", strerror(errno));
    for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, 0);
    printf("broken %d held %d\n", broken, fcntl(fd, F_GETLEASE) == F_WRLCK);
    close(fd);
    close(other);
    // A lock of the other kind does not prevent reads.
    fd = open(path, O_RDWR);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    begun = now();
    if (fcntl(fd, F_SETLK, &lock)) printf("lock: %s\n", strerror(errno));
    int n = pread(fd, bytes, sizeof bytes, 0);
    printf("%d soon %d\n", n, now() - begun < 10);
    return 0;
}

// ---- the same for files of which readahead has fetched more than the program read --------------------------

enum { FILES = 10 };

static int own_write_lock_after_readahead(const char *path) {
    static char bytes[4 << 20], name[FILES][4096];
    memset(bytes, 7, sizeof bytes);
    for (int i = 0; i < FILES; i++) {
        snprintf(name[i], sizeof name[i], "%s.%d", path, i);
        int fd = open(name[i], O_CREAT | O_WRONLY, 0666);
        if (fd < 0 || write(fd, bytes, sizeof bytes) != sizeof bytes || fsync(fd)) fail(name[i]);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    usleep(300000); // so that the files' times can be trusted
    int refused = 0;
    for (int i = 0; i < FILES; i++) {
        int fd = open(name[i], O_RDONLY);
        for (int read_ = 0; read_ < 5; read_++) if (read(fd, bytes, 4096) != 4096) fail(name[i]);
        refused += fcntl(fd, F_SETLEASE, F_WRLCK) != 0;
        close(fd);
        unlink(name[i]);
    }
    printf("%d of %d refused\n", refused, FILES);
    return 0;
}

// ---- other calls on a file -------------------------------------------------------------------------

static int preallocated(const char *path) {
    static char bytes[65536];
    int fd = open(path, O_RDONLY);
    for (off_t at = 0; pread(fd, bytes, sizeof bytes, at) > 0; at += 2 * sizeof bytes);
    for (off_t at = 0; at < 1 << 20; at += 32768)
        printf("%ld: %ld %ld\n", (long)at, (long)lseek(fd, at, SEEK_DATA), (long)lseek(fd, at, SEEK_HOLE));
    return 0;
}

static long accessed(const char *path) { struct stat stat_; if (stat(path, &stat_)) fail(path); return stat_.st_atim.tv_sec; }

static int access_times(const char *path, int flags, int anew) {
    char bytes[4096];
    int fd = open(path, O_RDONLY | flags);
    for (int round = 0; round < 3; round++) {
        struct timespec times[2] = {{.tv_sec = 1000}, {.tv_nsec = UTIME_OMIT}};
        if (round && anew) { close(fd); fd = open(path, O_RDONLY | flags); }
        if (utimensat(AT_FDCWD, path, times, 0)) fail(path);
        for (int i = 0; i < 30; i++) if (pread(fd, bytes, sizeof bytes, i * sizeof bytes) <= 0) fail(path);
        printf("moved %d\n", accessed(path) != 1000);
    }
    return 0;
}

int main(int count, char **words) {
    const char *name = words[1], *path = words[2];
    if (!strcmp(name, "lost_write")) return lost_write(path, atoi(words[3]), atoi(words[4]));
    if (!strcmp(name, "mapped_writer")) return mapped_writer(path);
    if (!strcmp(name, "reopen")) return reader(path, 1);
    if (!strcmp(name, "reread")) return reader(path, 0);
    if (!strcmp(name, "own_map")) return own_map(path);
    if (!strcmp(name, "own_write_lock")) return own_write_lock(path);
    if (!strcmp(name, "own_write_lock_after_readahead")) return own_write_lock_after_readahead(path);
    if (!strcmp(name, "preallocated")) return preallocated(path);
    if (!strcmp(name, "access_times")) return access_times(path, 0, 1);
    if (!strcmp(name, "access_times_unmoved")) return access_times(path, O_NOATIME, 1);
    if (!strcmp(name, "access_times_each")) return access_times(path, 0, 0);
    return 2;
}
