/*
 * Pointers: a program that passes the C library and the kernel addresses that are not, or only partly, its memory, and
 * prints their answers. Run with and without the cache it must print the same, and end the same way.
 * `pointers CASE FILE`; FILE is a copy of its own, of more than 300,000 bytes.
 */
#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, FILE_READ = 300000 };
extern char **environ;
static const char *path, *self;
static unsigned char buf[1 << 20];

static uint64_t digest_of(const unsigned char *p, long len) {
    uint64_t digest = 14695981039346656037ull;
    for (long i = 0; i < len; i++) digest = (digest ^ p[i]) * 1099511628211ull;
    return digest;
}
/* The result of a call, and its error if it failed. */
static void say(const char *what, long value) {
    printf("%s %ld %s\n", what, value, value < 0 ? strerrorname_np(errno) : "-");
    fflush(stdout);
}
static int fd_ro(void) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) { perror("open"); exit(2); }
    return fd;
}
/* A descriptor whose file was read completely, and partly again: it is served by now, and its file is cached. */
static int warm(void) {
    int fd = fd_ro();
    for (int i = 0; i < 3; i++)
        if (pread(fd, buf, FILE_READ, 0) != FILE_READ) { perror("pread"); exit(2); }
    return fd;
}

/* ---- bad addresses ---- */
static unsigned char *pages(int count, int protection) {
    unsigned char *at = mmap(NULL, count * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) { perror("mmap"); exit(2); }
    return at;
}
/* Some mapped pages, then a hole, then mapped pages again. */
enum { BEHIND = 30 };
static unsigned char *edge(int good) {
    unsigned char *at = pages(good + 1 + BEHIND, PROT_READ | PROT_WRITE);
    munmap(at + good * PAGE, PAGE);
    return at + good * PAGE;
}
static unsigned char *beyond_a_file(void) {
    char name[] = "/tmp/pointers-XXXXXX";
    int fd = mkstemp(name);
    unlink(name);
    unsigned char *at = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) { perror("mmap"); exit(2); }
    close(fd);
    return at;
}
struct place { const char *name; unsigned char *at; };
static int bad_places(struct place *to) {
    int n = 0;
    to[n++] = (struct place){"null", NULL};
    to[n++] = (struct place){"eight", (void *)8};
    to[n++] = (struct place){"unmapped", edge(1)};
    to[n++] = (struct place){"none", pages(40, PROT_NONE)};
    to[n++] = (struct place){"readonly", pages(40, PROT_READ)};
    to[n++] = (struct place){"beyond", beyond_a_file()};
    to[n++] = (struct place){"odd", (void *)0x8000000000001000ull};
    to[n++] = (struct place){"kernel", (void *)0xffff888000000000ull};
    return n;
}
enum { LENS = 9 };
static const size_t LEN[LENS] = {1, 5, 12, 20, 40, 100, 1000, 4096, 100000};

