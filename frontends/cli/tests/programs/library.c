/*
 * Library: an object beside a program. The program loads it with calls bound to the C library itself (deepbind), or it
 * is preloaded, with a wrapper of its own (WRAPS) or a thread of its own (THREADS).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

#ifdef WRAPS
ssize_t read(int fd, void *to, size_t len) {
    static ssize_t (*next)(int, void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "read");
    return next(fd, to, len);
}
#endif

#ifdef THREADS
static void *sleeper(void *unused) { pause(); return unused; }
__attribute__((constructor)) static void start(void) {
    pthread_t t;
    pthread_create(&t, NULL, sleeper, NULL);
}
#endif

/* All bytes of a file, half of them by position. */
uint64_t digest_of(const char *path, long *sum) {
    static unsigned char buf[9000];
    uint64_t digest = 14695981039346656037ull;
    int fd = open(path, O_RDONLY);
    ssize_t n;
    for (int i = 0;; i++) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        n = i % 2 ? read(fd, buf, sizeof buf) : pread(fd, buf, sizeof buf, at);
        if (n <= 0) break;
        if (i % 2 == 0) lseek(fd, n, SEEK_CUR);
        for (ssize_t k = 0; k < n; k++) digest = (digest ^ buf[k]) * 1099511628211ull;
        *sum += n;
    }
    close(fd);
    return digest;
}
int shared_with(int fd) { return dup(fd); }
