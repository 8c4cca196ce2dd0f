/*
 * Rules: a program that uses descriptors in common ways, one rule a case, and prints a digest of every byte it got. Run
 * with and without the cache it must print the same. `rules CASE FILE [SEED]`; FILE is a copy of its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif
extern char **environ;
static const char *path, *self;
static unsigned char buf[1 << 20];

static uint64_t digest = 14695981039346656037ull;
static void add(const void *bytes, ssize_t len) {
    const unsigned char *p = bytes;
    for (ssize_t i = 0; i < len; i++) digest = (digest ^ p[i]) * 1099511628211ull;
}
static void say(const char *what, long value) { printf("%s %ld %016lx\n", what, value, digest); fflush(stdout); }
static int ro(void) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) { perror("open"); exit(2); }
    return fd;
}
static ssize_t rd(int fd, size_t len) {
    ssize_t n = read(fd, buf, len);
    if (n > 0) add(buf, n);
    return n;
}
static long rest(int fd, size_t step) {
    long sum = 0;
    ssize_t n;
    while ((n = rd(fd, step)) > 0) sum += n;
    return n < 0 ? n : sum;
}

static void c_read(void) {
    size_t steps[] = {1 << 20, 65536, 4096, 4095, 100, 32768 + 7};
    for (int i = 0; i < 6; i++) { int fd = ro(); say("read", rest(fd, steps[i])); close(fd); }
}
static void c_pread(void) {
    int fd = ro();
    off_t size = lseek(fd, 0, SEEK_END);
    uint64_t x = 1;
    for (int i = 0; i < 3000; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        ssize_t n = pread(fd, buf, (x >> 20) % 9000, (x >> 33) % (size + 5000));
        add(buf, n);
        add(&n, sizeof n);
    }
    say("pread", lseek(fd, 0, SEEK_CUR));
}
/* Hints to fill the kernel's page cache; of a descriptor before it is read, after, and of none. */
static void c_hints(void) {
    int fd = ro();
    say("readahead", readahead(fd, 0, 100000));
    rd(fd, 1000);
    say("readahead", readahead(fd, 0, 1 << 20));
    say("offset", lseek(fd, 0, SEEK_CUR));
    say("readahead -1", readahead(fd, -1, 4096));
    errno = 0;
    say("readahead of none", readahead(999, 0, 4096));
    say("errno", errno);
    int advices[] = {POSIX_FADV_NORMAL, POSIX_FADV_SEQUENTIAL, POSIX_FADV_RANDOM, POSIX_FADV_WILLNEED};
    for (int i = 0; i < 4; i++) {
        say("fadvise", posix_fadvise(fd, 0, 0, advices[i]));
        say("fadvise", posix_fadvise(fd, 4096, -1, advices[i]));
        say("fadvise of none", posix_fadvise(999, 0, 0, advices[i]));
    }
    say("fadvise of no kind", posix_fadvise(fd, 0, 0, 77));
    say("rest", rest(fd, 4096));
}
static void c_dup(void) {
    int fd = ro();
    rd(fd, 1000);
    int other = dup(fd);
    for (int i = 0; i < 20; i++) rd(i % 2 ? fd : other, 777);
    say("dup", lseek(fd, 0, SEEK_CUR));
    int third = ro(), fourth = ro();
    rd(third, 500), rd(fourth, 900);
    dup2(third, fourth);
    rd(fourth, 100), rd(third, 100);
    say("dup2", lseek(fourth, 0, SEEK_CUR));
    int fifth = ro();
    rd(fifth, 300);
    dup3(fifth, 77, O_CLOEXEC);
    rd(77, 300), rd(fifth, 300);
    int sixth = fcntl(fifth, F_DUPFD_CLOEXEC, 50);
    rd(sixth, 300), rd(fifth, 300);
    int seventh = ro();
    rd(seventh, 4000);
    say("failed dup2", dup2(-1, seventh));
    say("fcntl", rest(fifth, 5000) + rest(seventh, 3000));
}
static void c_fork(void) {
    int fd = ro(), unread = ro(), to_child[2], to_parent[2];
    char token = 't';
    rd(fd, 1000);
    if (pipe(to_child) || pipe(to_parent)) exit(2);
    fflush(stdout);
    pid_t child = fork();
    int in = child ? to_parent[0] : to_child[0], out = child ? to_child[1] : to_parent[1];
    /* Reading alternately, they must get the file exactly once. */
    for (int turn = 0; turn < 50; turn++) {
        if (!child || turn) if (read(in, &token, 1) != 1) exit(2);
        ssize_t n = rd(fd, 3001);
        rd(unread, 100);
        if (n < 0) exit(2);
        if (write(out, &token, 1) != 1) exit(2);
    }
    if (!child) { say("child", lseek(fd, 0, SEEK_CUR)); _exit(0); }
    waitpid(child, 0, 0);
    say("parent", lseek(fd, 0, SEEK_CUR));
    say("rest", rest(fd, 65536) + rest(unread, 65536));
}
static void c_forkread(void) {
    /* Both read to the end at the same time: together they get every byte once. */
    int fd = ro(), p[2];
    rd(fd, 12345);
    if (pipe(p)) exit(2);
    pid_t child = fork();
    uint64_t sums[2] = {0, 0};
    ssize_t n;
    while ((n = read(fd, buf, 5000)) > 0) for (ssize_t i = 0; i < n; i++) sums[0] += buf[i] * 2654435761u + 1, sums[1]++;
    if (!child) { if (write(p[1], sums, sizeof sums) != sizeof sums) exit(2); _exit(0); }
    uint64_t more[2];
    if (read(p[0], more, sizeof more) != sizeof more) exit(2);
    waitpid(child, 0, 0);
    sums[0] += more[0], sums[1] += more[1];
    printf("forkread %lu %lu\n", sums[0], sums[1]);
}
static void c_vfork(void) {
    int fd = ro();
    char number[16];
    rd(fd, 5555);
    snprintf(number, sizeof number, "%d", fd);
    fflush(stdout);
    for (int i = 0; i < 3; i++) {
        pid_t child = vfork();
        if (child == 0) { close(99); execl(self, "rules", "some", path, number, NULL); _exit(127); }
        int status;
        waitpid(child, &status, 0);
        say("vfork", status);
        rd(fd, 777);
    }
    pid_t bad = vfork();
    if (bad == 0) { execl("/nonexistent/program", "x", NULL); _exit(9); }
    int status;
    waitpid(bad, &status, 0);
    say("vfork failed", WEXITSTATUS(status));
    int after = ro();
    say("after", rest(after, 65536) + rest(fd, 65536));
}
static void c_some(void) { /* the other side of vfork and spawn: FILE is a descriptor's number */
    int fd = atoi(self);
    rd(fd, 1234);
    say("some", lseek(fd, 0, SEEK_CUR));
}
static void c_rest(void) {
    int fd = atoi(self);
    say("rest", rest(fd, 65536));
}
static void c_spawn(void) {
    int fd = ro();
    rd(fd, 4321);
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    char *argv[] = {"rules", "some", (char *)path, number, NULL};
    pid_t child;
    fflush(stdout);
    if (posix_spawn(&child, self, NULL, NULL, argv, environ)) exit(2);
    int status;
    waitpid(child, &status, 0);
    say("spawned", rest(fd, 5000));
    fd = ro();
    rd(fd, 50);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 0);
    char *cksum[] = {"cksum", NULL};
    fflush(stdout);
    if (posix_spawnp(&child, "cksum", &actions, NULL, cksum, environ)) exit(2);
    waitpid(child, &status, 0);
    say("spawned onto 0", rest(fd, 5000));
    say("system", system("exit 3"));
    FILE *p = popen("echo popen", "r");
    say("popen", fread(buf, 1, 100, p));
    pclose(p);
}
static void c_exec(void) {
    int fd = ro();
    rd(fd, 5000);
    say("before", lseek(fd, 0, SEEK_CUR));
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    say("no such program", execlp("no-such-program", "x", NULL));
    rd(fd, 100);
    execl(self, "rules", "rest", path, number, NULL);
}
/* One thread executes another program while another opens files and reads: the inherited offset is where the last read
   ended, or where it began. A long environment makes the exec slow. */