static void all_reads(int fd, const char *name, unsigned char *at, size_t len) {
    char what[100];
#define SAY(call, value) (snprintf(what, sizeof what, "%s %s %zu", call, name, len), say(what, value))
    lseek(fd, 1234, SEEK_SET);
    SAY("read", read(fd, at, len));
    SAY("offset", lseek(fd, 0, SEEK_CUR));
    SAY("pread", pread(fd, at, len, 777));
    struct iovec one = {at, len}, three[] = {{buf, 100}, {at, len}, {buf + 200, 100}};
    SAY("readv", readv(fd, &one, 1));
    SAY("readv3", readv(fd, three, 3));
    SAY("offset", lseek(fd, 0, SEEK_CUR));
    SAY("preadv", preadv(fd, &one, 1, 5000));
    SAY("preadv3", preadv(fd, three, 3, 5000));
    SAY("preadv2", preadv2(fd, three, 3, 5000, 0));
    SAY("preadv2-", preadv2(fd, three, 3, -1, 0));
    SAY("offset", lseek(fd, 0, SEEK_CUR));
    SAY("good", pread(fd, buf, 1000, 9));
    SAY("after", read(fd, buf, 1000));
    printf("%016lx\n", digest_of(buf, 1000));
#undef SAY
}
static void c_bad_buffers(void) {
    struct place place[20];
    int places = bad_places(place);
    for (int i = 0; i < places; i++) {
        int fd = warm();
        for (int l = 0; l < LENS; l++) all_reads(fd, place[i].name, place[i].at, LEN[l]);
        close(fd);
    }
}
/* Buffers of which only the first bytes are mapped: the kernel decides how many bytes arrive. */
static void c_partly_bad_buffers(void) {
    static const long GOOD[] = {1, 3, 16, 40, 500, 3000, PAGE, PAGE + 10, 5 * PAGE};
    for (int i = 0; i < 9; i++) {
        long good = GOOD[i];
        unsigned char *end = edge(6);
        int fd = warm();
        for (int l = 0; l < LENS; l++) {
            if (LEN[l] <= good) continue;
            char name[30];
            snprintf(name, sizeof name, "good%ld", good);
            memset(end - 6 * PAGE, 0, 6 * PAGE);
            all_reads(fd, name, end - good, LEN[l]);
            long arrived = pread(fd, end - good, LEN[l], 40000);
            printf("%ld %016lx\n", arrived, arrived > 0 ? digest_of(end - good, arrived) : 0);
            printf("behind %016lx\n", digest_of(end + PAGE, BEHIND * PAGE));
        }
        close(fd);
    }
}
/* Parts that were never read before come first. */
static void c_bad_buffers_of_cold_files(void) {
    struct place place[20];
    int places = bad_places(place);
    for (int i = 0; i < places; i++) {
        int fd = fd_ro();
        all_reads(fd, place[i].name, place[i].at, 3000);
        close(fd);
    }
}
static void arrays(int fd, const char *name, const struct iovec *parts, int count) {
    char what[100];
#define SAY(call, value) (snprintf(what, sizeof what, "%s %s %d", call, name, count), say(what, value))
    lseek(fd, 4321, SEEK_SET);
    SAY("readv", readv(fd, parts, count));
    SAY("preadv", preadv(fd, parts, count, 99));
    SAY("preadv2", preadv2(fd, parts, count, 99, 0));
    SAY("preadv2-", preadv2(fd, parts, count, -1, 0));
    SAY("offset", lseek(fd, 0, SEEK_CUR));
#undef SAY
}
static void c_bad_arrays(void) {
    struct place place[20];
    int places = bad_places(place), fd = warm();
    static struct iovec good[1025];
    for (int i = 0; i < 1025; i++) good[i] = (struct iovec){buf + 100 * i, 100 - i % 3};
    for (int i = 0; i < places; i++) {
        for (int count = 1; count < 70; count += 17) arrays(fd, place[i].name, (void *)place[i].at, count);
        arrays(999, "not open", (void *)place[i].at, 1);
    }
    /* Only two of the vectors can be read. */
    struct iovec *end = (struct iovec *)edge(1);
    memcpy(end - 2, good, 2 * sizeof *good);
    for (int count = 1; count < 5; count++) arrays(fd, "two", end - 2, count);
    /* Not aligned to eight bytes. */
    memcpy((char *)(end - 3) + 1, good, 2 * sizeof *good);
    arrays(fd, "askew", (struct iovec *)((char *)(end - 3) + 1), 2);
    static const int COUNT[] = {-1, 0, 1, 8, 16, 31, 32, 33, 64, 1024, 1025};
    for (int i = 0; i < 11; i++) arrays(fd, "good", good, COUNT[i]);
    printf("%016lx\n", digest_of(buf, 1025 * 100));
    struct iovec much[] = {{buf, SSIZE_MAX}, {buf, SSIZE_MAX}}, none[] = {{NULL, 0}, {buf, 10}}, null[] = {{NULL, 5}};
    arrays(fd, "much", much, 2);
    arrays(fd, "none", none, 2);
    arrays(fd, "null", null, 1);
    close(fd);
}

