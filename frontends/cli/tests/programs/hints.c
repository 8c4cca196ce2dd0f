/*
 * Hints: a program that announces which bytes of a file it will need, or needs no longer, and prints the result of each
 * call. `hints CASE FILE`; after its case it prints "done" and keeps the file open until its input ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif

enum { PAGE = 4096, PIECE = 64 * 1024 };

static int fd;
static uint64_t digest = 14695981039346656037ull;
static unsigned char buf[PIECE];

static void say(const char *what, long value) { printf("%s %ld %016lx\n", what, value, digest); fflush(stdout); }

/* Reads to the end; with flags by preadv2, if the kernel takes them. */
static long drain(int flags) {
    long sum = 0;
    for (;;) {
        struct iovec part = {buf, sizeof buf};
        ssize_t n = flags ? preadv2(fd, &part, 1, sum, flags) : pread(fd, buf, sizeof buf, sum);
        if (n <= 0) return n < 0 ? -errno : sum;
        for (ssize_t i = 0; i < n; i++) digest = (digest ^ buf[i]) * 1099511628211ull;
        sum += n;
    }
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const char *name = argv[1];
    fd = open(argv[2], O_RDONLY);
    if (fd < 0) return 3;
    /* The pages that lie fully inside the range: 100 from page 50 on. */
    const off_t at = 50 * PAGE, len = 100 * PAGE;
    if (!strcmp(name, "readahead")) {
        say(name, readahead(fd, at, len));
    } else if (!strcmp(name, "willneed")) {
        say(name, posix_fadvise(fd, at, len, POSIX_FADV_WILLNEED));
    } else if (!strcmp(name, "willneed-all")) {
        say(name, posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED));
    } else if (!strcmp(name, "read")) {
        say(name, drain(0));
    } else if (!strcmp(name, "noreuse")) {
        say("advice", posix_fadvise(fd, 0, 0, POSIX_FADV_NOREUSE));
        say(name, drain(0));
    } else if (!strcmp(name, "dontneed")) {
        say("read", drain(0));
        say(name, posix_fadvise(fd, at, len, POSIX_FADV_DONTNEED));
    } else if (!strcmp(name, "dontneed-all")) {
        say("read", drain(0));
        say(name, posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
    } else if (!strcmp(name, "dontcache")) {
        say(name, drain(RWF_DONTCACHE));
    } else {
        return 4;
    }
    puts("done");
    fflush(stdout);
    while (read(0, buf, 1) > 0) {}
    return 0;
}
