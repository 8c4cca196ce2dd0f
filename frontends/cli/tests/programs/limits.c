/*
 * Limits: a program that limits its address space, locks its memory, or forks in a handler, while its reads are served,
 * and prints the effects. Run with and without the cache it must print the same, and end the same way.
 * `limits CASE FILE`; FILE is a copy of its own, of more than 300,000 bytes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FILE_READ = 300000, MIB = 1 << 20 };
static const char *path;
static unsigned char buf[FILE_READ], reference[FILE_READ];

static void say(const char *what, long value) {
    printf("%s %ld %s\n", what, value, value < 0 ? strerrorname_np(errno) : "-");
    fflush(stdout);
}
/* A descriptor whose file was read completely, and partly again: it is served by now, and its file is cached. */
static int warm(void) {
    int fd = open(path, O_RDONLY);
    for (int i = 0; i < 4; i++)
        if (pread(fd, reference, FILE_READ, 0) != FILE_READ) { perror("pread"); exit(2); }
    return fd;
}
/* Whether reads of all lengths return the file's bytes. */
static int reads_well(int fd) {
    for (long at = 0; at < FILE_READ; at += 10007) {
        long len = at % 5 ? 64 : 9000, left = FILE_READ - at;
        if (len > left) len = left;
        if (pread(fd, buf, len, at) != len || memcmp(buf, reference + at, len)) return 0;
    }
    return 1;
}
/* How many MiB can be mapped, up to 400. */
static int mappable(void) {
    int mib = 0;
    while (mib < 400 && mmap(0, 8 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED)
        mib += 8;
    return mib;
}

/* ---- addresses ---- */
enum { LIMIT_MIB = 560 };
static const struct rlimit LIMIT = { (rlim_t)LIMIT_MIB * MIB, (rlim_t)LIMIT_MIB * MIB };
static int by_function(void) { return setrlimit(RLIMIT_AS, &LIMIT); }
static int by_process(void) { return prlimit(getpid(), RLIMIT_AS, &LIMIT, 0); }
static int by_call(void) { return syscall(SYS_setrlimit, RLIMIT_AS, &LIMIT); }
static int by_calls_process(void) { return syscall(SYS_prlimit64, 0, RLIMIT_AS, &LIMIT, 0); }
static int (*const WAYS[])(void) = { by_function, by_process, by_call, by_calls_process };

static void limited(int fd, int way) {
    say("limit", WAYS[way]());
    say("mappable", mappable());
    say("reads", reads_well(fd));
    int again = open(path, O_RDONLY);
    say("new reads", reads_well(again));
}
static void c_limits_itself(void) {
    for (int way = 0; way < 4; way++) {
        if (!fork()) { limited(warm(), way); _exit(0); }
        wait(0);
    }
    limited(warm(), 0);
}
/* A child that has read nothing yet has all of the limit for itself; also if our code did not see it set. */
static void c_limited_children(void) {
    int fd = warm();
    for (int way = 0; way < 4; way++) {
        if (!fork()) { limited(fd, way); _exit(0); }
        wait(0);
    }
    int start[2];
    if (pipe(start)) exit(2);
    pid_t child = fork();
    if (!child) {
        char byte;
        if (read(start[0], &byte, 1) != 1) _exit(2);
        fd = warm();
        say("reads", reads_well(fd));
        say("mappable", mappable());
        _exit(0);
    }
    say("limit", prlimit(child, RLIMIT_AS, &LIMIT, 0));
    if (write(start[1], "x", 1) != 1) exit(2);
    wait(0);
}
/* A call that sets no limit changes nothing. */
static void c_no_limit(void) {
    int fd = warm();
    struct rlimit now = { RLIM_INFINITY, RLIM_INFINITY };
    say("none", setrlimit(RLIMIT_AS, &now));
    say("asked", prlimit(0, RLIMIT_AS, 0, &now));
    say("files", getrlimit(RLIMIT_NOFILE, &now) | setrlimit(RLIMIT_NOFILE, &now));
    say("nowhere", setrlimit(RLIMIT_AS, (void *)8));
    for (int i = 0; i < 100; i++)
        if (!reads_well(fd)) say("reads", 0);
}
/* A program that is no longer served, because it watches files. */
static void c_watches_and_limits_itself(void) {
    int fd = warm();
    close(inotify_init());
    limited(fd, 0);
}
static atomic_int go_on = 1, wrong, rounds;
static void *reader(void *fd) {
    unsigned char mine[9000];
    unsigned place = (unsigned)(uintptr_t)&mine;
    while (go_on) {
        place = place * 1103515245 + 12345;
        long len = place % 3 ? 64 : 9000, at = (place >> 8) % (FILE_READ - len);
        if (pread((int)(intptr_t)fd, mine, len, at) != len || memcmp(mine, reference + at, len)) wrong++;
        rounds++;
    }
    return 0;
}
/* While other threads are in the middle of reads. */
static void c_threads(void) {
    int fd = warm();
    for (int round = 0; round < 20; round++) {
        if (!fork()) {
            pthread_t threads[3];
            warm();
            fd = open(path, O_RDONLY);
            for (int i = 0; i < 3; i++) pthread_create(&threads[i], 0, reader, (void *)(intptr_t)fd);
            while (rounds < 1000) usleep(100);
            int answer = round % 2 ? mlockall(MCL_CURRENT) : setrlimit(RLIMIT_AS, &LIMIT);
            int mib = mappable();
            usleep(2000);
            go_on = 0;
            for (int i = 0; i < 3; i++) pthread_join(threads[i], 0);
            printf("%d: %d, %d MiB, %d wrong\n", round, answer, mib, wrong);
            fflush(stdout);
            _exit(0);
        }
        int status;
        wait(&status);
        say("ended by", WTERMSIG(status));
    }
}

/* ---- locks ---- */
static void locked(const char *how, int answer) {
    char line[200];
    FILE *status = fopen("/proc/self/status", "r");
    long kib = -1;
    while (fgets(line, sizeof line, status)) sscanf(line, "VmLck: %ld", &kib);
    fclose(status);
    printf("%s %d, %s\n", how, answer, kib < 0 ? "unknown" : kib < 100 * 1024 ? "few" : "many");
    fflush(stdout);
}
static void c_locks(void) {
    int fd = warm();
    if (!fork()) {
        locked("a child", mlockall(MCL_CURRENT | MCL_FUTURE));
        fd = warm();
        locked("a child later", 0);
        _exit(0);
    }
    wait(0);
    if (!fork()) {
        warm();
        locked("a call", syscall(SYS_mlockall, MCL_CURRENT | MCL_FUTURE));
        _exit(0);
    }
    wait(0);
    locked("a function", mlockall(MCL_CURRENT | MCL_FUTURE));
    say("reads", reads_well(fd));
}

/* ---- handlers ---- */
static volatile int child, forks, forks_max;
static int by_signal[65], bad;
static void forks_in_handler(int signal) {
    if (child || forks >= forks_max) return;
    pid_t made = fork();
    if (!made) { child = 1; return; }
    forks++;
    int status;
    waitpid(made, &status, 0);
    if (WIFSIGNALED(status)) by_signal[WTERMSIG(status)]++;
    else if (WEXITSTATUS(status)) bad++;
}
static void ticking(void (*handler)(int)) {
    struct sigaction action = { .sa_handler = handler };
    struct itimerval ticks = { { 0, 700 }, { 0, 700 } };
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &ticks, 0);
}
/* The child returns from the handler and continues the interrupted read. */
static void forking_reads(void) {
    static const long LENGTHS[] = { 64, 4096, 100000 };
    int fd = warm();
    ticking(forks_in_handler);
    unsigned place = 1;
    for (int i = 0; i < 3; i++) {
        long len = LENGTHS[i];
        forks_max += 150;
        while (forks < forks_max) {
            place = place * 1103515245 + 12345;
            long at = (place >> 8) % (FILE_READ - len), read = pread(fd, buf, len, at);
            int is_bad = read != len || memcmp(buf, reference + at, len);
            if (child) _exit(is_bad ? 3 : 0);
            bad += is_bad;
        }
    }
    printf("bad %d\n", bad);
    for (int i = 0; i < 65; i++)
        if (by_signal[i]) printf("%d children ended by %s\n", by_signal[i], strsignal(i));
    say("reads", reads_well(fd));
}
static void c_forking_handler(void) { forking_reads(); }
/* The same with all other signals blocked throughout. */
static void c_forking_handler_with_signals_held(void) {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGALRM);
    sigprocmask(SIG_SETMASK, &all, 0);
    forking_reads();
}
static volatile int is_limited;
static void limits_in_handler(int signal) {
    if (is_limited++) return;
    setrlimit(RLIMIT_AS, &LIMIT);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    unsigned char *mine = mmap(0, 300 * MIB, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mine == MAP_FAILED) bad++;
    else for (long at = 0; at < 300 * MIB; at += MIB) memset(mine + at, 0xff, 300);
}
/* The mappings are removed, and the program reuses their addresses, while the interrupted read waits. */
static void c_limiting_handler(void) {
    warm();
    for (int round = 0; round < 60; round++) {
        pid_t made = fork();
        if (!made) {
            long len = round % 3 ? 64 : 9000;
            int fd = warm();
            ticking(limits_in_handler);
            unsigned place = round;
            for (int after = 0; after < 20; after += is_limited != 0) {
                place = place * 1103515245 + 12345;
                long at = (place >> 8) % (FILE_READ - len);
                if (pread(fd, buf, len, at) != len || memcmp(buf, reference + at, len)) bad++;
            }
            _exit(bad ? 3 : 0);
        }
        int status;
        waitpid(made, &status, 0);
        printf("%d: %d\n", round, status);
    }
}