struct passed { volatile int fd; volatile long position; volatile long lost; };
static struct passed *passed;
static void *opens_and_reads(void *unused) {
    char bytes[100];
    for (;;) {
        passed->fd = -1, passed->position = 0;
        passed->fd = open(path, O_RDONLY);
        for (int i = 0; i < 2000; i++) passed->position += read(passed->fd, bytes, 100);
        int fd = passed->fd;
        passed->fd = -1;
        close(fd);
    }
}
static void c_exec_amid_opens(void) {
    enum { LONG = 40000, ROUNDS = 24 };
    static char *environment[LONG + 1000], strings[LONG][8];
    int memory = syscall(SYS_memfd_create, "passed", 0), count = 0;
    ftruncate(memory, 4096);
    passed = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    for (; count < LONG; count++) {
        snprintf(strings[count], sizeof *strings, "V%d=", count);
        environment[count] = strings[count];
    }
    for (char **one = environ; *one; one++) environment[count++] = *one;
    char number[16];
    snprintf(number, sizeof number, "%d", memory);
    char *arguments[] = {(char *)self, "exec_amid_opens_child", (char *)path, number, NULL};
    for (int round = 0; round < ROUNDS; round++) {
        int status;
        passed->fd = -1, passed->position = 0; /* the thread may not get as far as this */
        pid_t child = fork();
        if (!child) {
            pthread_t thread;
            pthread_create(&thread, NULL, opens_and_reads, NULL);
            usleep(20000);
            if (execve("/nonexistent", arguments, environ) != -1) _exit(8);
            switch (round % 4) {
            case 0: execve(self, arguments, environment); break;
            case 1: syscall(SYS_execve, self, arguments, environment); break;
            case 2: execle(self, self, arguments[1], path, number, NULL, environment); break;
            case 3: environ = environment; execv(self, arguments); break;
            }
            _exit(9);
        }
        waitpid(child, &status, 0);
        if (status) printf("round %d: %x\n", round, status);
    }
    printf("lost %ld\n", passed->lost);
    /* The failed exec has ended: a descriptor that is opened now is served at its offset. */
    if (execl("/nonexistent", "x", "1", "2", "3", "4", "5", "6", "7", NULL) != -1 || errno != ENOENT) printf("wrong\n");
    if (syscall(SYS_execve, "/nonexistent", arguments, environ) != -1 || errno != ENOENT) printf("wrong\n");
    int fd = ro();
    for (int i = 0; i < 300; i++) rd(fd, 1000);
    say("afterwards", lseek(fd, 0, SEEK_CUR));
}
static void c_fdopen(void) {
    int fd = ro();
    rd(fd, 1000);
    FILE *f = fdopen(fd, "r");
    size_t n = fread(buf, 1, 10000, f);
    add(buf, n);
    say("fdopen", ftell(f));
    fclose(f);
    fd = ro();
    say("reused", rest(fd, 10000));
}
static void c_sendfile(void) {
    int fd = ro();
    char name[] = "/tmp/quinion-rules-XXXXXX";
    int out = mkstemp(name);
    unlink(name);
    rd(fd, 1000);
    say("sendfile", sendfile(out, fd, NULL, 5000));
    rd(fd, 1000);
    off_t at = 100;
    int other = ro();
    rd(other, 10);
    say("sendfile at", sendfile(out, other, &at, 5000));
    rd(other, 10);
    say("copy_file_range", copy_file_range(other, NULL, out, NULL, 7000, 0));
    rd(other, 10);
    int p[2];
    if (pipe(p)) exit(2);
    int third = ro();
    rd(third, 3);
    say("splice", splice(third, NULL, p[1], NULL, 4000, 0));
    add(buf, read(p[0], buf, 4000));
    say("then", rest(third, 10000));
    lseek(out, 0, SEEK_SET);
    say("copied", rest(out, 10000));
}
static void c_write(void) {
    int fd = ro(), other = ro();
    rd(fd, 4096), rd(other, 30000);
    int w = open(path, O_WRONLY);
    memset(buf, 'W', 6000);
    if (pwrite(w, buf, 6000, 7000) != 6000) exit(2);
    rd(fd, 20000);
    add(buf, pread(other, buf, 5000, 6500));
    say("written", lseek(fd, 0, SEEK_CUR));
    close(w);
    int again = ro();
    rd(again, 10);
    FILE *f = fopen(path, "r+");
    fseek(f, 100, SEEK_SET);
    fputs("streamed", f);
    fclose(f);
    say("again", rest(again, 9999));
    close(again);
    again = ro();
    say("closed and opened", rest(again, 9999));
}
static void c_stream(void) {
    int fd = ro();
    rd(fd, 8192);
    FILE *f = fopen(path, "a");
    fputs("appended by a stream", f);
    fflush(f);
    say("stream", rest(fd, 5000));
    int second = ro();
    rd(second, 100);
    stdin = freopen(path, "r+", stdin);
    fputs("freopened", stdin);
    fflush(stdin);
    lseek(second, 0, SEEK_SET);
    say("freopen", rest(second, 5000));
}
static void c_truncate(void) {
    int fd = ro(), other = ro();
    rd(fd, 4096), rd(other, 100);
    int w = open(path, O_RDWR);
    say("ftruncate", ftruncate(w, 10001));
    say("after", rest(fd, 3000) + rest(other, 65536));
    close(w);
    fd = ro();
    rd(fd, 10);
    say("truncate", truncate(path, 5000));
    say("after", rest(fd, 3000));
    fd = ro();
    rd(fd, 10);
    w = open(path, O_WRONLY | O_TRUNC);
    say("O_TRUNC", rest(fd, 3000));
}
static void c_truncate_only(void) {
    int fd = ro();
    rd(fd, 4096);
    say("truncate", truncate(path, 5000));
    say("after", rest(fd, 3000));
}
static void c_append(void) {
    int fd = ro();
    say("all", rest(fd, 65536));
    int w = open(path, O_WRONLY | O_APPEND);
    for (int i = 0; i < 10; i++) {
        if (write(w, "appended ", 9) != 9) exit(2);
        say("more", rest(fd, 100));
    }
}
static void c_grow(void) {
    /* A child made before the file was opened appends to it, twice. */
    int go[2], done[2];
    char c = 0;
    if (pipe(go) || pipe(done)) exit(2);
    if (fork() == 0) {
        while (read(go[0], &c, 1) == 1) {
            int w = open(path, O_WRONLY | O_APPEND);
            for (int i = 0; i < 3000; i++) if (write(w, "grown ", 6) != 6) exit(2);
            close(w);
            if (write(done[1], &c, 1) != 1) exit(2);
            if (c == 9) _exit(0);
        }
    }
    int fd = ro();
    say("all", rest(fd, 65536));
    say("nothing", rd(fd, 1000));
    for (c = 8; c <= 9; c++) {
        char d = c;
        if (write(go[1], &d, 1) != 1 || read(done[0], &d, 1) != 1) exit(2);
        say("grown", rest(fd, 7000));
        say("end", lseek(fd, 0, SEEK_END));
        lseek(fd, -100, SEEK_CUR);
        say("tail", rest(fd, 7000));
    }
    wait(NULL);
}
static void c_vectors(void) {
    int fd = ro();
    struct iovec v[5] = {{buf, 10}, {buf + 100, 0}, {buf + 200, 5000}, {NULL, 0}, {buf + 9000, 70000}};
    for (int i = 0; i < 5; i++) {
        memset(buf, 0, 100000);
        ssize_t n = readv(fd, v, 5);
        add(buf, 100000);
        say("readv", n);
    }
    off_t size = lseek(fd, 0, SEEK_END);
    for (off_t at = size - 80000; at < size + 20; at += 7001) {
        memset(buf, 0, 100000);
        ssize_t n = preadv(fd, v, 5, at);
        add(buf, 100000);
        say("preadv", n);
        n = preadv2(fd, v, 3, at, 0);
        add(buf, 6000);
        say("preadv2", n);
    }
    lseek(fd, 100, SEEK_SET);
    say("preadv2 -1", preadv2(fd, v, 5, -1, 0));
    add(buf, 100000);
    say("at", lseek(fd, 0, SEEK_CUR));
    say("preadv2 hipri", preadv2(fd, v, 3, -1, RWF_HIPRI));
    say("at", lseek(fd, 0, SEEK_CUR));
    say("bad flags", preadv2(fd, v, 3, 0, 0x40000000));
    say("errno", errno);
    say("no parts", readv(fd, v, 0));
    say("too many", readv(fd, v, 5000));
    say("errno", errno);
    say("rest", rest(fd, 60000));
}
/* A name of lseek in old programs. */
off_t old_seek(int fd, off_t at, int how);
__asm__(".symver old_seek, llseek@GLIBC_2.2.5");
static void c_seek(void) {
    int fd = ro(), early = ro();
    say("end first", lseek(early, -5000, SEEK_END));
    say("rest", rest(early, 4000));
    rd(fd, 10);
    struct { long at; int how; } s[] = {
        {0, SEEK_CUR}, {100, SEEK_SET}, {50, SEEK_CUR}, {-200, SEEK_CUR}, {-20, SEEK_CUR}, {0, SEEK_END},
        {100, SEEK_END}, {-5000, SEEK_END}, {-1, SEEK_SET}, {0, SEEK_DATA}, {0, SEEK_HOLE}, {1000, SEEK_DATA},
        {1l << 50, SEEK_SET}, {1l << 40, SEEK_SET}, {INT64_MAX, SEEK_CUR}, {INT64_MAX, SEEK_SET}, {7, SEEK_SET}, {0, 99}, {20000, SEEK_SET},
    };
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        errno = 0;
        say("seek", lseek(fd, s[i].at, s[i].how));
        say("errno", errno);
        say("then", rd(fd, 100));
    }
    say("by its old name", old_seek(fd, 12345, SEEK_SET));
    say("rest", rest(fd, 4096));
}
static void c_reuse(void) {
    char name[] = "/tmp/quinion-rules-XXXXXX";
    int out = mkstemp(name);
    if (write(out, "another file", 12) != 12) exit(2);
    close(out);
    for (int i = 0; i < 20; i++) {
        int fd = ro();
        rd(fd, 1000 + i);
        switch (i % 5) {
        case 0: close(fd); break;
        case 1: close_range(fd, fd, 0); break;
        case 2: closefrom(3); break;
        case 3: syscall(SYS_close, fd); break;
        case 4: close_range(5000, 4000, 0); close(fd); break;
        }
        int other = i % 2 ? open(name, O_RDONLY) : openat(AT_FDCWD, name, O_RDONLY);
        say(other == fd ? "same number" : "other number", rest(other, 100));
        FILE *f;
        close(other);
        f = fopen(name, "r");
        say("stream", read(fileno(f), buf, 100));
        fclose(f);
        int p[2];
        if (pipe(p) || write(p[1], "pipe", 4) != 4) exit(2);
        say("pipe", rd(p[0], 100));
        close(p[0]), close(p[1]);
    }
    for (int i = 0; i < 3; i++) {
        int fd = ro();
        rd(fd, 5000);
        if (i == 0) close(fd);
        if (i == 1) close_range(fd, ~0u, 0);
        if (i == 2) closefrom(fd);
        FILE *f = fopen(path, "r");
        say(fileno(f) == fd ? "same number" : "other number", read(fileno(f), buf, 100));
        add(buf, 100);
        fclose(f);
    }
    unlink(name);
}

