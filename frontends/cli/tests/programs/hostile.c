/*
 * Hostile: a program that changes descriptors behind the C library's back, by system call instructions of its own, and
 * prints a digest of the bytes that the C library's calls read. With and without the cache it must print the same.
 *
 *   hostile CASE ONE TWO SCRATCH     ONE, TWO: files that do not change; SCRATCH: to be written
 *
 * Compiled three ways: as it is; with -DPLAIN, where the instructions that enter the kernel are in an object that is
 * loaded later (-DLIBRARY), or in a harmless one (-DLIBRARY -DHARMLESS).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* An old file that may be written; an argument names it. */
#ifndef OLD
#define OLD "/dev/null"
#endif

#if !defined(PLAIN) && !defined(HARMLESS)
/* A call whose number is not in the code: it comes in a register, as in any wrapper. */
long own_call(long number, long a, long b, long c, long d);
__asm__(".text\n.type own_call, @function\nown_call:\n.cfi_startproc\n"
        "mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\nmov %r8, %r10\n"
        "syscall\nret\n.cfi_endproc\n.size own_call, . - own_call\n");

/* The descriptor now refers to another file. */
static int own_reopen(int fd, const char *path, int flags) {
    own_call(SYS_close, fd, 0, 0, 0);
    int now = own_call(SYS_openat, AT_FDCWD, (long)path, flags, 0644);
    if (now != fd) { /* a lower number was free */
        own_call(SYS_dup2, now, fd, 0, 0);
        own_call(SYS_close, now, 0, 0, 0);
    }
    return fd;
}
#endif

#ifdef LIBRARY
extern int shared_fd;
extern const char *shared_path;
long seen_first = -1;

#ifdef HARMLESS
__attribute__((constructor)) static void begin(void) {
    long own;
    __asm__ volatile("mov $186, %%eax\nsyscall" : "=a"(own) : : "rcx", "r11", "memory");
    seen_first = own > 0 ? 0 : -1;
}
void meddle(int step) { (void)step; }
#else
/* Runs before dlopen returns, and continues the program's reads. */
__attribute__((constructor)) static void begin(void) {
    unsigned char bytes[100];
    long n = own_call(SYS_read, shared_fd, (long)bytes, sizeof bytes, 0);
    seen_first = n;
    for (long i = 0; i < n; i++) seen_first = seen_first * 31 + bytes[i];
}
void meddle(int step) {
    if (step % 2) own_call(SYS_lseek, shared_fd, 1000 * step, SEEK_SET, 0);
    else own_reopen(shared_fd, shared_path, O_RDONLY);
}
#endif

#else

int shared_fd;
const char *shared_path;
static const char *one, *two, *scratch;
static unsigned char buf[200000];
static uint64_t digest = 14695981039346656037ull;

static void add(ssize_t n) {
    digest = (digest ^ (uint64_t)n) * 1099511628211ull;
    for (ssize_t i = 0; i < n; i++) digest = (digest ^ buf[i]) * 1099511628211ull;
}
static void say(const char *what) { printf("%s %016lx\n", what, digest); }
static int must_open(const char *path, int flags) {
    int fd = open(path, flags);
    if (fd < 0) { perror(path); exit(2); }
    return fd;
}

#ifndef PLAIN
/* Another file under the same number, again and again. */
static void c_reopen(void) {
    int fd = must_open(one, O_RDONLY);
    for (int i = 0; i < 300; i++) {
        add(pread(fd, buf, 5000, 4096 * (i % 16)));
        add(pread(fd, buf, 3000, 4096 * (i % 16) + 100));
        if (i % 3 == 0) own_reopen(fd, i % 2 ? one : two, O_RDONLY);
        if (i % 7 == 0) { add(read(fd, buf, 700)); }
    }
    say("reopen");
    close(fd);
}

/* The offset changes, or the descriptor refers to another description of the same file. */
static void c_offset(void) {
    int fd = must_open(one, O_RDONLY);
    for (int i = 0; i < 200; i++) {
        add(read(fd, buf, 1000));
        if (i % 2) own_call(SYS_lseek, fd, 37 * i, SEEK_SET, 0);
        if (i % 5 == 0) own_call(SYS_read, fd, (long)buf, 100, 0);
        if (i % 11 == 0) own_reopen(fd, one, O_RDONLY);
        add(lseek(fd, 0, SEEK_CUR));
        add(pread(fd, buf, 2000, 10000));
    }
    say("offset");
    close(fd);
}