/* ---- errors ---- */
/* Errors that the kernel returns for a buffer before it looks at the file. */
static void c_kernel_addresses(void) {
    int fd = warm();
    struct stat stat;
    fstat(fd, &stat);
    unsigned char *kernels = (void *)0xffff888000000000, *odd = (void *)0x8000000000001000, *low = (void *)8;
    unsigned char *last = (void *)0x7ffffffff000;
    say("longest", read(fd, buf, SSIZE_MAX));
    say("at", lseek(fd, 0, SEEK_CUR));
    say("long", read(fd, buf, (size_t)1 << 47));
    say("longest at the end", pread(fd, buf, SSIZE_MAX, 299000));
    say("too long", pread(fd, buf, (size_t)SSIZE_MAX + 1, 299000));
    unsigned char *places[] = { kernels, odd, low, last, last - 1 };
    for (int i = 0; i < 5; i++) {
        say("none", pread(fd, places[i], 0, 0));
        say("none at the offset", read(fd, places[i], 0));
        say("at the end", pread(fd, places[i], 100, stat.st_size));
        say("behind it", pread(fd, places[i], 1, stat.st_size + 5));
        struct iovec alone = { places[i], 0 }, second[2] = { { buf, 10 }, { places[i], 0 } };
        struct iovec long_one = { buf, SSIZE_MAX }, across[2] = { { buf, 10 }, { places[i], 1000 } };
        say("no part", preadv(fd, &alone, 1, 0));
        say("no second part", preadv(fd, second, 2, 0));
        say("no second part at the offset", readv(fd, second, 2));
        say("a second part at the end", preadv(fd, across, 2, stat.st_size - 5));
        say("a long part", preadv(fd, &long_one, 1, 299000));
    }
    say("nowhere", pread(fd, 0, 0, 0));
}
/* Read flags that a file system may not support. */
static void c_flags(void) {
    int fd = warm();
    struct stat stat;
    fstat(fd, &stat);
    struct iovec part = { buf, 4096 };
    for (int flag = 1; flag <= 0x200; flag <<= 1) {
        printf("%x: ", flag);
        say("at the start", preadv2(fd, &part, 1, 0, flag));
        say("at the offset", preadv2(fd, &part, 1, -1, flag));
        say("at the end", preadv2(fd, &part, 1, stat.st_size, flag));
        say("both", preadv2(fd, &part, 1, 0, flag | 1));
    }
}