static int shared;
static volatile uint64_t in_handler[2];
static void handler(int signal) {
    static unsigned char mine[3000];
    (void)signal;
    int saved = errno;
    ssize_t n = read(shared, mine, 1 + in_handler[1] % 3000);
    for (ssize_t i = 0; i < n; i++) in_handler[0] += mine[i] * 2654435761u + 1;
    if (n > 0) in_handler[1] += n;
    errno = saved;
}
static void c_signals(void) {
    struct sigaction a = {.sa_handler = handler};
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    uint64_t sums[2] = {0, 0};
    sigaction(SIGALRM, &a, NULL);
    for (int round = 0; round < 20; round++) {
        shared = ro();
        setitimer(ITIMER_REAL, &often, NULL);
        ssize_t n;
        while ((n = read(shared, buf, 4000)) != 0) {
            if (n < 0) { perror("read"); exit(2); }
            for (ssize_t i = 0; i < n; i++) sums[0] += buf[i] * 2654435761u + 1, sums[1]++;
        }
        setitimer(ITIMER_REAL, &never, NULL);
        close(shared);
    }
    printf("signals %lu %lu\n", sums[0] + in_handler[0], sums[1] + in_handler[1]);
}
static void *reader(void *result) {
    uint64_t *sums = result;
    unsigned char mine[5000];
    ssize_t n;
    while ((n = read(shared, mine, 1 + sums[1] % 5000)) > 0)
        for (ssize_t i = 0; i < n; i++) sums[0] += mine[i] * 2654435761u + 1, sums[1]++;
    return NULL;
}
static void *duper(void *result) {
    (void)result;
    usleep(300);
    close(dup(shared));
    return NULL;
}
static void c_threads(void) {
    uint64_t all[2] = {0, 0};
    for (int round = 0; round < 30; round++) {
        pthread_t t[5];
        uint64_t sums[4][2] = {{0}};
        shared = ro();
        for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, reader, sums[i]);
        if (round % 2) pthread_create(&t[4], NULL, duper, NULL);
        for (int i = 0; i < 4 + round % 2; i++) pthread_join(t[i], NULL);
        for (int i = 0; i < 4; i++) all[0] += sums[i][0], all[1] += sums[i][1];
        close(shared);
    }
    printf("threads %lu %lu\n", all[0], all[1]);
}
static void *endless(void *unused) {
    (void)unused;
    for (;;) { if (pread(shared, buf, 100, 0) != 100) return (void *)1; }
}
static void c_cancel(void) {
    shared = ro();
    for (int i = 0; i < 20; i++) {
        pthread_t t;
        void *result;
        pthread_create(&t, NULL, endless, NULL);
        usleep(1000);
        pthread_cancel(t);
        pthread_join(t, &result);
        say("cancelled", result == PTHREAD_CANCELED);
    }
}
static void c_errors(void) {
    int fd = ro();
    rd(fd, 100);
    errno = 77;
    rd(fd, 100), rd(fd, 1 << 20), pread(fd, buf, 100, 5), lseek(fd, 10, SEEK_SET);
    say("errno stays", errno);
    say("nothing", read(fd, buf, 0));
    say("null", read(fd, NULL, 10)); say("errno", errno);
    rd(fd, 100);
    ssize_t (*volatile plain_read)(int, void *, size_t) = read; /* the fortified call would abort the program */
    say("too long", plain_read(fd, buf, (size_t)-1)); say("errno", errno);
    rd(fd, 100);
    say("before the start", pread(fd, buf, 10, -5)); say("errno", errno);
    say("no such", read(1234, buf, 10)); say("errno", errno);
    say("negative", read(-1, buf, 10)); say("errno", errno);
    say("close twice", close(1234)); say("errno", errno);
    int directory = open("/", O_RDONLY);
    say("directory", read(directory, buf, 10)); say("errno", errno);
    int w = open(path, O_WRONLY);
    say("write only", read(w, buf, 10)); say("errno", errno);
    int p = open(path, O_PATH);
    say("path only", read(p, buf, 10)); say("errno", errno);
    say("write to it", write(fd, "x", 1)); say("errno", errno);
    say("null device", open("/dev/null", O_RDONLY) >= 0);
    int proc = open("/proc/self/comm", O_RDONLY);
    say("proc", rd(proc, 100));
    int sys = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY);
    say("sys", rd(sys, 100) > 0);
    say("none", open("/no/such/file", O_RDONLY)); say("errno", errno);
    fd = ro();
    say("past the end", pread(fd, buf, 100, 1l << 40));
    say("far past", pread(fd, buf, 100, INT64_MAX - 10)); say("errno", errno);
    struct stat s;
    fstat(fd, &s);
    say("at the end", pread(fd, buf, 100, s.st_size));
    say("across it", pread(fd, buf, 100, s.st_size - 7));
    add(buf, 7);
    say("digest", 0);
}
static void c_passed(void) {
    int fd = ro(), s[2];
    rd(fd, 700);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, s)) exit(2);
    char byte = 'x', control[CMSG_SPACE(sizeof(int))];
    memset(control, 0, sizeof control);
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    say("sendmsg", sendmsg(s[0], &m, 0));
    memset(control, 0, sizeof control);
    say("recvmsg", recvmsg(s[1], &m, 0));
    int got;
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof got);
    for (int i = 0; i < 10; i++) rd(i % 2 ? fd : got, 1111);
    say("passed", lseek(got, 0, SEEK_CUR));
    /* A writable descriptor arrives. */
    int third = ro();
    rd(third, 100);
    int again = open("/proc/self/fd/0", O_RDONLY);
    (void)again;
    say("rest", rest(third, 50000));
}
static void c_mapped(void) {
    int fd = ro();
    rd(fd, 700);
    unsigned char *m = mmap(NULL, 20000, PROT_READ, MAP_SHARED, fd, 0);
    add(m, 20000);
    rd(fd, 700);
    int w = open(path, O_RDWR);
    unsigned char *n = mmap(NULL, 20000, PROT_READ | PROT_WRITE, MAP_SHARED, w, 0);
    memset(n + 1500, 'M', 5000);
    say("mapped", rest(fd, 3000));
    munmap(m, 20000);
    int other = ro();
    rd(other, 100);
    memset(n + 9000, 'N', 500);
    say("still mapped", rest(other, 3000));
}
static void c_locks(void) {
    int fd = ro();
    rd(fd, 700);
    struct flock l = {.l_type = F_RDLCK, .l_whence = SEEK_CUR, .l_start = 0, .l_len = 100};
    say("lock", fcntl(fd, F_SETLK, &l));
    rd(fd, 100);
    fd = ro();
    rd(fd, 700);
    say("flock", flock(fd, LOCK_SH));
    rd(fd, 100);
    fd = ro();
    rd(fd, 700);
    int left = 0;
    say("FIONREAD", ioctl(fd, FIONREAD, &left));
    say("left", left);
    say("getfl", fcntl(fd, F_GETFL) & O_ACCMODE);
    fd = ro();
    rd(fd, 70);
    say("isatty", isatty(fd));
    say("setfl", fcntl(fd, F_SETFL, O_NONBLOCK));
    say("rest", rest(fd, 3000));
}
static int sent(int fd, int by_number);
static void c_syscall(void) {
    int fd = ro();
    rd(fd, 700);
    say("sys read", syscall(SYS_read, fd, buf, 500));
    add(buf, 500);
    rd(fd, 100);
    fd = ro();
    rd(fd, 50);
    say("sys lseek", syscall(SYS_lseek, fd, 10, SEEK_CUR));
    rd(fd, 100);
    fd = ro();
    rd(fd, 50);
    int other = syscall(SYS_dup, fd);
    rd(fd, 50), rd(other, 50);
    say("sys dup", lseek(other, 0, SEEK_CUR));
    fd = ro();
    rd(fd, 60);
    other = sent(fd, 1);
    rd(other, 50), rd(fd, 50);
    say("sys sendmmsg", lseek(other, 0, SEEK_CUR));
    fd = ro();
    rd(fd, 50);
    int w = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY);
    if (pwrite(w, "written", 7, 60) != 7) exit(2);
    say("sys open", rest(fd, 100));
}
static void c_temporary(void) {
    char name[] = "/tmp/quinion-rules-XXXXXX";
    int w = mkstemp(name);
    memset(buf, 'a', 10000);
    if (write(w, buf, 10000) != 10000) exit(2);
    int fd = open(name, O_RDONLY);
    rd(fd, 5000);
    memset(buf, 'b', 10000);
    if (pwrite(w, buf, 10000, 0) != 10000) exit(2);
    say("temporary", rest(fd, 3000));
    unlink(name);
    int m = memfd_create("m", 0);
    if (write(m, buf, 5000) != 5000) exit(2);
    char proc[64];
    snprintf(proc, sizeof proc, "/proc/self/fd/%d", m);
    fd = open(proc, O_RDONLY);
    rd(fd, 100);
    memset(buf, 'c', 10000);
    if (pwrite(m, buf, 5000, 0) != 5000) exit(2);
    say("memfd", rest(fd, 3000));
    fd = ro();
    snprintf(proc, sizeof proc, "/proc/self/fd/%d", fd);
    rd(fd, 100);
    int second = open(proc, O_RDONLY);
    rd(second, 50);
    say("opened anew", lseek(second, 0, SEEK_CUR) + lseek(fd, 0, SEEK_CUR));
}
static void *opener(void *result) {
    uint64_t *sums = result;
    unsigned char mine[5000];
    for (int i = 0; i < 20; i++) {
        int fd = ro();
        ssize_t n;
        while ((n = read(fd, mine, 5000)) > 0)
            for (ssize_t i = 0; i < n; i++) sums[0] += mine[i] * 2654435761u + 1, sums[1]++;
        close(fd);
    }
    return NULL;
}
static void c_children(void) {
    /* A child of vfork changes its descriptors while other threads of the parent read theirs. */
    pthread_t t, u;
    uint64_t sums[2] = {0, 0}, more[2] = {0, 0}, all[2] = {0, 0};
    for (int round = 0; round < 20; round++) {
        shared = ro();
        sums[0] = sums[1] = 0;
        pthread_create(&t, NULL, reader, sums);
        pthread_create(&u, NULL, opener, more);
        int mine = ro();
        rd(mine, 1000);
        pid_t child = vfork();
        if (child == 0) {
            for (int fd = 3; fd < 20; fd++) close(fd);
            open("/etc/passwd", O_RDONLY);
            usleep(500);
            _exit(0);
        }
        say("vfork", rd(mine, 1000));
        waitpid(child, NULL, 0);
        pthread_join(t, NULL);
        pthread_join(u, NULL);
        all[0] += sums[0], all[1] += sums[1];
        say("mine", rest(mine, 60000));
        close(mine), close(shared);
    }
    printf("children %lu %lu\n", all[0] + more[0], all[1] + more[1]);
}
/* ---- positional reads of descriptors whose offset is shared ---- */
static void at(int fd, long count) {
    static uint64_t x = 1;
    for (long i = 0; i < count; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        ssize_t n = pread(fd, buf, (x >> 20) % 9000, (x >> 33) % 310000);
        add(buf, n);
        add(&n, sizeof n);
    }
}
static int sent(int fd, int by_number) { /* the same description, through a message */
    int s[2], got;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, s)) exit(2);
    char byte = 'x', control[CMSG_SPACE(sizeof(int))];
    memset(control, 0, sizeof control);
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    struct mmsghdr many = {.msg_hdr = m};
    if ((by_number ? syscall(SYS_sendmmsg, s[0], &many, 1, 0) : sendmsg(s[0], &m, 0)) != 1) exit(2);
    memset(control, 0, sizeof control);
    if (recvmsg(s[1], &m, 0) != 1) exit(2);
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof got);
    close(s[0]), close(s[1]);
    return got;
}
static int received(int fd) { return sent(fd, 0); }
static void c_positioned(void) {
    int fd = ro();
    rd(fd, 1000);
    int other = dup(fd), onto = ro(), third = received(fd), fourth = fcntl(fd, F_DUPFD, 60);
    at(onto, 10);
    dup2(fd, onto);
    int all[] = {fd, other, onto, third, fourth};
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 5; i++) {
            at(all[i], 20);
            rd(all[i], 501);
            lseek(all[i], 77, SEEK_CUR);
        }
    say("positioned", lseek(fd, 0, SEEK_CUR));
    close(fd), close(third);
    at(other, 10);
    /* The same descriptor numbers, for other files. */
    int pipes[2];
    if (pipe(pipes)) exit(2);
    errno = 0;
    say("pipe", pread(pipes[0], buf, 10, 0)), say("errno", errno);
    fd = open(self, O_RDONLY);
    add(buf, pread(fd, buf, 100, 0));
    dup2(fd, other);
    add(buf, pread(other, buf, 100, 64));
    say("failed dup2", dup2(-1, onto));
    at(onto, 10);
    rd(onto, 100);
    say("other files", lseek(onto, 0, SEEK_CUR));
}
static void c_unshared(void) { /* sendfile and similar calls use the offset in the kernel, and other reads do not */
    int fd = ro(), p[2];
    rd(fd, 1000);
    if (pipe(p)) exit(2);
    say("splice", splice(fd, NULL, p[1], NULL, 4000, 0));
    add(buf, read(p[0], buf, 4000));
    at(fd, 100);
    say("rest", rest(fd, 10000));
}
static void c_adopted(void) {
    int fd = ro();
    rd(fd, 300);
    dup2(fd, 0);
    close(fd);
    at(0, 10);
    fflush(stdout);
    execl(self, "rules", "adopted_child", path, "0", NULL);
}
static void c_adopted_child(void) {
    int fd = atoi(self);
    at(fd, 100);
    say("inherited", rest(fd, 5000));
    say("getc", getchar());
    lseek(fd, 0, SEEK_SET);
    at(fd, 100);
    close(fd);
    fd = open("/proc/self/exe", O_RDONLY); /* the same number, for another file */
    at(fd, 10);
    say("reused", fd);
}
static void c_exec_amid_opens_child(void) {
    struct passed *was = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(self), 0);
    int fd = was->fd;
    if (fd >= 0 && lseek(fd, 0, SEEK_CUR) < was->position) was->lost++;
}
static void c_inherited_writer(void) { /* a writable descriptor is inherited through exec */
    int w = open(path, O_RDWR);
    char number[16];
    snprintf(number, sizeof number, "%d", w);
    fflush(stdout);
    execl(self, "rules", "inherited_writer_child", path, number, NULL);
}
static void c_inherited_writer_child(void) {
    int w = atoi(self), fd = ro();
    rd(fd, 5000);
    if (pwrite(w, "written", 7, 5100) != 7) exit(2);
    say("inherited writer", rest(fd, 5000));
}

