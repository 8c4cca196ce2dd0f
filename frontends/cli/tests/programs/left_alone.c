/*
 * Left alone: reads of a file, a directory notification, a length that is too large, and a program that starts under a
 * filter. With XOR: an object whose `read` and `pread` change what they bring.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef XOR
static ssize_t changed(unsigned char *to, ssize_t len) {
    /* `quinion` itself, which loads the object too, is to read its files as they are. */
    int is_program = !strcmp(program_invocation_short_name, "left_alone");
    for (ssize_t i = 0; is_program && i < len; i++) to[i] ^= 0x55;
    return len;
}
ssize_t read(int fd, void *to, size_t len) {
    static ssize_t (*next)(int, void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "read");
    return changed(to, next(fd, to, len));
}
ssize_t pread(int fd, void *to, size_t len, off_t at) {
    static ssize_t (*next)(int, void *, size_t, off_t);
    if (!next) next = dlsym(RTLD_NEXT, "pread");
    return changed(to, next(fd, to, len, at));
}
#else
static volatile int signals;
static void count(int number) { signals++; }

static void read_all(const char *path, int by_position) {
    unsigned char bytes[4096];
    uint64_t sum = 0;
    off_t at = 0;
    ssize_t len;
    int fd = open(path, O_RDONLY);
    while ((len = by_position ? pread(fd, bytes, sizeof bytes, at) : read(fd, bytes, sizeof bytes)) > 0) {
        for (ssize_t i = 0; i < len; i++) sum = sum * 31 + bytes[i];
        at += len;
    }
    printf("%lld bytes, %llx\n", (long long)at, (unsigned long long)sum);
    close(fd);
}

static void notified(const char *path, int by_number) {
    char bytes[4096], folder[4096];
    strcpy(folder, path);
    *strrchr(folder, '/') = 0;
    signal(SIGIO, count);
    int watched = open(folder, O_RDONLY | O_DIRECTORY), fd = open(path, O_RDONLY);
    for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, i * 4096);
    long mask = DN_ACCESS | DN_MULTISHOT;
    long error = by_number ? syscall(SYS_fcntl, watched, F_NOTIFY, mask) : fcntl(watched, F_NOTIFY, mask);
    signals = 0;
    for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, i * 4096);
    printf("%ld, %d signals\n", error, signals);
}

static int in_child(const char *path) {
    int status = 9;
    pid_t child = fork();
    if (!child) read_all(path, 0);
    else waitpid(child, &status, 0);
    return child ? status : 0;
}

static void filtered(char **words) {
    struct sock_filter steps[] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, 0},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, atoi(words[0])},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_PROCESS},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
    };
    struct sock_fprog filter = {4, steps};
    extern char **environ;
    int count = 0;
    while (environ[count]) count++;
    /* Its own copy, as Python makes one of its environment. */
    char **copy = calloc(count + 1, sizeof *copy);
    for (int i = 0; i < count; i++) copy[i] = strdup(environ[i]);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) exit(9);
    execve(words[1], words + 1, copy);
    exit(8);
}

int main(int count, char **words) {
    const char *path = words[count - 1];
    if (!strcmp(words[1], "read")) read_all(path, 0);
    else if (!strcmp(words[1], "pread")) read_all(path, 1);
    else if (!strcmp(words[1], "child")) return in_child(path);
    else if (!strcmp(words[1], "notified")) notified(path, 0);
    else if (!strcmp(words[1], "notified_by_number")) notified(path, 1);
    else if (!strcmp(words[1], "filtered")) filtered(words + 2);
    else {
        char bytes[4096];
        int fd = open(path, O_RDONLY);
        for (int i = 0; i < 50; i++) pread(fd, bytes, sizeof bytes, i * 4096);
        long fine = readahead(fd, 0, 4096), wrong = readahead(fd, 0, SIZE_MAX);
        printf("%ld, %ld, %d\n", fine, wrong, wrong < 0 ? errno : 0);
    }
    return 0;
}
#endif