/* ---- opens that cut ---- */
static void cut(const char *how, int fd, int cutter) {
    struct stat stat;
    fstat(fd, &stat);
    printf("%s: %s, %ld bytes\n", how, cutter < 0 ? strerrorname_np(errno) : "opened", (long)stat.st_size);
    say("read", pread(fd, buf, 1000, 0));
    say("more", pread(fd, buf, 100000, 0));
    say("at the offset", read(fd, buf, 1000));
}
static void c_cut_by_calls(void) {
    for (int way = 0; way < 4; way++) {
        unlink(path);
        int file = open(path, O_WRONLY | O_CREAT, 0600);
        for (int i = 0; i < 400; i++)
            if (write(file, reference, 1000) != 1000) exit(2);
        fsync(file);
        close(file);
        int fd = warm();
        struct open_how how = { .flags = O_RDONLY | O_TRUNC };
        switch (way) {
        case 0: cut("openat2", fd, syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how)); break;
        case 1: cut("open", fd, syscall(SYS_open, path, O_RDONLY | O_TRUNC)); break;
        case 2: cut("openat", fd, syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_TRUNC)); break;
        case 3: cut("nowhere", fd, syscall(SYS_openat2, AT_FDCWD, path, (void *)8, sizeof how)); break;
        }
    }
}

#define CASES(X) X(limits_itself) X(limited_children) X(no_limit) X(watches_and_limits_itself) X(threads) X(locks) \
    X(forking_handler) X(forking_handler_with_signals_held) X(limiting_handler) \
    X(kernel_addresses) X(flags) X(cut_by_calls)
int main(int count, char **argument) {
    if (count != 3) return 2;
    path = argument[2];
#define CASE(name) if (!strcmp(argument[1], #name)) { c_##name(); fflush(stdout); return 0; }
    CASES(CASE)
    return 2;
}