/* ---- children ---- */
static void child_reads(int depth) {
    int fd = ro();
    say("child", rest(fd, 4096));
    lseek(fd, 0, SEEK_SET);
    for (int i = 0; i < 50; i++) rd(fd, 700);
    at(fd, 50);
    fflush(stdout);
    if (depth > 0) {
        pid_t child = fork();
        if (!child) { at(fd, 50); child_reads(depth - 1); _exit(0); }
        waitpid(child, NULL, 0);
    }
    rd(fd, 100);
    say("child's offset", lseek(fd, 0, SEEK_CUR));
}
static void c_forked_viewer(void) {
    int fd = ro();
    rd(fd, 100);
    fflush(stdout);
    pid_t child = fork();
    if (!child) { at(fd, 50); child_reads(2); _exit(0); }
    waitpid(child, NULL, 0);
    at(fd, 50);
    say("parent", rest(fd, 9000));
    child_reads(0);
}
static void *one_child(void *unused) {
    (void)unused;
    pid_t child = fork();
    if (!child) {
        static unsigned char mine[9000];
        int fd = open(path, O_RDONLY);
        ssize_t sum = 0, n;
        while ((n = read(fd, mine, sizeof mine)) > 0) sum += n;
        if (pread(fd, mine, 100, sum - 50) != 50) _exit(1);
        _exit(sum == 300123 ? 7 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    return (void *)(long)WEXITSTATUS(status);
}
static void c_fork_among_threads(void) { /* children of threads, while other threads open, read and close */
    pthread_t readers[2], forkers[3];
    uint64_t sums[2][2] = {{0}};
    long well = 0;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 2; i++) pthread_create(&readers[i], NULL, opener, sums[i]);
        for (int i = 0; i < 3; i++) pthread_create(&forkers[i], NULL, one_child, NULL);
        for (int i = 0; i < 2; i++) pthread_join(readers[i], NULL);
        for (int i = 0; i < 3; i++) { void *r; pthread_join(forkers[i], &r); well += (long)r == 7; }
    }
    printf("fork among threads %ld %lu %lu\n", well, sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
}
static void c_crowd(void) { /* more processes at a time than the owner has room for */
    int p[2], q[2], well = 0;
    char byte = 0;
    if (pipe(p) || pipe(q)) exit(2);
    for (int i = 0; i < 80; i++)
        if (!fork()) {
            int fd = ro();
            long sum = rest(fd, 65536);
            if (write(q[1], &byte, 1) != 1 || read(p[0], &byte, 1) != 1) _exit(1);
            lseek(fd, 0, SEEK_SET);
            _exit(sum == 300123 && rest(fd, 30000) == 300123 ? 0 : 1);
        }
    for (int i = 0; i < 80; i++) if (read(q[0], &byte, 1) != 1) exit(2);
    for (int i = 0; i < 80; i++) if (write(p[1], &byte, 1) != 1) exit(2);
    for (int i = 0; i < 80; i++) { int status; wait(&status); well += status == 0; }
    say("crowd", well);
    int fd = ro();
    say("rest", rest(fd, 65536));
}
static void c_scrubbed(void) { /* a program without our environment reads the rest */
    int fd = ro();
    rd(fd, 5000);
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    char *argv[] = {"rules", "rest", (char *)path, number, NULL}, *none[] = {NULL};
    fflush(stdout);
    pid_t child = fork();
    if (!child) { execve(self, argv, none); _exit(127); }
    waitpid(child, NULL, 0);
    say("after", lseek(fd, 0, SEEK_CUR));
    lseek(fd, 100, SEEK_SET);
    at(fd, 20);
    execve(self, argv, none);
}
static void c_vfork_writes_nothing(void) { /* a child of vfork changes its own descriptors, not the parent's */
    int fd = ro(), other = ro();
    rd(fd, 1000), rd(other, 2000);
    pid_t child = vfork();
    if (child == 0) {
        dup2(other, fd);
        close(other);
        int mine = open(path, O_RDONLY);
        lseek(mine, 10, SEEK_SET);
        fcntl(mine, F_DUPFD, 70);
        _exit(pread(fd, buf, 100, 5) == 100 ? 3 : 4);
    }
    int status;
    waitpid(child, &status, 0);
    say("vfork", WEXITSTATUS(status));
    at(fd, 20), at(other, 20);
    say("offsets", lseek(fd, 0, SEEK_CUR) * 1000000 + lseek(other, 0, SEEK_CUR));
    int third = ro();
    say("rest", rest(fd, 4000) + rest(other, 4000) + rest(third, 4000));
}

/* ---- flags ---- */
static void c_flags(void) {
    int flags[] = {O_APPEND, O_SYNC, O_NOFOLLOW, O_NONBLOCK, O_CLOEXEC, O_NOATIME, O_LARGEFILE};
    for (int i = 0; i < 7; i++) {
        int fd = open(path, O_RDONLY | flags[i]);
        at(fd, 20);
        say("flag", fd < 0 ? fd : rest(fd, 9000));
        close(fd);
    }
    int direct = open(path, O_RDONLY | O_DIRECT);
    if (direct >= 0) {
        void *aligned;
        if (posix_memalign(&aligned, 4096, 8192)) exit(2);
        ssize_t n = pread(direct, aligned, 8192, 4096);
        add(aligned, n);
        close(direct);
    }
    int p = open(path, O_PATH);
    errno = 0;
    say("path", pread(p, buf, 10, 0)), say("errno", errno);
    char proc[64];
    snprintf(proc, sizeof proc, "/proc/self/fd/%d", p);
    int fd = open(proc, O_RDONLY);
    rd(fd, 700);
    snprintf(proc, sizeof proc, "/dev/fd/%d", fd);
    int again = open(proc, O_RDONLY);
    say("opened anew", lseek(again, 0, SEEK_CUR) + rest(again, 9000) + rest(fd, 9000));
    fd = ro();
    rd(fd, 100);
    int t = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    if (t >= 0) {
        if (write(t, buf, 5000) != 5000) exit(2);
        add(buf, pread(t, buf, 5000, 100));
    }
    int w = open(path, O_WRONLY | O_TRUNC);
    say("truncated", rest(fd, 100));
    say("anew", rest(ro(), 100) + w * 0);
}
static void retried(int fd, struct iovec *v, int count, off_t position, int flags) {
    memset(buf, 0, 100000);
    ssize_t n = preadv2(fd, v, count, position, flags);
    /* A read that must not wait, or whose flag is unknown, is repeated without the flag. */
    if (n < 0 && errno != EAGAIN && errno != EOPNOTSUPP) { perror("preadv2"); exit(2); }
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += v[i].iov_len;
    if (n < (ssize_t)sum) {
        if (position < 0 && n > 0) lseek(fd, -n, SEEK_CUR);
        memset(buf, 0, 100000);
        n = preadv2(fd, v, count, position, 0);
    }
    add(buf, 100000);
    say("retried", n);
}
static void c_read_flags(void) {
    struct iovec v[3] = {{buf, 10}, {buf + 200, 5000}, {buf + 9000, 70000}};
    int flags[] = {RWF_NOWAIT, RWF_DONTCACHE, RWF_HIPRI | RWF_NOWAIT, RWF_HIPRI | RWF_DONTCACHE, RWF_NOWAIT | RWF_DONTCACHE};
    for (int i = 0; i < 5; i++) {
        int fd = ro();
        retried(fd, v, 3, 0, flags[i]);
        retried(fd, v, 3, 299000, flags[i]);
        retried(fd, v, 3, 300123, flags[i]);
        retried(fd, v, 3, 1 << 30, flags[i]);
        for (int round = 0; round < 6; round++) retried(fd, v, 3, -1, flags[i]);
        int other = dup(fd);
        retried(other, v, 2, 100000, flags[i]);
        say("at", lseek(other, 0, SEEK_CUR));
        close(fd), close(other);
    }
    int fd = ro();
    rd(fd, 100);
    say("sync", preadv2(fd, v, 2, -1, RWF_SYNC | RWF_DSYNC));
    say("none", preadv2(fd, v, 3, 0, 0x20000000)), say("errno", errno);
    say("rest", rest(fd, 9000));
}
static void c_advice(void) { /* hints before the file is attached, after, for a range, for a duplicate */
    int fd = ro();
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    at(fd, 5);
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    posix_fadvise(fd, 4096, 8192, POSIX_FADV_WILLNEED);
    readahead(fd, 100000, 50000);
    posix_fadvise(fd, 0, 100, POSIX_FADV_NOREUSE);
    posix_fadvise(fd, 4096, 4096, POSIX_FADV_DONTNEED);
    posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
    say("rest", rest(fd, 9000));
}

/* ---- threads, signals, cancellation ---- */
static struct { const char *path; unsigned char *bytes; off_t size; } files[2];
static volatile int number_of_both, stop_closing;
static void *closer(void *unused) {
    (void)unused;
    for (int i = 0; i < 3000; i++) {
        close(number_of_both);
        int fd = open(files[i % 2].path, O_RDONLY);
        if (fd != number_of_both) { /* another thread had the number meanwhile */
            dup2(fd, number_of_both);
            close(fd);
        }
    }
    stop_closing = 1;
    return NULL;
}
static void *either(void *wrong) {
    unsigned char mine[6000];
    uint64_t x = (uint64_t)wrong | 1;
    while (!stop_closing) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        off_t position = (x >> 33) % 15000;
        ssize_t n = pread(number_of_both, mine, sizeof mine, position);
        if (n < 0 && errno == EBADF) continue;
        /* All bytes are from one file or all are from the other. */
        int fits = 0;
        for (int i = 0; i < 2; i++)
            fits |= n == (ssize_t)sizeof mine && !memcmp(mine, files[i].bytes + position, n);
        if (!fits) __atomic_fetch_add((long *)wrong, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}
static void c_close_elsewhere(void) {
    static long wrong;
    pthread_t t[3];
    files[0].path = path, files[1].path = self;
    for (int i = 0; i < 2; i++) {
        int fd = open(files[i].path, O_RDONLY);
        files[i].size = lseek(fd, 0, SEEK_END);
        files[i].bytes = malloc(files[i].size);
        if (files[i].size < 21000 || pread(fd, files[i].bytes, files[i].size, 0) != files[i].size) exit(2);
        close(fd);
    }
    number_of_both = ro();
    for (int i = 0; i < 2; i++) pthread_create(&t[i], NULL, either, &wrong);
    pthread_create(&t[2], NULL, closer, NULL);
    for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
    say("close elsewhere", wrong);
}
static sigjmp_buf away;
static void jumper(int signal) { (void)signal; siglongjmp(away, 1); }
static void c_longjmp(void) { /* handlers that never return to the interrupted read */
    struct sigaction a = {.sa_handler = jumper};
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    volatile long jumps = 0;
    sigaction(SIGALRM, &a, NULL);
    int fd = ro();
    while (jumps < 200) {
        if (sigsetjmp(away, 1)) { jumps++; continue; }
        setitimer(ITIMER_REAL, &often, NULL);
        for (;;) { pread(fd, buf, 9000, (jumps * 7919) % 290000); }
    }
    signal(SIGALRM, SIG_IGN);
    setitimer(ITIMER_REAL, &never, NULL);
    lseek(fd, 0, SEEK_SET);
    say("longjmp", rest(fd, 9000));
    int other = ro();
    say("other", rest(other, 9000));
}
static void leaver(int signal) { (void)signal; pthread_exit((void *)5); }
static void *reads_on(void *unused) {
    (void)unused;
    unsigned char mine[9000];
    for (long i = 0;; i++) { if (pread(shared, mine, sizeof mine, i * 7919 % 290000) != (ssize_t)sizeof mine) return (void *)1; }
}
static void c_threads_end_mid_read(void) {
    signal(SIGUSR1, leaver);
    shared = ro();
    for (int i = 0; i < 30; i++) {
        pthread_t t;
        void *result;
        pthread_create(&t, NULL, reads_on, NULL);
        usleep(500);
        pthread_kill(t, SIGUSR1);
        pthread_join(t, &result);
        if (result != (void *)5) say("ended", (long)result);
    }
    at(shared, 20);
    say("rest", rest(shared, 9000));
}
static void *cancelled_anywhere(void *unused) {
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    return reads_on(unused);
}
static void c_cancel_anywhere(void) {
    shared = ro();
    at(shared, 1);
    for (int i = 0; i < 30; i++) {
        pthread_t t;
        void *result;
        pthread_create(&t, NULL, cancelled_anywhere, NULL);
        usleep(500);
        pthread_cancel(t);
        pthread_join(t, &result);
        if (result != PTHREAD_CANCELED) say("ended", (long)result);
    }
    at(shared, 20);
    say("rest", rest(shared, 9000));
}
static void c_cancel_disabled(void) {
    shared = ro();
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    pthread_cancel(pthread_self());
    at(shared, 20);
    say("rest", rest(shared, 9000));
}
/* A close that is cancelled before it closes keeps the descriptor and its offset. */
static void *closes(void *ignored) {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    rd(shared, 5000);
    pthread_cancel(pthread_self());
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    close(shared);
    return ignored;
}
static void c_close_cancelled(void) {
    pthread_t thread;
    void *ended = NULL;
    shared = ro();
    rd(shared, 100);
    if (pthread_create(&thread, NULL, closes, NULL)) exit(2);
    pthread_join(thread, &ended);
    say("cancelled", ended == PTHREAD_CANCELED);
    say("open at", lseek(shared, 0, SEEK_CUR));
    say("rest", rest(shared, 9000));
}
/* A program that may only make the system calls of `cat` executes `cat`. */
static void c_confined(void) {
    static const int allowed[] = {
        SYS_read, SYS_write, SYS_open, SYS_openat, SYS_close, SYS_fstat, SYS_newfstatat, SYS_mmap, SYS_mprotect, SYS_munmap,
        SYS_brk, SYS_exit_group, SYS_arch_prctl, SYS_access, SYS_pread64, SYS_fadvise64, SYS_set_tid_address, SYS_lseek,
        SYS_set_robust_list, SYS_rseq, SYS_futex, SYS_prlimit64, SYS_getrandom, SYS_execve, SYS_statx, SYS_ioctl, SYS_mremap,
        SYS_copy_file_range,
    };
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter filter[COUNT + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0 /* the number */)};
    for (int i = 0; i < COUNT; i++)
        filter[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], COUNT - i, 0);
    filter[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    filter[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {COUNT + 3, filter};
    int fd = ro(), status;
    rd(fd, 7000);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        pid_t child = fork();
        if (!child) {
            int nowhere = open("/dev/null", O_WRONLY);
            dup2(nowhere, 1);
            if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) _exit(3);
            if (i ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(4);
            execl("/bin/cat", "cat", path, NULL);
            _exit(5);
        }
        waitpid(child, &status, 0);
        say("confined", status);
    }
    say("rest", rest(fd, 9000));
}

/* ---- other kernel interfaces ---- */
static void c_aio(void) {
    aio_context_t context = 0;
    int fd = ro();
    rd(fd, 1000);
    if (syscall(SYS_io_setup, 4, &context)) { say("no aio", 0); return; }
    struct iocb one = {.aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uint64_t)(uintptr_t)buf, .aio_nbytes = 5000, .aio_offset = 777}, *list[] = {&one};
    struct io_event event;
    say("submit", syscall(SYS_io_submit, context, 1, list));
    say("events", syscall(SYS_io_getevents, context, 1, 1, &event, NULL));
    say("read", event.res);
    add(buf, 5000);
    at(fd, 20);
    say("rest", rest(fd, 9000));
    int ring = syscall(425 /* io_uring_setup */, 4, calloc(1, 256));
    (void)ring;
    say("after a ring", rest(ro(), 9000));
}
static void c_closed_by_stream(void) {
    /* Descriptor numbers go from us to the C library and back. */
    int fd = open(path, O_RDONLY);
    dup2(fd, 50);
    at(50, 5);
    close(50);
    for (int i = 0; i < 10; i++) {
        FILE *f = fopen(i % 2 ? path : self, "r");
        int n = fileno(f);
        add(buf, pread(n, buf, 1000, 2000));
        add(buf, fread(buf, 1, 3000, f));
        say("stream", n);
        fclose(f);
        int again = open(i % 2 ? self : path, O_RDONLY);
        at(again, 3);
        add(buf, pread(again, buf, 1000, 2000));
        say("again", again == n);
        f = fdopen(again, "r");
        add(buf, fread(buf, 1, 3000, f));
        fclose(f);
        f = fopen(i % 2 ? path : self, "r");
        add(buf, pread(fileno(f), buf, 1000, 2000));
        fclose(f);
    }
    stdin = freopen(path, "r", stdin);
    at(0, 5);
    fclose(stdin);
    FILE *f = fopen("/proc/self/exe", "r");
    add(buf, pread(fileno(f), buf, 1000, 2000));
    say("the first", fileno(f));
}
static void c_slow(void) {
    int fd = ro();
    ssize_t n;
    while ((n = rd(fd, 4096)) > 0) usleep(2000);
    say("slow", n);
}
static void c_sparse(void) {
    int w = open(path, O_RDWR);
    if (ftruncate(w, 300000) || pwrite(w, "x", 1, 250000) != 1) exit(2);
    int fd = ro();
    say("data", lseek(fd, 0, SEEK_DATA) >= 0);
    say("hole", lseek(fd, 0, SEEK_HOLE) >= 0);
    lseek(fd, 0, SEEK_SET);
    say("rest", rest(fd, 9000));
}
static void c_random(unsigned seed) {
    uint64_t x = seed * 2 + 1;
    int fds[8], count = 8;
    off_t size;
    for (int i = 0; i < count; i++) fds[i] = ro();
    size = lseek(fds[0], 0, SEEK_END);
    for (int step = 0; step < 2000; step++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        unsigned r = x >> 33;
        int *fd = &fds[r % 8];
        size_t len = (r >> 3) % 20000;
        off_t at = (x >> 17) % (size + 1000);
        long n = 0;
        struct iovec v[2] = {{buf, len / 3}, {buf + 30000, len}};
        switch ((r >> 8) % 48) {
        case 0 ... 9: n = rd(*fd, len); break;
        case 10 ... 15: n = pread(*fd, buf, len, at); if (n > 0) add(buf, n); break;
        case 16 ... 20: n = lseek(*fd, at, SEEK_SET); break;
        case 21 ... 22: n = lseek(*fd, (long)(r % 3000) - 1500, SEEK_CUR); break;
        case 23: n = lseek(*fd, -(long)(r % 3000), SEEK_END); break;
        case 24 ... 27: memset(buf, 0, 60000); n = readv(*fd, v, 2); add(buf, 60000); break;
        case 28: memset(buf, 0, 60000); n = preadv2(*fd, v, 2, -1, 0); add(buf, 60000); break;
        case 29 ... 31: close(*fd); *fd = ro(); break;
        case 32: { int g = dup(*fd); n = rd(g, len); close(g); break; }
        case 33: dup2(fds[(r >> 5) % 8], *fd); break;
        case 34: n = lseek(*fd, at, SEEK_DATA); break;
        case 35: n = sendfile(-1, *fd, NULL, 10); break;
        case 36: close(*fd); *fd = open(path, O_RDONLY | O_CLOEXEC); n = fcntl(*fd, F_GETFD); break;
        case 37: n = ioctl(*fd, TCGETS, buf); break;
        case 38: if (step % 50 == 0) { pid_t p = fork(); if (!p) { rd(*fd, len); _exit(0); } waitpid(p, NULL, 0); } n = rd(*fd, len); break;
        case 40: { int g = dup(*fd); n = pread(g, buf, len, at); if (n > 0) add(buf, n); close(g); n = pread(*fd, buf, len, at / 2); if (n > 0) add(buf, n); break; }
        case 41: if (step % 5 == 0) { int g = received(*fd); close(*fd); *fd = g; } n = pread(*fd, buf, len, at); if (n > 0) add(buf, n); break;
        case 42: { int g = fcntl(*fd, F_DUPFD_CLOEXEC, 30 + r % 20); close(*fd); *fd = g; n = rd(g, len); break; }
        case 43: { int f = (r >> 5) % 2 ? RWF_NOWAIT : RWF_DONTCACHE; memset(buf, 0, 60000); n = preadv2(*fd, v, 2, at, f); if (n < (long)(len / 3 + len)) { memset(buf, 0, 60000); n = preadv2(*fd, v, 2, at, 0); } add(buf, 60000); break; }
        case 44: n = posix_fadvise(*fd, at, len, (r >> 5) % 6); break;
        case 45: if (step % 40 == 0) { fflush(stdout); pid_t p = fork(); if (!p) { int g = ro(); rd(g, len); n = pread(*fd, buf, len, at); add(buf, n); dup2(g, *fd); rd(*fd, len); _exit(digest & 63); } int status; waitpid(p, &status, 0); n = status; } break;
        case 46: { int which = (r >> 5) % 8; if (&fds[which] != fd) { close(fds[which]); fds[which] = dup(*fd); } n = pread(fds[which], buf, len, at); if (n > 0) add(buf, n); break; }
        case 47: if (step % 50 == 0) { pid_t p = vfork(); if (!p) { close(*fd); _exit(1); } waitpid(p, NULL, 0); } n = rd(*fd, len); break;
        case 39: n = syscall(SYS_pread64, *fd, buf, len, at); if (n > 0) add(buf, n); break;
        }
        add(&n, sizeof n);
    }
    for (int i = 0; i < count; i++) { long at = lseek(fds[i], 0, SEEK_CUR); add(&at, sizeof at); }
    say("random", seed);
}