/* ---- messages ---- */
static int pair[2];
static void drain(void) {
    char control[1000];
    struct iovec part = {buf, 1000};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    long got = recvmsg(pair[1], &message, MSG_DONTWAIT);
    int with = -1;
    if (got >= 0 && message.msg_controllen >= CMSG_LEN(4)) memcpy(&with, CMSG_DATA((struct cmsghdr *)control), 4);
    printf("received %ld %d\n", got, with >= 0);
    if (with >= 0) { printf("there %ld\n", (long)read(with, buf, 100)); close(with); }
}
static void c_bad_messages(void) {
    struct place place[20];
    int places = bad_places(place), fd = warm();
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    struct iovec part = {"hello", 5};
    union { char bytes[CMSG_SPACE(4)]; struct cmsghdr header; } control;
    control.header = (struct cmsghdr){CMSG_LEN(4), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &fd, 4);
    struct msghdr plain = {.msg_iov = &part, .msg_iovlen = 1}, rights = plain;
    rights.msg_control = &control, rights.msg_controllen = sizeof control;
    for (int i = 0; i < places; i++) {
        printf("%s\n", place[i].name);
        struct msghdr *bad = (struct msghdr *)place[i].at, m = plain;
        say("sendmsg", sendmsg(pair[0], bad, 0));
        say("sendmmsg", sendmmsg(pair[0], (struct mmsghdr *)bad, 2, 0));
        say("by number", syscall(SYS_sendmsg, pair[0], bad, 0));
        say("recvmsg", recvmsg(pair[1], bad, MSG_DONTWAIT));
        say("not a socket", sendmsg(fd, bad, 0));
        say("not a socket", sendmmsg(fd, (struct mmsghdr *)bad, 1, 0));
        say("not open", sendmsg(999, bad, 0));
        say("not open", sendmmsg(999, (struct mmsghdr *)bad, 1, 0));
        m.msg_control = bad, m.msg_controllen = 24;
        say("control", sendmsg(pair[0], &m, 0));
        drain();
        say("control received", recvmsg(pair[1], &m, MSG_DONTWAIT));
        m = plain, m.msg_iov = (struct iovec *)bad;
        say("parts", sendmsg(pair[0], &m, 0));
        struct mmsghdr two[2] = {{plain}, {plain}};
        two[1].msg_hdr.msg_control = bad, two[1].msg_hdr.msg_controllen = 24;
        say("two", sendmmsg(pair[0], two, 2, 0));
        drain();
        drain();
    }
    /* The second of two is at an unmapped address. */
    struct mmsghdr *end = (struct mmsghdr *)edge(1) - 1;
    *end = (struct mmsghdr){rights};
    say("cut", sendmmsg(pair[0], end, 2, 0));
    drain();
    /* Control data that is cut off, and whose length is too large. */
    unsigned char *cut = edge(1) - 20;
    memcpy(cut, &control, 20);
    rights.msg_control = cut;
    say("cut control", sendmsg(pair[0], &rights, 0));
    rights.msg_control = &control;
    control.header.cmsg_len = 1 << 30;
    say("long control", sendmsg(pair[0], &rights, 0));
    control.header.cmsg_len = CMSG_LEN(4);
    read(fd, buf, 1000);
    say("rights", sendmsg(pair[0], &rights, 0));
    drain();
    say("offset", lseek(fd, 0, SEEK_CUR));
}

