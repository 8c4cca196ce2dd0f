/*
 * Patched: a program whose reads do not go through interposed names: through streams, through aio, in a library bound
 * directly to the C library. Each case is one way, and prints a digest of every byte it got. `patched CASE FILE
 * [LIBRARY]`.
 */
#define _GNU_SOURCE
#include <aio.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *path, *library;
static unsigned char buf[1 << 20];
static uint64_t digest = 14695981039346656037ull;

static void add(const void *bytes, ssize_t len) {
    const unsigned char *p = bytes;
    for (ssize_t i = 0; i < len; i++) digest = (digest ^ p[i]) * 1099511628211ull;
}
static void say(const char *what, long value) { printf("%s %ld %016lx\n", what, value, digest); fflush(stdout); }

/* Reads the rest of a stream by one of several calls. */
static long drain(FILE *f, int how) {
    long sum = 0;
    ssize_t n = 1;
    char *line = NULL;
    size_t room = 0;
    int c;
    switch (how % 4) {
    case 0: while ((n = fread(buf, 1, 100000, f)) > 0) add(buf, n), sum += n; break;
    case 1: while ((c = getc(f)) != EOF) *buf = c, add(buf, 1), sum++; break;
    case 2: while ((n = getline(&line, &room, f)) > 0) add(line, n), sum += n; free(line); break;
    case 3: while (fgets((char *)buf, 1000, f)) n = strlen((char *)buf), add(buf, n), sum += n; break;
    }
    return sum;
}
static void c_streams(void) {
    for (int how = 0; how < 4; how++) {
        FILE *f = fopen(path, how % 2 ? "rb" : "re");
        say("opened", drain(f, how));
        fclose(f);
    }
    FILE *f = fopen(path, "r");
    for (int i = 0; i < 200; i++) {
        fseek(f, (i * 7919) % 290000, SEEK_SET);
        ungetc('x', f);
        add(buf, fread(buf, 1, i * 31, f));
        if (i % 7 == 0) fseek(f, -10, SEEK_CUR), add(buf, fread(buf, 1, 5, f));
    }
    say("sought", ftell(f));
    /* The descriptor and the stream alternately. */
    fflush(f);
    say("under it", lseek(fileno(f), 0, SEEK_CUR));
    rewind(f);
    setvbuf(f, NULL, _IONBF, 0);
    add(buf, fread(buf, 1, 5000, f));
    add(buf, read(fileno(f), buf, 777));
    say("by turns", drain(f, 0));
    FILE *mapped = fopen(path, "rm");
    say("mapped", drain(mapped, 0));
    fclose(mapped);
    f = freopen(path, "r", f);
    say("opened again", drain(f, 2));
    fclose(f);
    int fd = open(path, O_RDONLY);
    add(buf, read(fd, buf, 1000));
    f = fdopen(fd, "r");
    add(buf, fread(buf, 1, 3000, f));
    say("given a stream", ftell(f));
    int other = dup(fd);
    say("shared", lseek(other, 0, SEEK_CUR) >= 4000);
    say("rest", drain(f, 1));
    fclose(f);
    f = fopen(path, "r");
    add(buf, fread(buf, 1, 100, f));
    fflush(stdout);
    pid_t child = fork();
    if (!child) { say("child", drain(f, 0)); _exit(0); }
    waitpid(child, NULL, 0);
    fclose(f);
    f = popen("cat", "w");
    fputs("piped\n", f);
    say("closed", pclose(f));
    say("system", system("exit 3"));
}
/* Written through one stream, read through another. */
static void c_written(void) {
    FILE *r = fopen(path, "r");
    add(buf, fread(buf, 1, 10000, r));
    FILE *w = fopen(path, "r+");
    fseek(w, 5000, SEEK_SET);
    for (int i = 0; i < 3000; i++) fputs("written ", w);
    fflush(w);
    fseek(r, 4000, SEEK_SET);
    setvbuf(r, NULL, _IONBF, 0);
    say("after", drain(r, 0));
    fclose(w);
    w = fopen(path, "a");
    fputs("appended", w);
    fclose(w);
    clearerr(r);
    say("more", drain(r, 0));
    w = fopen(path, "w");
    fputs("new", w);
    fclose(w);
    rewind(r);
    say("new", drain(r, 0));
}
/* A stream that read ahead is closed with bytes to write: where they go depends on the descriptor's offset. */
static void c_updated(void) {
    for (int i = 0; i < 4; i++) {
        FILE *f = fopen(path, "r+");
        for (int part = 0; part < 20; part++) add(buf, fread(buf, 1, 5000, f));
        fseek(f, i % 2 ? 0 : -1000, SEEK_CUR);
        fputs("updated", f);
        say("closed", fclose(f));
    }
}
static void c_aio(void) {
    int fd = open(path, O_RDONLY);
    off_t size = lseek(fd, 0, SEEK_END);
    enum { MANY = 16 };
    static unsigned char bytes[MANY][8192];
    struct aiocb blocks[MANY], *list[MANY];
    long sum = 0;
    for (off_t at = 0; at < size; at += MANY * 8192) {
        for (int i = 0; i < MANY; i++) {
            blocks[i] = (struct aiocb){.aio_fildes = fd, .aio_buf = bytes[i], .aio_nbytes = 8192, .aio_offset = at + i * 8192};
            list[i] = &blocks[i];
            blocks[i].aio_lio_opcode = LIO_READ;
            if (at % 3 && aio_read(&blocks[i])) exit(2);
        }
        if (at % 3 == 0 && lio_listio(LIO_WAIT, list, MANY, NULL)) exit(2);
        for (int i = 0; i < MANY; i++) {
            const struct aiocb *one[1] = {&blocks[i]};
            while (aio_error(&blocks[i]) == EINPROGRESS) aio_suspend(one, 1, NULL);
            ssize_t n = aio_return(&blocks[i]);
            add(bytes[i], n);
            sum += n;
        }
    }
    say("aio", sum);
    say("offset", lseek(fd, 0, SEEK_CUR));
}
/* A library whose calls go directly to the C library. */
static void *from_library(const char *name) {
    void *loaded = dlopen(library, RTLD_NOW | RTLD_DEEPBIND);
    if (!loaded) { puts(dlerror()); exit(2); }
    return dlsym(loaded, name);
}
static void c_deepbind(void) {
    uint64_t (*digest_of)(const char *, long *) = from_library("digest_of");
    long sum = 0;
    digest = digest_of(path, &sum);
    say("loaded", sum);
}
/* Such a library shares a descriptor of ours, which no interposed call shows. */
static void c_unseen(void) {
    int (*shared_with)(int) = from_library("shared_with");
    int fd = open(path, O_RDONLY);
    add(buf, read(fd, buf, 1000));
    int other = shared_with(fd);
    for (int i = 0; i < 10; i++) add(buf, read(i % 2 ? fd : other, buf, 700));
    say("shared", lseek(other, 0, SEEK_CUR));
}
/* No writable memory is executable. */
static void c_maps(void) {
    FILE *f = fopen("/proc/self/maps", "r");
    char line[1000];
    long both = 0, code = 0;
    while (fgets(line, sizeof line, f)) {
        char *rights = strchr(line, ' ') + 1;
        both += rights[1] == 'w' && rights[2] == 'x';
        code += rights[1] != 'w' && rights[2] == 'x' && strstr(line, "libc.so.6") != NULL;
    }
    fclose(f);
    say("writable and executable", both);
    say("code of the C library", code > 0);
    f = fopen(path, "r");
    say("read", drain(f, 0));
    fclose(f);
}
static int ends[2];
static FILE *waiting;
static volatile int cleaned;
static void clean(void *unused) { (void)unused; cleaned++; }
static void *blocked(void *how) {
    char byte;
    pthread_cleanup_push(clean, NULL);
    if (how) { for (;;) fgetc(waiting); }
    for (;;) if (read(ends[0], &byte, 1) != 1) break;
    pthread_cleanup_pop(0);
    return NULL;
}
static void c_cancelled(void) {
    if (pipe(ends)) exit(2);
    for (int i = 0; i < 20; i++) {
        pthread_t t;
        void *result;
        waiting = fdopen(dup(ends[0]), "r"); /* a new stream each time: a cancelled thread may keep its lock */
        pthread_create(&t, NULL, blocked, i % 2 ? waiting : NULL);
        if (i % 3) usleep(2000); /* so that the thread mostly waits by then; it must end in any case */
        pthread_cancel(t);
        pthread_join(t, &result);
        say("cancelled", result == PTHREAD_CANCELED);
    }
    /* Its handler runs if it was pushed by then. */
    say("cleaned", cleaned > 0);
    FILE *f = fopen(path, "r");
    say("read", drain(f, 0));
    _exit(0); /* without flushing the streams above */
}