int main(int argc, char **argv) {
    struct { const char *name; void (*run)(void); } cases[] = {
        {"read", c_read}, {"pread", c_pread}, {"hints", c_hints}, {"dup", c_dup}, {"fork", c_fork}, {"forkread", c_forkread}, {"vfork", c_vfork},
        {"some", c_some}, {"rest", c_rest}, {"spawn", c_spawn}, {"exec", c_exec}, {"fdopen", c_fdopen},
        {"exec_amid_opens", c_exec_amid_opens}, {"exec_amid_opens_child", c_exec_amid_opens_child},
        {"sendfile", c_sendfile}, {"write", c_write}, {"stream", c_stream}, {"truncate", c_truncate},
        {"truncate_only", c_truncate_only}, {"append", c_append}, {"grow", c_grow}, {"vectors", c_vectors},
        {"seek", c_seek}, {"reuse", c_reuse}, {"signals", c_signals}, {"threads", c_threads},
        {"cancel", c_cancel}, {"errors", c_errors}, {"passed", c_passed}, {"mapped", c_mapped},
        {"locks", c_locks}, {"syscall", c_syscall}, {"temporary", c_temporary}, {"children", c_children},
        {"slow", c_slow}, {"sparse", c_sparse},
        {"positioned", c_positioned},
        {"unshared", c_unshared},
        {"adopted", c_adopted},
        {"inherited_writer", c_inherited_writer},
        {"forked_viewer", c_forked_viewer},
        {"fork_among_threads", c_fork_among_threads},
        {"crowd", c_crowd},
        {"scrubbed", c_scrubbed},
        {"vfork_writes_nothing", c_vfork_writes_nothing},
        {"flags", c_flags},
        {"read_flags", c_read_flags},
        {"advice", c_advice},
        {"close_elsewhere", c_close_elsewhere},
        {"longjmp", c_longjmp},
        {"threads_end_mid_read", c_threads_end_mid_read},
        {"cancel_anywhere", c_cancel_anywhere},
        {"cancel_disabled", c_cancel_disabled},
        {"close_cancelled", c_close_cancelled},
        {"confined", c_confined},
        {"aio", c_aio},
        {"closed_by_stream", c_closed_by_stream},
        {"adopted_child", c_adopted_child},
        {"inherited_writer_child", c_inherited_writer_child},
    };
    if (argc < 3) return 2;
    path = argv[2];
    self = argc > 3 && (!strcmp(argv[1], "some") || !strcmp(argv[1], "rest") || strstr(argv[1], "_child")) ? argv[3] : "/proc/self/exe";
    if (!strcmp(argv[1], "random")) { c_random(argc > 3 ? atoi(argv[3]) : 1); return 0; }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, argv[1])) { cases[i].run(); return 0; }
    return 2;
}