/* ---- other programs ---- */
static char *words[] = {"true", NULL};
static int program;
static void exec_by(int how, char **arguments, char **environment) {
    switch (how) {
    case 0: execve("/bin/true", arguments, environment); break;
    case 1: fexecve(program, arguments, environment); break;
    case 2: syscall(SYS_execveat, program, "", arguments, environment, AT_EMPTY_PATH); break;
    case 3: execvpe("true", arguments, environment); break;
    case 4: syscall(SYS_execve, "/bin/true", arguments, environment); break;
    case 5: execve("/bin/there-is-none", arguments, environment); break;
    case 6: fexecve(999, arguments, environment); break;
    }
}
enum { EXECS = 7 };
/* Also in a child that runs in its parent's memory, with the default signal handlers. */
static void exec_both(const char *name, char **arguments, char **environment) {
    for (int how = 0; how < EXECS; how++)
        for (int in_place = 0; in_place < 3; in_place++) {
            int status = -1;
            pid_t child = in_place ? vfork() : fork();
            if (!child) {
                if (in_place == 2) signal(SIGSEGV, SIG_DFL), signal(SIGBUS, SIG_DFL);
                exec_by(how, arguments, environment);
                _exit(errno);
            }
            waitpid(child, &status, 0);
            printf("%s %d %d: %x\n", name, how, in_place, status);
        }
    if (arguments != words) return; /* the C library counts the arguments itself */
    pid_t child = -1;
    int status = -1, error = posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environment);
    if (!error) waitpid(child, &status, 0);
    printf("%s spawned %d %x\n", name, error, status);
}
static void c_bad_environments(void) {
    struct place place[20];
    int places = bad_places(place), fd = warm();
    program = open("/bin/true", O_RDONLY | O_CLOEXEC);
    exec_both("good", words, environ);
    for (int i = 0; i < places; i++) {
        exec_both(place[i].name, words, (char **)place[i].at);
        exec_both(place[i].name, (char **)place[i].at, environ);
        char *one[] = {"A=B", (char *)place[i].at, "LD_PRELOAD=", NULL};
        exec_both(place[i].name, words, one);
    }
    char **end = (char **)edge(1);
    end[-1] = "A=B";
    exec_both("list without end", words, end - 1);
    char *cut = (char *)edge(1) - 4;
    memcpy(cut, "LD_P", 4);
    char *one[] = {cut, NULL};
    exec_both("string without end", words, one);
    cut -= 11;
    memcpy(cut, "LD_PRELOAD=/pro", 15);
    one[0] = cut;
    exec_both("value without end", words, one);
    say("rest", read(fd, buf, 5000));
}
/* A fault inside the C library is a fault with the cache, too, with the same signal. */
static void faults_in(const char *name, void (*what)(void *), void *argument) {
    int status;
    pid_t child = fork();
    if (!child) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        what(argument);
        _exit(77);
    }
    waitpid(child, &status, 0);
    printf("%s %x\n", name, status & ~0x80);
}
static void writes_block(void *at) { aio_write(at); }
static void opens_stream(void *at) { FILE *f = fopen("/dev/null", at); _exit(f != NULL); }
static void c_bad_blocks_and_modes(void) {
    struct place place[20];
    int places = bad_places(place), fd = warm();
    for (int i = 0; i < places; i++) {
        faults_in("aio_write", writes_block, place[i].at);
        faults_in("fopen", opens_stream, place[i].at);
    }
    char *mode = (char *)edge(1);
    memcpy(mode - 8, "rb123456", 8);
    faults_in("fopen without end", opens_stream, mode - 8);
    memcpy(mode - 2, "w+", 2);
    faults_in("fopen cut", opens_stream, mode - 2);
    struct aiocb good = {.aio_fildes = fd, .aio_buf = buf, .aio_nbytes = 10};
    faults_in("good", writes_block, &good);
    say("rest", read(fd, buf, 5000));
}