/* Without clone3, which containers forbid: an older call makes the children then. */
static void c_filtered(void) {
    if (!getenv("FILTERED")) {
        struct sock_filter steps[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 435, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
        /* A program that installs a filter is not given the object at its next exec. It asks for it again here, since
           this filter permits all of the object's system calls. */
        const char *preload = getenv("LD_PRELOAD");
        if (preload) preload = strdup(preload);
        setenv("FILTERED", "1", 1);
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) exit(2);
        if (preload) setenv("LD_PRELOAD", preload, 1);
        /* And it says, as a run under that filter would, that the filter is known. */
        char filters[20];
        sprintf(filters, "%d", getenv("QUINION_FILTERS") ? atoi(getenv("QUINION_FILTERS")) + 1 : 0);
        setenv("QUINION_FILTERS", filters, 1);
        execl("/proc/self/exe", "patched", "filtered", path, library, NULL);
        exit(2);
    }
    for (int i = 0; i < 3; i++) {
        char *words[] = {"sh", "-c", "exit 4", NULL};
        pid_t child;
        int status = 0;
        say("spawned", posix_spawn(&child, "/bin/sh", NULL, NULL, words, environ));
        waitpid(child, &status, 0);
        say("ended", WEXITSTATUS(status));
        say("system", system("exit 3"));
        FILE *f = fopen(path, "r");
        say("read", drain(f, i));
        fclose(f);
    }
}

int main(int argc, char **argv) {
    struct { const char *name; void (*run)(void); } cases[] = {
        {"streams", c_streams}, {"written", c_written}, {"updated", c_updated}, {"aio", c_aio}, {"deepbind", c_deepbind}, {"unseen", c_unseen},
        {"maps", c_maps}, {"cancelled", c_cancelled}, {"filtered", c_filtered},
    };
    if (argc < 3) return 2;
    path = argv[2];
    library = argv[3];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, argv[1])) { cases[i].run(); return 0; }
    return 2;
}