/* The same file, opened for writing only. */
static void c_writeonly(void) {
    int fd = must_open(scratch, O_RDONLY);
    add(pread(fd, buf, 4000, 0));
    own_reopen(fd, scratch, O_WRONLY);
    add(pread(fd, buf, 4000, 0));
    own_reopen(fd, scratch, O_PATH);
    add(pread(fd, buf, 4000, 0));
    own_call(SYS_close, fd, 0, 0, 0);
    add(pread(fd, buf, 4000, 0));
    say("writeonly");
}

/* A writable descriptor reads like any other. */
static void c_readwrite(void) {
    int fd = must_open(OLD, O_RDWR);
    for (int i = 0; i < 50; i++) add(pread(fd, buf, 3000, 512 * i));
    add(read(fd, buf, 3000));
    say("readwrite");
    close(fd);
}

/* The next read sees writes that the C library did not make. */
static void c_written(void) {
    int fd = must_open(scratch, O_RDONLY);
    int out = own_call(SYS_openat, AT_FDCWD, (long)scratch, O_RDWR, 0);
    for (int i = 0; i < 500; i++) {
        char mark[16];
        snprintf(mark, sizeof mark, "mark %d", i);
        add(pread(fd, buf, 8192, 4096 * (i % 4)));
        own_call(SYS_pwrite64, out, (long)mark, sizeof mark, 4096 * (i % 4) + 8 * (i % 100));
        add(pread(fd, buf, 8192, 4096 * (i % 4)));
        if (i % 100 == 99) { own_call(SYS_ftruncate, out, 20000 + i, 0, 0); add(pread(fd, buf, 65536, 0)); }
    }
    say("written");
    own_call(SYS_close, out, 0, 0, 0);
    close(fd);
}

/* One thread reads while another replaces the file under the descriptor: each read is from one file only. */
static volatile int stop;
static void *exchange(void *arg) {
    int fd = *(int *)arg, to[2] = {must_open(one, O_RDONLY), must_open(two, O_RDONLY)};
    for (int i = 0; !stop; i++) own_call(SYS_dup2, to[i % 2], fd, 0, 0);
    return NULL;
}
static void c_threads(void) {
    static unsigned char first[4096], second[4096];
    int fd = must_open(one, O_RDONLY), other = must_open(two, O_RDONLY);
    pread(fd, first, 4096, 8192);
    pread(other, second, 4096, 8192);
    pthread_t thread;
    pthread_create(&thread, NULL, exchange, &fd);
    for (int i = 0; i < 20000; i++) {
        ssize_t n = pread(fd, buf, 4096, 8192);
        if (n != 4096 || (memcmp(buf, first, 4096) && memcmp(buf, second, 4096))) { printf("mixed at %d\n", i); break; }
    }
    stop = 1;
    pthread_join(thread, NULL);
    say("threads");
}
#else

/* Loads an object whose code enters the kernel. It is found by a path relative to this program, so dlopen got the right
 * caller. */
static void c_load(void) {
    int fd = shared_fd = must_open(one, O_RDONLY);
    shared_path = two;
    add(read(fd, buf, 5000));
    add(pread(fd, buf, 5000, 100));
    void *object = dlopen("libloaded.so", RTLD_NOW);
    if (!object) { printf("%s\n", dlerror()); return; }
    long *first = dlsym(object, "seen_first");
    void (*meddle)(int) = (void (*)(int))dlsym(object, "meddle");
    digest = (digest ^ (uint64_t)*first) * 1099511628211ull;
    for (int step = 0; step < 40; step++) {
        add(read(fd, buf, 3000));
        meddle(step);
        add(read(fd, buf, 1000));
        add(pread(fd, buf, 5000, 4096 * (step % 8)));
        add(pread(fd, buf, 5000, 4096 * (step % 8)));
    }
    int another = must_open(two, O_RDONLY);
    add(read(another, buf, 5000));
    add(pread(another, buf, 5000, 0));
    close(another);
    say("load");
    close(fd);
}
#endif

int main(int argc, char **argv) {
    one = argv[2]; two = argv[3]; scratch = argv[4];
    const char *name = argc > 1 ? argv[1] : "";
#ifdef PLAIN
    if (!strcmp(name, "load")) c_load();
#else
    if (!strcmp(name, "reopen")) c_reopen();
    if (!strcmp(name, "offset")) c_offset();
    if (!strcmp(name, "writeonly")) c_writeonly();
    if (!strcmp(name, "readwrite")) c_readwrite();
    if (!strcmp(name, "written")) c_written();
    if (!strcmp(name, "threads")) c_threads();
#endif
    return 0;
}
#endif