/* ---- signals ---- */
static sigjmp_buf back;
static volatile sig_atomic_t caught;
static void *volatile caught_at, *volatile caught_stack;
static void recovers(int number, siginfo_t *info, void *context) {
    (void)context;
    int here;
    caught++, caught_at = info->si_addr, caught_stack = &here;
    siglongjmp(back, number);
}
static char other_stack[1 << 16];
static void use_other_stack(void) {
    stack_t stack = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    sigaltstack(&stack, NULL);
}
static void touch(const char *name, volatile unsigned char *at) {
    int number = sigsetjmp(back, 1);
    if (!number) *at = 1;
    long distance = (char *)caught_stack - other_stack;
    printf("%s %d %d %d %d\n", name, number, caught, caught_at == at, distance > 0 && distance < sizeof other_stack);
}
static void show(int number) {
    struct sigaction now;
    say("query", sigaction(number, NULL, &now));
    const char *what = now.sa_handler == SIG_DFL ? "default" : now.sa_handler == SIG_IGN ? "ignored"
        : now.sa_sigaction == recovers ? "recovers" : "another";
    printf("%s %x %d %d\n", what, now.sa_flags, sigismember(&now.sa_mask, SIGUSR1), sigismember(&now.sa_mask, SIGSEGV));
}
/* A handler of the program gets the program's faults, and none where the kernel would return an error. */
static void c_recovering_handler(void) {
    int fd = warm();
    show(SIGSEGV);
    show(SIGBUS);
    use_other_stack();
    struct sigaction act = {.sa_sigaction = recovers, .sa_flags = SA_SIGINFO | SA_ONSTACK}, before;
    sigaddset(&act.sa_mask, SIGUSR1);
    say("set", sigaction(SIGSEGV, &act, &before));
    printf("before: %d %x\n", before.sa_handler == SIG_DFL, before.sa_flags);
    say("set", sigaction(SIGBUS, &act, NULL));
    show(SIGSEGV);
    struct place place[20];
    int places = bad_places(place);
    for (int i = 1; i < places - 2; i++) {
        touch(place[i].name, place[i].at);
        all_reads(fd, place[i].name, place[i].at, 5000);
        say("handled", caught);
    }
    act.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&act.sa_mask);
    say("set", sigaction(SIGSEGV, &act, &before));
    printf("before: %d %x\n", before.sa_sigaction == recovers, before.sa_flags);
    show(SIGSEGV);
    touch("plain", place[2].at);
    say("read", pread(fd, place[2].at, 5000, 0));
    raise(SIGUSR2 == 0);
    show(SIGSEGV);
}
static volatile sig_atomic_t sender, sent_code;
static void notes(int number, siginfo_t *info, void *context) {
    (void)context;
    caught += number;
    sent_code = info->si_code, sender = info->si_pid;
}
static void plain_handler(int number) { caught += 1000 * number; }
static void other_handler(int number) { caught += 1000000 * number; }
static void c_signals_that_are_sent(void) {
    int fd = warm();
    struct sigaction act = {.sa_sigaction = notes, .sa_flags = SA_SIGINFO}, now;
    sigaction(SIGSEGV, &act, NULL);
    kill(getpid(), SIGSEGV);
    printf("%d %d %d\n", caught, sent_code, sender == getpid());
    raise(SIGSEGV);
    printf("%d %d\n", caught, sent_code);
    sigqueue(getpid(), SIGSEGV, (union sigval){5});
    printf("%d %d\n", caught, sent_code);
    printf("%d\n", signal(SIGSEGV, plain_handler) == (void *)notes);
    show(SIGSEGV);
    raise(SIGSEGV);
    printf("%d\n", signal(SIGSEGV, other_handler) == plain_handler);
    printf("%d\n", signal(SIGBUS, other_handler) == SIG_DFL);
    raise(SIGSEGV);
    raise(SIGBUS);
    printf("%d\n", caught);
    say("read", pread(fd, (void *)8, 5000, 0));
    printf("%d\n", sysv_signal(SIGSEGV, plain_handler) == other_handler);
    show(SIGSEGV);
    say("read", pread(fd, (void *)8, 5000, 0));
    raise(SIGSEGV);
    printf("%d\n", caught);
    show(SIGSEGV); /* the default again */
    say("read", pread(fd, (void *)8, 5000, 0));
    printf("%d\n", signal(SIGSEGV, SIG_DFL) == SIG_DFL);
    act.sa_flags = SA_RESETHAND | SA_RESTART;
    act.sa_handler = plain_handler;
    sigaction(SIGBUS, &act, NULL);
    say("read", pread(fd, (void *)8, 5000, 0));
    show(SIGBUS);
    raise(SIGBUS);
    show(SIGBUS);
    say("bad number", sigaction(65, NULL, &now));
    say("bad number", sigaction(0, NULL, &now));
    say("bad number", (long)signal(SIGKILL, plain_handler));
    say("rest", read(fd, buf, 5000));
}
static void c_ignored(void) {
    int fd = warm();
    printf("%d\n", signal(SIGSEGV, SIG_IGN) == SIG_DFL);
    show(SIGSEGV);
    say("read", pread(fd, (void *)8, 5000, 0));
    raise(SIGSEGV);
    printf("%d\n", signal(SIGSEGV, plain_handler) == SIG_IGN);
    raise(SIGSEGV);
    printf("%d\n", caught);
    printf("%d\n", signal(SIGSEGV, SIG_IGN) == plain_handler);
    say("rest", read(fd, buf, 5000));
    fflush(stdout);
    execl(self, self, "shows_signals", path, NULL);
}
/* The state of a program after exec: run by the cases above and below. */
static void c_shows_signals(void) {
    show(SIGSEGV);
    show(SIGBUS);
    char line[200];
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status)) if (!strncmp(line, "SigIgn", 6)) fputs(line, stdout);
    fclose(status);
}
static void c_started_programs(void) {
    int fd = warm(), status;
    use_other_stack();
    struct sigaction act = {.sa_sigaction = recovers, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &act, NULL);
    for (int how = 0; how < 4; how++) {
        pid_t child;
        char *arguments[] = {(char *)self, "shows_signals", (char *)path, NULL};
        if (how == 3) posix_spawn(&child, self, NULL, NULL, arguments, environ);
        else if (!(child = how ? vfork() : fork())) {
            if (how == 2) for (int i = 1; i < 65; i++) signal(i, SIG_DFL);
            execv(self, arguments);
            _exit(9);
        }
        waitpid(child, &status, 0);
        printf("%x\n", status);
        show(SIGSEGV);
        touch("here", (void *)8);
        say("read", pread(fd, (void *)8, 5000, 0));
    }
    pid_t child = fork();
    if (!child) {
        show(SIGSEGV);
        touch("child", (void *)8);
        say("read", pread(fd, (void *)8, 5000, 0));
        int again = warm();
        say("read", pread(again, (void *)8, 5000, 0));
        _exit(0);
    }
    waitpid(child, &status, 0);
    printf("%x\n", status);
}
static void stores(void *at) { *(volatile char *)at = 1; }
static void raises(void *number) { raise((int)(long)number); }
static void stores_with_other_stack(void *at) { use_other_stack(); stores(at); }
static void raises_in_thread(void *number) {
    pthread_t thread;
    pthread_create(&thread, NULL, (void *(*)(void *))raises, number);
    pthread_join(thread, NULL);
}
static void recurses(void *at) { volatile char much[1 << 16]; much[5] = 1; recurses((void *)much); much[6] = *(char *)at; }
static void c_default_deaths(void) {
    struct place place[20];
    int places = bad_places(place), fd = warm();
    for (int i = 0; i < places; i++) {
        faults_in(place[i].name, stores, place[i].at);
        faults_in("other stack", stores_with_other_stack, place[i].at);
    }
    faults_in("raise", raises, (void *)SIGSEGV);
    faults_in("raise", raises, (void *)SIGBUS);
    faults_in("thread", raises_in_thread, (void *)SIGSEGV);
    faults_in("deep", recurses, NULL);
    say("rest", read(fd, buf, 5000));
}
/* More handlers than any real program has. */
#define EACH8(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7)
#define EACH64(X) EACH8(X, 1) EACH8(X, 2) EACH8(X, 3) EACH8(X, 4) EACH8(X, 5) EACH8(X, 6) EACH8(X, 7) EACH8(X, 8)
#define HANDLER(n) static void handler##n(int number) { caught = n; (void)number; }
EACH64(HANDLER)
static void c_many_handlers(void) {
    int fd = warm();
#define NAME(n) handler##n,
    void (*all[])(int) = {EACH64(NAME)};
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 64; i++) {
            void (*before)(int) = signal(SIGSEGV, all[i]);
            raise(SIGSEGV);
            printf("%d %d %ld\n", before == (i || round ? all[(i + 63) % 64] : SIG_DFL), caught, (long)pread(fd, (void *)8, 5000, 0));
        }
}
/* A handler that maps the page and lets the instruction continue. */
static unsigned char *guarded;
static void opens_page(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    caught++;
    if (info->si_addr == guarded) mprotect(guarded, PAGE, PROT_READ | PROT_WRITE);
}
static void c_guarded_pages(void) {
    int fd = warm();
    struct sigaction act = {.sa_sigaction = opens_page, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &act, NULL);
    guarded = pages(1, PROT_NONE);
    say("pread", pread(fd, guarded, 1000, 0));
    *guarded = 5;
    printf("%d %d\n", *guarded, caught);
    say("pread", pread(fd, guarded, 1000, 0));
    printf("%016lx\n", digest_of(guarded, 1000));
    mprotect(guarded, PAGE, PROT_READ);
    say("pread", pread(fd, guarded, 1000, 0));
    *guarded = 6;
    printf("%d %d\n", *guarded, caught);
}
/* Threads with good buffers beside one with a bad buffer. */
static volatile int done;
static void *reads_well(void *unused) {
    long wrong = 0;
    unsigned char *mine = malloc(10000);
    int fd = warm();
    while (!done)
        for (int i = 0; i < 100; i++) {
            lseek(fd, i * 100, SEEK_SET);
            wrong += read(fd, mine, 5000) != 5000 || memcmp(mine, buf + i * 100, 5000);
            wrong += pread(fd, mine, 900, i * 77) != 900 || memcmp(mine, buf + i * 77, 900);
        }
    return (void *)wrong;
}
static void c_threads(void) {
    int fd = warm();
    pthread_t thread[3];
    long wrong = 0;
    for (int i = 0; i < 3; i++) pthread_create(&thread[i], NULL, reads_well, NULL);
    for (int i = 0; i < 3000; i++)
        wrong += pread(fd, (void *)8, 5000, i) != -1 || errno != EFAULT;
    done = 1;
    for (int i = 0; i < 3; i++) {
        void *theirs;
        pthread_join(thread[i], &theirs);
        wrong += (long)theirs;
    }
    printf("wrong %ld\n", wrong);
}

/* ---- system call filters ---- */
static void c_strict_seccomp(void) {
    int fd = warm(), status, ends[2];
    read(fd, buf, 1000);
    for (int how = 0; how < 2; how++) {
        int sink = open(path, O_RDWR);
        pipe(ends);
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            /* A child that is served by now, and one that has read nothing. */
            int mine = how ? warm() : fd;
            if (how) read(mine, buf, 500);
            if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) _exit(3);
            int right = write(ends[1], "hello", 5) == 5 && read(ends[0], buf, 5) == 5;
            right += read(mine, buf, 100) == 100;
            right += write(sink, buf, 3) == 3;
            right += read(sink, buf, 7) == 7;
            right += write(999, buf, 3) == -1 && errno == EBADF;
            syscall(SYS_exit, 10 + right);
        }
        waitpid(child, &status, 0);
        printf("%x %ld\n", status, (long)lseek(sink, 0, SEEK_CUR));
        printf("%ld\n", (long)lseek(fd, 0, SEEK_CUR));
    }
    /* And in this process. */
    int right = read(fd, buf, 500) == 500;
    fflush(stdout);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) _exit(3);
    right += write(ends[1], "hello", 5) == 5 && read(ends[0], buf, 5) == 5;
    right += read(fd, buf, 100) == 100;
    right += write(1, right == 3 ? "right\n" : "wrong\n", 6) == 6;
    syscall(SYS_exit, 10 + right);
}
#ifdef INSTRUCTIONS
/* The same by an instruction of the program, which we do not see. The C library then reads what is not a file. */
static long by_instruction(long number, long a, long b) {
    long answer;
    __asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b) : "rcx", "r11", "memory");
    return answer;
}
static void c_strict_seccomp_by_instruction(void) {
    int status, fd = warm(), ends[2], pair[2];
    read(fd, buf, 1000);
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        pipe(ends), socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
        int second = dup(ends[0]), late = open(path, O_WRONLY);
        if (by_instruction(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) _exit(3);
        int right = write(ends[1], "hello, world", 12) == 12 && read(ends[0], buf, 5) == 5;
        right += read(ends[0], buf, 2) == 2;
        right += read(second, buf, 5) == 5;
        right += write(pair[1], "hello", 5) == 5 && read(pair[0], buf, 9) == 5;
        right += read(late, buf, 5) == -1 && errno == EBADF;
        right += read(999, buf, 5) == -1 && errno == EBADF;
        syscall(SYS_exit, 10 + right);
    }
    waitpid(child, &status, 0);
    printf("%x\n", status);
    printf("%ld\n", (long)read(fd, buf, 1000));
}
#define MORE(X) X(strict_seccomp_by_instruction)
#else
#define MORE(X)
#endif
/* From then on only the program's own calls are allowed: no query about a file, no futex, no signal mask. */
static volatile int told;
static void *looks_on(void *fd) {
    told = -1;
    while (told != 1) {}
    char bytes[100];
    long sum = 0;
    for (int i = 0; i < 10; i++) sum += read((int)(long)fd, bytes, 100);
    told = 2;
    for (;;) {}
    return NULL;
}
static void filter_case(int threads, int forks) {
    static const int allowed[] = {SYS_read, SYS_write, SYS_pread64, SYS_exit, SYS_exit_group, SYS_lseek, SYS_close, SYS_dup, SYS_readv,
        SYS_clone, SYS_wait4, SYS_openat, SYS_fork, SYS_set_robust_list};
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter filter[COUNT + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0 /* the number */)};
    for (int i = 0; i < COUNT; i++)
        filter[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], COUNT - i, 0);
    filter[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    filter[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog rules = {COUNT + 3, filter};
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        int fd = warm(), theirs = warm(), ends[2], sink = open(path, O_RDWR);
        pipe(ends);
        pthread_t thread;
        if (threads) {
            pthread_create(&thread, NULL, looks_on, (void *)(long)theirs);
            while (told != -1) {}
        }
        read(fd, buf, 500);
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) _exit(3);
        long set = threads ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &rules)
                           : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &rules);
        if (set) _exit(4);
        int right = 0;
        if (threads) { told = 1; while (told != 2) {} }
        if (forks) {
            pid_t grandchild = syscall(SYS_fork);
            if (!grandchild) { right = read(fd, buf, 10) == 10; right += write(ends[1], "a", 1); _exit(right); }
            if (syscall(SYS_wait4, grandchild, &status, 0, NULL) != grandchild || status != 0x200) _exit(5);
            read(ends[0], buf, 1);
        }
        right += write(ends[1], "hello", 5) == 5 && read(ends[0], buf, 5) == 5;
        right += read(fd, buf, 100) == 100;
        right += pread(fd, buf, 100, 5) == 100;
        right += lseek(fd, 0, SEEK_CUR) == (forks ? 610 : 600);
        int again = open(path, O_RDONLY), second = dup(again);
        right += read(again, buf, 100) == 100;
        right += pread(second, buf, 100, 5) == 100;
        right += write(sink, buf, 3) == 3;
        struct iovec part = {buf, 50};
        right += readv(second, &part, 1) == 50;
        right += pread(second, (void *)8, 50, 0) == -1;
        right += close(again) == 0;
        _exit(10 + right);
    }
    waitpid(child, &status, 0);
    printf("%d %d %x\n", threads, forks, status);
}
#define COLD_BYTES (256L << 20)
static int cold_fd;
/* Threads are in the middle of reads of uncached bytes when another one forbids nearly all calls, for all of them. */
static volatile int cold_readers;
static void *reads_cold(void *seed) {
    static const long pages = COLD_BYTES / PAGE;
    unsigned state = 1 + (long)seed;
    char bytes[PAGE];
    int fd = cold_fd;
    pread(fd, bytes, 10, 0);
    __atomic_add_fetch(&cold_readers, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        state = state * 1103515245 + 12345;
        pread(fd, bytes, PAGE, (state >> 8) % pages * PAGE);
    }
}
static void c_filter_seccomp_amid_reads(void) {
    enum { THREADS = 3 };
    static const int allowed[] = {SYS_pread64, SYS_exit_group, SYS_write};
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter filter[COUNT + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0 /* the number */)};
    for (int i = 0; i < COUNT; i++)
        filter[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], COUNT - i, 0);
    filter[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    filter[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog rules = {COUNT + 3, filter};
    char cold[4096];
    snprintf(cold, sizeof cold, "%s.cold", path);
    int made = open(cold, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    ftruncate(made, COLD_BYTES);
    close(made);
    for (int round = 0; round < 16; round++) {
        int status;
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            cold_fd = open(cold, O_RDONLY);
            char byte;
            pread(cold_fd, &byte, 1, 0); // a child that has threads becomes no viewer any more
            pthread_t thread;
            for (long i = 0; i < THREADS; i++) pthread_create(&thread, NULL, reads_cold, (void *)(i + round * 100));
            while (cold_readers < THREADS) usleep(100);
            usleep(2000 + round * 137);
            if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) _exit(3);
            if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &rules)) _exit(4);
            for (volatile int i = 0; i < 20000000; i++) {}
            _exit(10);
        }
        waitpid(child, &status, 0);
        printf("%x\n", status);
    }
    unlink(cold);
}
static void c_filter_seccomp(void) {
    for (int i = 0; i < 4; i++) filter_case(i & 1, i >> 1);
}

#define CASES(X) X(bad_buffers) X(partly_bad_buffers) X(bad_buffers_of_cold_files) X(bad_arrays) X(bad_messages) \
    X(bad_environments) X(bad_blocks_and_modes) X(recovering_handler) X(signals_that_are_sent) X(ignored) \
    X(shows_signals) X(started_programs) X(default_deaths) X(many_handlers) X(guarded_pages) X(threads) \
    X(strict_seccomp) X(filter_seccomp) X(filter_seccomp_amid_reads) MORE(X)

int main(int count, char **argument) {
    if (count < 3) return 2;
    self = argument[0], path = argument[2];
#define CASE(name) if (!strcmp(argument[1], #name)) { c_##name(); fflush(stdout); return 0; }
    CASES(CASE)
    return 3;
}
