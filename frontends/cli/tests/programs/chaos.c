/*
 * Chaos: random file operations on a few files, from a seed. `chaos.rs` starts it with and without the cache, and
 * stops, kills and restarts the cache's owner meanwhile.
 *
 *   chaos twin DIR SEED OPERATIONS BREAK
 *       Four actors (two threads, two processes), each with files of its own.
 *       An actor's operations and results follow from the seed alone: each call with
 *       its result, error, offset and a hash of its bytes is a line of DIR/log.N.
 *       Two runs by one seed write the same lines.
 *   chaos shared PHASE DIR CONTROL SEED ROLE MILLISECONDS BREAK
 *       Many processes on the same files, at once. The seed decides only what
 *       each tries; the results are checked here:
 *         locked     a mutex and a copy of each file in CONTROL: each read is compared with the copy
 *         versions   blocks that carry file, number and version; a read may not show a version older than
 *                    the last that was complete before it began, nor one that was not begun when it ended
 *         renames    files that are complete when they get their name: each open shows one whole file
 *         appends    records by O_APPEND: each writer's in order, none lost, none twice
 *         records    one descriptor: threads write() while others pread() and fork: none lost or misplaced
 *         consumed   one descriptor: threads and children read() records: each exactly once
 *   chaos child FD OFFSET LENGTH
 *       Started by the others by exec: reads at OFFSET of FD (-1: where it stands) to its standard output.
 *
 * BREAK makes the Nth change a lie (0: none): it is recorded and not made, and the checks must find it. The last line
 * is `ok ...`, or `wrong ...` after the last operations.
 *
 * Words of 8 bytes are written and read whole: they are aligned, and the kernel and the cache copy at least that much
 * at once.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 65536, PATH = 512 };

static const char *self;
static _Atomic long changes;
static long break_at;

/* Whether this change is the one that is only recorded. */
static int is_lie(void) { return atomic_fetch_add(&changes, 1) + 1 == break_at; }

/* ---- numbers ------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
static uint64_t next(uint64_t *state) { return mix((*state)++ * 0x2545f4914f6cdd1dull); }
static uint64_t below(uint64_t *state, uint64_t bound) { return next(state) % bound; }

static uint64_t hash(const void *bytes, ssize_t n) {
    uint64_t sum = 14695981039346656037ull;
    for (ssize_t i = 0; i < n; i++) sum = (sum ^ ((const unsigned char *)bytes)[i]) * 1099511628211ull;
    return sum;
}
static void pattern(void *bytes, size_t n, uint64_t seed) {
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = mix(seed + i);
        memcpy((char *)bytes + i, &word, n - i < 8 ? n - i : 8);
    }
}
static long milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
static void die(const char *what) {
    printf("broken %s: %s\n", what, strerror(errno));
    fflush(stdout);
    _exit(3);
}

/* ---- ways to read and to write ------------------------------------------------------------------------------- */

/* A reader or writer, with buffers and files of its own, so that no two share anything. */
struct hand {
    uint64_t random;
    int pipe[2];
    int aside;            /* a file without a name */
    char *shared;         /* memory in which a child returns bytes */
    char path[PATH];
};
static void make_hand(struct hand *hand, uint64_t seed, const char *dir) {
    hand->random = seed;
    if (pipe2(hand->pipe, O_CLOEXEC)) die("pipe");
    hand->aside = open(dir, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (hand->aside < 0) die("tmpfile");
    hand->shared = mmap(NULL, CHUNK + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (hand->shared == MAP_FAILED) die("mmap");
}

static ssize_t result(ssize_t n) { return n < 0 ? -errno : n; }
static ssize_t from_pipe(struct hand *hand, void *buf, ssize_t n) {
    if (n < 0) return -errno;
    for (ssize_t at = 0; at < n;) {
        ssize_t some = read(hand->pipe[0], (char *)buf + at, n - at);
        if (some <= 0) die("pipe read");
        at += some;
    }
    return n;
}
static void in_parts(struct iovec parts[3], void *buf, size_t len) {
    parts[0] = (struct iovec){buf, len / 3};
    parts[1] = (struct iovec){(char *)buf + len / 3, 0};
    parts[2] = (struct iovec){(char *)buf + len / 3, len - len / 3};
}
/* Opens the file again, with a new description. */
static int again(struct hand *hand, int fd, int flags) {
    snprintf(hand->path, PATH, "/proc/self/fd/%d", fd);
    return open(hand->path, flags | O_CLOEXEC);
}
static int passed(int fd) {
    int ends[2], got = -1;
    if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends)) return -1;
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(ends[0], &message, 0) == 1 && recvmsg(ends[1], &message, MSG_CMSG_CLOEXEC) == 1)
        memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof got);
    close(ends[0]), close(ends[1]);
    return got;
}

extern char **environ;
/* Another program reads at `off` of fd, or at its current offset. */
static ssize_t by_program(int fd, void *buf, size_t len, off_t off) {
    char words[3][24];
    enum { GIVEN = 600 };
    snprintf(words[0], 24, "%d", GIVEN), snprintf(words[1], 24, "%lld", (long long)off), snprintf(words[2], 24, "%zu", len);
    char *args[] = {(char *)self, "child", words[0], words[1], words[2], NULL};
    int ends[2], status;
    if (pipe2(ends, O_CLOEXEC)) die("pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, GIVEN);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    pid_t child;
    int error = posix_spawn(&child, self, &actions, NULL, args, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error) { close(ends[0]); return -error; }
    int32_t got = 0;
    char *to = (char *)&got;
    size_t at = 0, want = sizeof got;
    for (ssize_t n; at < want && (n = read(ends[0], to + at, want - at)) > 0;) at += n;
    if (at == want) for (at = 0; got > 0 && at < (size_t)got;) {
        ssize_t n = read(ends[0], (char *)buf + at, got - at);
        if (n <= 0) break;
        at += n;
    }
    close(ends[0]);
    if (waitpid(child, &status, 0) != child || status) { printf("broken child: status %x\n", status); return -ECHILD; }
    return got;
}
static int child_main(char **words) {
    int fd = atoi(words[0]);
    long long off = atoll(words[1]);
    size_t len = atol(words[2]);
    char *buf = malloc(len + 1);
    ssize_t n = off < 0 ? read(fd, buf, len) : pread(fd, buf, len, off);
    int32_t got = result(n);
    if (write(1, &got, sizeof got) != sizeof got) return 4;
    for (ssize_t at = 0; at < n;) {
        ssize_t some = write(1, buf + at, n - at);
        if (some <= 0) return 5;
        at += some;
    }
    return 0;
}
/* A forked child reads, or writes, by the inherited descriptor. */
static ssize_t by_child(struct hand *hand, int fd, void *buf, size_t len, off_t off, int writes) {
    volatile ssize_t *got = (ssize_t *)(hand->shared + CHUNK);
    *got = -ECANCELED;
    if (writes) memcpy(hand->shared, buf, len);
    pid_t parent = getpid(), child = fork();
    if (child < 0) return -errno;
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(0);
        if (writes) *got = result(off < 0 ? write(fd, hand->shared, len) : pwrite(fd, hand->shared, len, off));
        else *got = result(off < 0 ? read(fd, hand->shared, len) : pread(fd, hand->shared, len, off));
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status) return -ECHILD;
    if (!writes && *got > 0) memcpy(buf, hand->shared, *got);
    return *got;
}

enum { READS = 18, RARE_READS = 20, WRITES = 11 };

/* Reads up to `len` (at most CHUNK) bytes at `off`; returns how many, or -errno. May change the descriptor's offset. */
static ssize_t read_by(struct hand *hand, int way, int fd, void *buf, size_t len, off_t off) {
    struct iovec parts[3];
    struct stat about;
    ssize_t n;
    int other;
    in_parts(parts, buf, len);
    switch (way) {
    case 0: return result(pread(fd, buf, len, off));
    case 1: return result(preadv(fd, parts, 3, off));
    case 2: return lseek(fd, off, SEEK_SET) < 0 ? -errno : result(read(fd, buf, len));
    case 3: return lseek(fd, off, SEEK_SET) < 0 ? -errno : result(readv(fd, parts, 3));
    case 4:
        if ((other = again(hand, fd, O_RDONLY)) < 0) return -errno;
        n = result(pread(other, buf, len, off)), close(other);
        return n;
    case 5: case 6: {
        if (fstat(fd, &about)) return -errno;
        if (off >= about.st_size) return 0;
        if ((off_t)len > about.st_size - off) len = about.st_size - off;
        off_t from = off & ~4095ll;
        char *map = mmap(NULL, off - from + len, PROT_READ, way == 5 ? MAP_SHARED : MAP_PRIVATE, fd, from);
        if (map == MAP_FAILED) return -errno;
        memcpy(buf, map + (off - from), len);
        munmap(map, off - from + len);
        return len;
    }
    case 7: { off_t at = off; return from_pipe(hand, buf, sendfile(hand->pipe[1], fd, &at, len > 32768 ? 32768 : len)); }
    case 8: { off_t at = off; return from_pipe(hand, buf, splice(fd, &at, hand->pipe[1], NULL, len > 32768 ? 32768 : len, 0)); }
    case 9: {
        off_t at = off, to = 0;
        if ((n = copy_file_range(fd, &at, hand->aside, &to, len, 0)) < 0) return -errno;
        return result(pread(hand->aside, buf, n, 0));
    }
    case 10: {
        snprintf(hand->path, PATH, "/proc/self/fd/%d", fd);
        FILE *stream = fopen(hand->path, "re");
        if (!stream) return -errno;
        if (fseeko(stream, off, SEEK_SET)) { fclose(stream); return -EINVAL; }
        n = fread(buf, 1, len, stream);
        fclose(stream);
        return n;
    }
    case 11:
        if ((other = fcntl(fd, F_DUPFD_CLOEXEC, 3)) < 0) return -errno;
        n = result(pread(other, buf, len, off)), close(other);
        return n;
    case 12: return result(preadv2(fd, parts, 3, off, 0));
    case 13: return result(syscall(SYS_pread64, fd, buf, len, off));
    case 14: {
        /* A direct read bypasses the page cache, after write-back. */
        static __thread char *page;
        if (!page && posix_memalign((void **)&page, 4096, CHUNK + 8192)) return -ENOMEM;
        if ((other = again(hand, fd, O_RDONLY | O_DIRECT)) < 0) return -errno;
        off_t from = off & ~4095ll;
        n = result(pread(other, page, (off - from + len + 4095) & ~4095ull, from)), close(other);
        if (n < 0) return n;
        n = n > off - from ? n - (off - from) : 0;
        if ((size_t)n > len) n = len;
        memcpy(buf, page + (off - from), n);
        return n;
    }
    case 15: return lseek(fd, off, SEEK_SET) < 0 ? -errno : result(preadv2(fd, parts, 3, -1, 0));
    case 16:
        if ((other = passed(fd)) < 0) return -EIO;
        n = result(pread(other, buf, len, off)), close(other);
        return n;
    case 17: {
        off_t at = lseek(fd, 0, SEEK_CUR);
        if (at < 0) return -errno;
        n = lseek(fd, off, SEEK_SET) < 0 ? -errno : result(read(fd, buf, len));
        lseek(fd, at, SEEK_SET);
        return n;
    }
    case 18: return by_child(hand, fd, buf, len, off, 0);
    default: return by_program(fd, buf, len, off);
    }
}
static int any_read(uint64_t *random) {
    return below(random, 100) ? (int)below(random, below(random, 8) ? 4 : READS) : READS + (int)below(random, 2);
}

static ssize_t write_by(struct hand *hand, int way, int fd, void *buf, size_t len, off_t off) {
    struct iovec parts[3];
    struct stat about;
    ssize_t n;
    int other;
    in_parts(parts, buf, len);
    switch (way) {
    case 0: return result(pwrite(fd, buf, len, off));
    case 1: return result(pwritev(fd, parts, 3, off));
    case 2: return lseek(fd, off, SEEK_SET) < 0 ? -errno : result(write(fd, buf, len));
    case 3: return lseek(fd, off, SEEK_SET) < 0 ? -errno : result(writev(fd, parts, 3));
    case 4: {
        if (fstat(fd, &about)) return -errno;
        if (off + (off_t)len > about.st_size) return result(pwrite(fd, buf, len, off));
        off_t from = off & ~4095ll;
        char *map = mmap(NULL, off - from + len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, from);
        if (map == MAP_FAILED) return -errno;
        memcpy(map + (off - from), buf, len);
        munmap(map, off - from + len);
        return len;
    }
    case 5: {
        off_t at = off;
        if (len > 32768) len = 32768;
        if (write(hand->pipe[1], buf, len) != (ssize_t)len) die("pipe write");
        n = result(splice(hand->pipe[0], NULL, fd, &at, len, 0));
        char rest[4096];
        for (size_t left = n < 0 ? len : len - n; left;) {
            ssize_t some = read(hand->pipe[0], rest, left < sizeof rest ? left : sizeof rest);
            if (some <= 0) die("pipe drain");
            left -= some;
        }
        return n;
    }
    case 6: case 7: {
        off_t from = 0, at = off;
        if (pwrite(hand->aside, buf, len, 0) != (ssize_t)len) die("write aside");
        if (way == 7) return result(copy_file_range(hand->aside, &from, fd, &at, len, 0));
        return lseek(fd, off, SEEK_SET) < 0 ? -errno : result(sendfile(fd, hand->aside, &from, len));
    }
    case 8: {
        snprintf(hand->path, PATH, "/proc/self/fd/%d", fd);
        FILE *stream = fopen(hand->path, "r+e");
        if (!stream) return -errno;
        if (fseeko(stream, off, SEEK_SET)) { fclose(stream); return -EINVAL; }
        n = fwrite(buf, 1, len, stream);
        return fclose(stream) ? -errno : n;
    }
    case 9:
        if ((other = again(hand, fd, O_RDWR)) < 0) return -errno;
        n = result(pwrite(other, buf, len, off)), close(other);
        return n;
    default: return by_child(hand, fd, buf, len, off, 1);
    }
}
static int any_write(uint64_t *random) { return below(random, 40) ? (int)below(random, WRITES - 1) : WRITES - 1; }

/* ---- twin ---------------------------------------------------------------------------------------------------- */

enum { ACTORS = 4, FILES = 4, SLOTS = 6, LOG_BYTES = 64 << 20, LARGE = (4 << 20) + (512 << 10), SMALL = 300000 };

struct actor {
    struct hand hand;
    char dir[PATH / 2];
    int number, operations;
    int fd[SLOTS];
    char *map; int map_fd; size_t map_len; int map_writes;
    _Atomic size_t *log_at; char *log;
    char *buf;
    long longest; char longest_what[16];
};

static void note(struct actor *actor, const char *format, ...) {
    size_t at = *actor->log_at;
    if (at > LOG_BYTES - 8192) return;
    va_list list;
    va_start(list, format);
    at += vsnprintf(actor->log + at, 1024, format, list);
    va_end(list);
    *actor->log_at = at;
}
static const char *name_of(struct actor *actor, int file, char *to) {
    snprintf(to, PATH, "%s/f%d", actor->dir, file);
    return to;
}
/* A line for a call that gave `n` bytes, or -errno. */
static void note_bytes(struct actor *actor, int op, const char *what, int slot, long a, long b, ssize_t n) {
    note(actor, "%d %s %d %ld %ld = %zd %016lx\n", op, what, slot, a, b, n, n > 0 ? hash(actor->buf, n) : 0);
}

static int any_flags(uint64_t *random) {
    static const int access[] = {O_RDONLY, O_RDONLY, O_RDONLY, O_RDWR, O_RDWR, O_WRONLY};
    static const int more[] = {O_APPEND, O_CLOEXEC, O_CREAT, O_CREAT | O_EXCL, O_CREAT | O_TRUNC, O_TRUNC, O_NOATIME, O_SYNC,
        O_DSYNC, O_NONBLOCK, O_NOFOLLOW, O_DIRECTORY, O_PATH, O_NOCTTY, O_LARGEFILE, O_ASYNC};
    int flags = access[below(random, 6)];
    if (!below(random, 60)) return flags == O_RDONLY ? O_DIRECT : flags;
    if (!below(random, 3)) flags |= more[below(random, 16)];
    if (!below(random, 6)) flags |= more[below(random, 16)];
    return flags | (below(random, 3) ? O_CREAT : 0);
}
static int open_any(struct actor *actor, const char *path, int flags) {
    switch (below(&actor->hand.random, 3)) {
    case 0: return open(path, flags, 0644);
    case 1: return openat(AT_FDCWD, path, flags, 0644);
    default: return open64(path, flags, 0644);
    }
}
static void drop(struct actor *actor, int slot) {
    if (actor->fd[slot] >= 0) close(actor->fd[slot]);
    actor->fd[slot] = -1;
}
static void drop_map(struct actor *actor) {
    if (!actor->map) return;
    munmap(actor->map, actor->map_len), close(actor->map_fd), actor->map = NULL;
}

/*
 * lseek by SEEK_DATA or SEEK_HOLE: its error, or whether it kept its contract. The position itself is not compared: a
 * store through a mapping allocates blocks for a whole folio of the kernel's page cache, whose size depends on earlier
 * reads, so two runs of the same program without a cache differ as well. The contract: the result is not before `off`
 * nor after the end, it is the offset afterwards, and the bytes that SEEK_DATA skipped are zeros.
 */
static ssize_t sought(int fd, off_t off, int what, char *buf) {
    struct stat about;
    off_t at = lseek(fd, off, what), over = off;
    if (at < 0) return -errno;
    int kept = !fstat(fd, &about) && at >= off && at <= about.st_size && lseek(fd, 0, SEEK_CUR) == at;
    while (what == SEEK_DATA && kept && over < at) {
        ssize_t n = pread(fd, buf, at - over < CHUNK ? at - over : CHUNK, over);
        if (n < 0) break; /* it may be open for writing only */
        for (ssize_t i = 0; i < n; i++) kept &= !buf[i];
        kept &= n > 0;
        over += n;
    }
    lseek(fd, off, SEEK_SET);
    return kept;
}

static void one_operation(struct actor *actor, int op, int writes_percent) {
    struct hand *hand = &actor->hand;
    uint64_t *random = &hand->random;
    int slot = below(random, SLOTS), to = below(random, SLOTS), file = below(random, FILES), fd = actor->fd[slot], status;
    if (to == slot) to = (slot + 1) % SLOTS; /* else the slot in use would be dropped */
    char path[PATH], other[PATH];
    struct stat about;
    struct iovec parts[3];
    char *buf = actor->buf;
    ssize_t n;
    off_t off = below(random, file ? SMALL : LARGE), at;
    size_t len = below(random, 4) ? below(random, 9000) : below(random, CHUNK + 1);
    if (fd < 0) {
        int flags = (int)below(random, 100) < writes_percent ? any_flags(random) : O_RDONLY;
        fd = actor->fd[slot] = open_any(actor, name_of(actor, file, path), flags);
        note(actor, "%d open f%d %o = %d\n", op, file, flags, fd < 0 ? -errno : 0);
        return;
    }
    if ((int)below(random, 100) >= writes_percent) {
        int way = below(random, 20);
        if (way < 8) {
            int how = any_read(random);
            n = read_by(hand, how, fd, buf, len, off);
            note_bytes(actor, op, "read_by", slot, how, off, n);
            return;
        }
        in_parts(parts, buf, len);
        switch (way) {
        case 8: case 9: case 10: n = result(read(fd, buf, len)); note_bytes(actor, op, "read", slot, len, 0, n); return;
        case 11: n = result(readv(fd, parts, 3)); note_bytes(actor, op, "readv", slot, len, 0, n); return;
        case 12: n = result(lseek(fd, 0, SEEK_CUR)); note(actor, "%d tell %d = %zd\n", op, slot, n); return;
        case 13: n = result(lseek(fd, off, SEEK_SET)); note(actor, "%d seek %d %ld = %zd\n", op, slot, (long)off, n); return;
        case 14: n = result(lseek(fd, (off_t)below(random, 4000) - 2000, SEEK_CUR)); note(actor, "%d move %d = %zd\n", op, slot, n); return;
        case 15: n = result(lseek(fd, -(off_t)below(random, 100000), SEEK_END)); note(actor, "%d end %d = %zd\n", op, slot, n); return;
        case 16: {
            int what = below(random, 2) ? SEEK_DATA : SEEK_HOLE;
            n = sought(fd, off, what, buf);
            note(actor, "%d %s %d %ld = %zd\n", op, what == SEEK_DATA ? "data" : "hole", slot, (long)off, n);
            return;
        }
        case 17:
            n = result(fstat(fd, &about));
            note(actor, "%d fstat %d = %zd %ld %ld\n", op, slot, n, n ? 0 : (long)about.st_size, n ? 0 : (long)about.st_nlink);
            return;
        case 18:
            n = result(posix_fadvise(fd, off, len, below(random, 6)));
            note(actor, "%d fadvise %d = %zd\n", op, slot, n);
            return;
        default: drop(actor, slot); note(actor, "%d close %d\n", op, slot); return;
        }
    }
    pattern(buf, len, (uint64_t)op * 1000003 + actor->number);
    in_parts(parts, buf, len);
    switch (below(random, 44)) {
    case 0: case 1: case 2: case 3: case 4: case 5: {
        int how = any_write(random);
        n = is_lie() ? (ssize_t)len : write_by(hand, how, fd, buf, len, off);
        note(actor, "%d write_by %d %d %ld %zu = %zd\n", op, slot, how, (long)off, len, n);
        return;
    }
    case 6: case 7: n = result(write(fd, buf, len)); note(actor, "%d write %d %zu = %zd\n", op, slot, len, n); return;
    case 8: n = result(writev(fd, parts, 3)); note(actor, "%d writev %d %zu = %zd\n", op, slot, len, n); return;
    case 9:
        drop(actor, to);
        actor->fd[to] = dup(fd);
        note(actor, "%d dup %d %d = %d\n", op, slot, to, actor->fd[to] < 0 ? -errno : 0);
        return;
    case 10:
        if (actor->fd[to] < 0) { n = result(dup2(fd, fd)); note(actor, "%d dup2 self = %d\n", op, n == fd); return; }
        n = result(below(random, 2) ? dup2(fd, actor->fd[to]) : dup3(fd, actor->fd[to], O_CLOEXEC));
        note(actor, "%d dup2 %d %d = %d\n", op, slot, to, n == actor->fd[to]);
        return;
    case 11:
        drop(actor, to);
        actor->fd[to] = fcntl(fd, below(random, 2) ? F_DUPFD : F_DUPFD_CLOEXEC, 10);
        note(actor, "%d fcntl dup %d %d = %d\n", op, slot, to, actor->fd[to] < 0 ? -errno : 0);
        return;
    case 12: n = result(ftruncate(fd, off)); note(actor, "%d ftruncate %d %ld = %zd\n", op, slot, (long)off, n); return;
    case 13: n = result(truncate(name_of(actor, file, path), off)); note(actor, "%d truncate f%d %ld = %zd\n", op, file, (long)off, n); return;
    case 14:
        n = result(rename(name_of(actor, file, path), name_of(actor, below(random, FILES), other)));
        note(actor, "%d rename f%d = %zd\n", op, file, n);
        return;
    case 15:
        n = result(unlink(name_of(actor, file, path)));
        note(actor, "%d unlink f%d = %zd\n", op, file, n);
        if (!below(random, 3)) return;
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
        for (int i = below(random, 5); fd >= 0 && i > 0; i--) n = write(fd, buf, len);
        if (fd >= 0) close(fd);
        return;
    case 16: n = result(stat(name_of(actor, file, path), &about)); note(actor, "%d stat f%d = %zd %ld\n", op, file, n, n ? 0 : (long)about.st_size); return;
    case 17: n = result(fcntl(fd, F_GETFL)); note(actor, "%d getfl %d = %zo\n", op, slot, n); return;
    case 18: {
        static const int some[] = {0, O_APPEND, O_NONBLOCK, O_APPEND | O_NONBLOCK, O_NOATIME};
        int flags = some[below(random, 5)];
        n = result(fcntl(fd, F_SETFL, flags));
        note(actor, "%d setfl %d %o = %zd\n", op, slot, flags, n);
        return;
    }
    case 19: case 20: {
        static const int kinds[] = {F_RDLCK, F_WRLCK, F_UNLCK};
        struct flock lock = {.l_type = kinds[below(random, 3)], .l_whence = SEEK_SET, .l_start = off, .l_len = len};
        n = result(fcntl(fd, F_SETLK, &lock));
        struct flock asked = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0};
        ssize_t seen = result(fcntl(fd, F_GETLK, &asked));
        note(actor, "%d lock %d %d = %zd %zd %d\n", op, slot, lock.l_type, n, seen, seen ? 0 : asked.l_type);
        return;
    }
    case 21: {
        /* Released at once: a child of the other thread may have the description meanwhile. */
        struct flock lock = {.l_type = below(random, 2) ? F_RDLCK : F_WRLCK, .l_whence = SEEK_SET, .l_start = off};
        n = result(below(random, 2) ? fcntl(fd, F_OFD_SETLK, &lock) : flock(fd, (lock.l_type == F_RDLCK ? LOCK_SH : LOCK_EX) | LOCK_NB));
        lock.l_type = F_UNLCK;
        fcntl(fd, F_OFD_SETLK, &lock), flock(fd, LOCK_UN);
        note(actor, "%d whole lock %d = %zd\n", op, slot, n);
        return;
    }
    case 22: case 23: {
        drop_map(actor);
        if (fstat(fd, &about) || !about.st_size || (actor->map_fd = again(hand, fd, O_PATH)) < 0) return;
        actor->map_len = about.st_size, actor->map_writes = below(random, 2);
        int shared = below(random, 3) || actor->map_writes;
        int mode = PROT_READ | (actor->map_writes ? PROT_WRITE : 0);
        actor->map = mmap(NULL, actor->map_len, mode, shared ? MAP_SHARED : MAP_PRIVATE, fd, 0);
        note(actor, "%d map %d %d = %d\n", op, slot, mode, actor->map == MAP_FAILED ? -errno : 0);
        if (actor->map == MAP_FAILED) { actor->map = NULL; close(actor->map_fd); return; }
        if (below(random, 2)) drop(actor, slot);
        return;
    }
    case 24: case 25: case 26: case 27: {
        if (!actor->map || fstat(actor->map_fd, &about)) return;
        size_t end = (size_t)about.st_size < actor->map_len ? (size_t)about.st_size : actor->map_len;
        if (end < 16) return;
        size_t from = off % end;
        if (len > end - from) len = end - from;
        if (actor->map_writes) { if (!is_lie()) memcpy(actor->map + from, buf, len); if (!below(random, 4)) msync(actor->map, end, MS_SYNC); }
        memcpy(buf, actor->map + from, len);
        note_bytes(actor, op, "mapped", 0, from, len, len);
        return;
    }
    case 28: drop_map(actor); note(actor, "%d unmap\n", op); return;
    case 29: n = from_pipe(hand, buf, sendfile(hand->pipe[1], fd, NULL, len > 32768 ? 32768 : len)); note_bytes(actor, op, "sendfile", slot, len, 0, n); return;
    case 30: n = from_pipe(hand, buf, splice(fd, NULL, hand->pipe[1], NULL, len > 32768 ? 32768 : len, 0)); note_bytes(actor, op, "splice", slot, len, 0, n); return;
    case 31:
        n = actor->fd[to] < 0 ? -1 : result(copy_file_range(fd, NULL, actor->fd[to], NULL, len, 0));
        note(actor, "%d copy %d %d = %zd\n", op, slot, to, n);
        return;
    case 32:
        n = actor->fd[to] < 0 ? -1 : result(sendfile(actor->fd[to], fd, NULL, len));
        note(actor, "%d sendfile %d %d = %zd\n", op, slot, to, n);
        return;
    case 33: n = result(below(random, 2) ? fsync(fd) : fdatasync(fd)); note(actor, "%d sync %d = %zd\n", op, slot, n); return;
    case 34:
        n = result(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off, len + 1));
        note(actor, "%d punch %d %ld = %zd\n", op, slot, (long)off, n);
        return;
    case 35: case 36: {
        static const char *modes[] = {"r", "r", "r", "r+", "a+", "w+"};
        const char *mode = modes[below(random, 6)];
        FILE *stream = fopen(name_of(actor, file, path), mode);
        if (!stream) { note(actor, "%d fopen f%d %s = %d\n", op, file, mode, -errno); return; }
        if (below(random, 2)) setvbuf(stream, NULL, _IONBF, 0);
        fseeko(stream, off, SEEK_SET);
        n = fread(buf, 1, len, stream);
        note_bytes(actor, op, "fread", file, off, len, n);
        if (mode[0] != 'r' || mode[1]) { fseeko(stream, 0, SEEK_CUR); pattern(buf, 600, op); n = fwrite(buf, 1, below(random, 600), stream); fflush(stream); }
        fseeko(stream, 100, SEEK_SET);
        n = fgetc(stream);
        note(actor, "%d fgetc = %zd at %ld\n", op, n, (long)ftello(stream));
        fclose(stream);
        return;
    }
    case 37: {
        /* A stream on a descriptor of ours seeks back over the bytes that it read ahead. */
        int copy = dup(fd);
        FILE *stream = copy < 0 ? NULL : fdopen(copy, "r");
        if (!stream) { note(actor, "%d fdopen %d = %d\n", op, slot, -errno); if (copy >= 0) close(copy); return; }
        n = fread(buf, 1, len % 5000, stream);
        at = ftello(stream);
        fclose(stream);
        note_bytes(actor, op, "fdopen", slot, at, result(lseek(fd, 0, SEEK_CUR)), n);
        return;
    }
    case 38: {
        pid_t child = fork();
        if (child < 0) die("fork");
        if (!child) {
            for (int i = 0; i < SLOTS; i++) {
                fd = actor->fd[i];
                if (fd < 0) continue;
                n = result(below(random, 3) ? read(fd, buf, 3000) : pread(fd, buf, 3000, off));
                note_bytes(actor, op, "child", i, off, 0, n);
                if (!below(random, 3)) note(actor, "%d child move = %zd\n", op, result(lseek(fd, 777, SEEK_CUR)));
                if (!below(random, 4)) note(actor, "%d child write = %zd\n", op, result(write(fd, "from a child", 12)));
            }
            _exit(0);
        }
        if (waitpid(child, &status, 0) != child) die("wait");
        note(actor, "%d fork = %x\n", op, status);
        return;
    }
    case 39:
        n = by_program(fd, buf, len, below(random, 2) ? -1 : off);
        note_bytes(actor, op, "exec", slot, len, 0, n);
        return;
    case 40:
        /* A bad pointer gives an error, and ends no process. */
        n = result(below(random, 2) ? pread(fd, (void *)16, 4096, 0) : read(fd, (void *)16, 4096));
        note(actor, "%d bad pointer %d = %zd\n", op, slot, n);
        return;
    case 41: {
        struct iovec bad[2] = {{buf, 64}, {buf, (size_t)-1}};
        n = result(preadv(fd, bad, 2, 0));
        ssize_t m = result(pread(fd, buf, 10, -5)), l = result(lseek(fd, -5, SEEK_SET)), k = result(readv(fd, (void *)16, 2));
        note(actor, "%d bad arguments %d = %zd %zd %zd %zd\n", op, slot, n, m, l, k);
        return;
    }
    case 42:
        drop(actor, to);
        actor->fd[to] = passed(fd);
        note(actor, "%d passed %d %d = %d\n", op, slot, to, actor->fd[to] >= 0);
        return;
    default: {
        int flags = any_flags(random) & ~(O_CREAT | O_EXCL);
        if ((fcntl(fd, F_GETFL) & O_PATH) || flags & O_NOFOLLOW) return; 
        drop(actor, to);
        actor->fd[to] = again(hand, fd, flags);
        note(actor, "%d again %d %o = %d\n", op, slot, flags, actor->fd[to] < 0 ? -errno : 0);
        return;
    }
    }
}

static void write_file(struct actor *actor, int file, size_t bytes) {
    char path[PATH];
    int fd = open(name_of(actor, file, path), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    for (size_t at = 0; at < bytes; at += CHUNK) {
        pattern(actor->buf, CHUNK, at + file * 7919);
        if (write(fd, actor->buf, bytes - at < CHUNK ? bytes - at : CHUNK) < 0) die("write");
    }
    close(fd);
}
/* Reads the whole file often enough for it to be taken over. */
static void read_often(const char *path, char *buf) {
    for (int i = 0; i < 5; i++) {
        int fd = open(path, O_RDONLY);
        for (int pass = 0; fd >= 0 && pass < 8; pass++) {
            lseek(fd, 0, SEEK_SET);
            while (read(fd, buf, CHUNK / 4) > 0) {}
        }
        if (fd >= 0) close(fd);
    }
}
static void *act(void *given) {
    struct actor *actor = given;
    char path[PATH];
    for (int slot = 0; slot < SLOTS; slot++) actor->fd[slot] = -1;
    for (int file = 0; file < FILES; file++) write_file(actor, file, file ? 20000 * file * file : LARGE);
    int writes = 3;
    for (int op = 0; op < actor->operations; op++) {
        if (op % 400 == 0) {
            /* Mostly read, mostly written, and between. */
            static const int shares[] = {3, 3, 10, 30, 80};
            writes = shares[below(&actor->hand.random, 5)];
            for (int slot = 0; slot < SLOTS; slot++) {
                note(actor, "%d stands %d = %zd\n", op, slot, actor->fd[slot] < 0 ? 0 : result(lseek(actor->fd[slot], 0, SEEK_CUR)));
                drop(actor, slot);
            }
            drop_map(actor);
            for (int file = 0; file < FILES; file++) {
                struct stat about;
                if (stat(name_of(actor, file, path), &about) || about.st_size < 5000 || about.st_size > 2 * LARGE)
                    write_file(actor, file, file ? 20000 * file * file : LARGE);
                if (below(&actor->hand.random, 2)) read_often(path, actor->buf);
                uint64_t sum = 0;
                int fd = open(path, O_RDONLY);
                for (ssize_t n; (n = read(fd, actor->buf, CHUNK)) > 0;) sum = mix(sum ^ hash(actor->buf, n));
                close(fd);
                note(actor, "%d file %d %016lx\n", op, file, sum);
            }
        }
        long before = milliseconds();
        one_operation(actor, op, writes);
        long took = milliseconds() - before;
        if (took > actor->longest) actor->longest = took;
    }
    return NULL;
}
static int twin_main(char **words) {
    static struct actor actors[ACTORS];
    uint64_t seed = strtoull(words[1], NULL, 0);
    _Atomic long *longest = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    break_at = atol(words[3]);
    for (int i = 0; i < ACTORS; i++) {
        struct actor *actor = &actors[i];
        char path[PATH];
        actor->number = i, actor->operations = atoi(words[2]), actor->buf = malloc(CHUNK + 4096);
        snprintf(actor->dir, sizeof actor->dir, "%s/a%d", words[0], i);
        if (mkdir(actor->dir, 0755)) die("mkdir");
        make_hand(&actor->hand, mix(seed * ACTORS + i), words[0]);
        snprintf(path, PATH, "%s/log.%d", words[0], i);
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0 || ftruncate(fd, LOG_BYTES)) die("log");
        char *map = mmap(NULL, LOG_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) die("map of the log");
        close(fd);
        actor->log_at = (void *)map, actor->log = map;
        *actor->log_at = 64;
    }
    pid_t children[ACTORS];
    for (int i = 2; i < ACTORS; i++) {
        children[i] = fork();
        if (!children[i]) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            act(&actors[i]);
            longest[i] = actors[i].longest;
            _exit(0);
        }
    }
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, act, &actors[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL), longest[i] = actors[i].longest;
    int bad = 0, status;
    for (int i = 2; i < ACTORS; i++) if (waitpid(children[i], &status, 0) != children[i] || status) printf("actor %d: status %x\n", i, status), bad = 1;
    long most = 0;
    for (int i = 0; i < ACTORS; i++) if (longest[i] > most) most = longest[i];
    printf(bad ? "wrong: an actor died\n" : "ok longest %ld ms\n", most);
    return bad;
}

/* ---- shared -------------------------------------------------------------------------------------------------- */

enum { SHARED_FILES = 3, ROLES = 8, BLOCKS = 64, BLOCK = 4096, RING = 20, APPENDED_MAX = 24 << 20 };
enum { MODEL_BYTES = LARGE + (256 << 10) };

struct model { int64_t size; uint64_t generation; char bytes[MODEL_BYTES]; };
struct control {
    _Atomic int stop, wrong, ready;
    pthread_mutex_t lock;
    _Atomic uint64_t begun[SHARED_FILES][BLOCKS], done[SHARED_FILES][BLOCKS];
    _Atomic uint64_t renaming[ROLES], renamed[ROLES];
    _Atomic uint64_t instances;
    struct model model[SHARED_FILES];
};
static struct control *control;
static const char *dir;
static uint64_t seed;
static int role;
static long until;

/* The last operations of a thread. */
static __thread char ring[RING][160];
static __thread unsigned ring_at;
static __thread int thread_number;

static void did(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(ring[ring_at++ % RING], sizeof ring[0], format, list);
    va_end(list);
}
static void amend(const char *format, ...) {
    char *line = ring[(ring_at - 1) % RING];
    size_t at = strlen(line);
    va_list list;
    va_start(list, format);
    vsnprintf(line + at, sizeof ring[0] - at, format, list);
    va_end(list);
}
/* The first thread that finds a difference reports it; all stop. */
static void wrong(const char *format, ...) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (!atomic_exchange(&control->wrong, 1)) {
        for (unsigned i = ring_at > RING ? ring_at - RING : 0; i < ring_at; i++)
            printf("  role %d.%d: %s\n", role, thread_number, ring[i % RING]);
        printf("wrong ");
        va_list list;
        va_start(list, format);
        vprintf(format, list);
        va_end(list);
        printf("\n");
        fflush(stdout);
    }
    atomic_store(&control->stop, 1);
    _exit(1);
}
static int goes_on(void) { return !atomic_load(&control->stop) && milliseconds() < until; }
static void shared_name(char *to, const char *kind, int number) { snprintf(to, PATH, "%s/%s%d", dir, kind, number); }
static void pause_any(uint64_t *random) {
    if (!below(random, 50)) usleep(below(random, 3000));
}

/* locked: a file's contents are known exactly, since only the holder of the mutex changes it. */

enum { HELD = 3 };
struct held { int fd, writes; uint64_t generation; char *map; int64_t map_size; };

static int open_model(int file, int flags) {
    char path[PATH];
    shared_name(path, "m", file);
    int fd = open(path, flags, 0644);
    if (fd < 0) wrong("open of file %d: %s", file, strerror(errno));
    return fd;
}
/* The process that changed it was killed in the middle: restores the file from the copy. */
static void repair(void) {
    char path[PATH], other[PATH];
    did("repair");
    for (int file = 0; file < SHARED_FILES; file++) {
        struct model *model = &control->model[file];
        shared_name(path, "m", file), shared_name(other, "new", file);
        unlink(other);
        int fd = open(other, O_RDWR | O_CREAT | O_TRUNC, 0644);
        for (int64_t at = 0; at < model->size;) {
            ssize_t n = pwrite(fd, model->bytes + at, model->size - at, at);
            if (n <= 0) die("repair");
            at += n;
        }
        close(fd);
        if (rename(other, path)) die("repair rename");
        model->generation++;
    }
}
static void lock_model(void) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 40;
    int error = pthread_mutex_timedlock(&control->lock, &end);
    if (error == ETIMEDOUT) wrong("nobody gave up the mutex for 40 s: an operation hangs");
    if (error == EOWNERDEAD) pthread_mutex_consistent(&control->lock), repair();
    else if (error) { errno = error; die("mutex"); }
}
static void compare(int file, const char *what, int way, const char *buf, off_t off, size_t len, ssize_t n) {
    struct model *model = &control->model[file];
    ssize_t want = off >= model->size ? 0 : model->size - off < (off_t)len ? model->size - off : (off_t)len;
    if ((way == 7 || way == 8) && want > 32768) want = 32768;
    amend(" = %zd", n);
    if (n != want) wrong("locked: %s way %d of file %d at %ld gives %zd of %zd bytes (size %ld)", what, way, file, (long)off, n, want, (long)model->size);
    for (ssize_t i = 0; i < n; i++) if (buf[i] != model->bytes[off + i]) {
        ssize_t end = i;
        while (end < n && buf[end] != model->bytes[off + end]) end++;
        wrong("locked: %s way %d of file %d at %ld, %zd bytes: bytes %zd to %zd differ, first %02x for %02x", what, way, file,
            (long)off, n, i, end, (unsigned char)buf[i], (unsigned char)model->bytes[off + i]);
    }
}
static void release(struct held *held) {
    if (held->map) munmap(held->map, held->map_size);
    if (held->fd >= 0) close(held->fd);
    *held = (struct held){.fd = -1};
}
static void change_model(struct hand *hand, int file, char *buf) {
    uint64_t *random = &hand->random;
    struct model *model = &control->model[file];
    char path[PATH], other[PATH];
    int fd, way = below(random, 20), lie = is_lie();
    size_t len = 1 + (below(random, 4) ? below(random, 9000) : below(random, CHUNK));
    off_t off = below(random, file ? SMALL : LARGE);
    pattern(buf, len, next(random));
    shared_name(path, "m", file), shared_name(other, "new", file);
    if (way < 12) {
        int how = any_write(random);
        did("write file %d way %d at %ld, %zu bytes", file, how, (long)off, len);
        fd = open_model(file, O_RDWR | (below(random, 3) ? 0 : O_CREAT));
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = off, .l_len = len};
        int kind = below(random, 6), locks = 0;
        if (kind == 0) locks = fcntl(fd, F_OFD_SETLK, &lock);
        if (kind == 1) locks = fcntl(fd, F_SETLK, &lock);
        if (kind == 2) locks = flock(fd, LOCK_EX | LOCK_NB);
        if (locks) wrong("locked: a lock of kind %d that nobody holds: %s", kind, strerror(errno));
        ssize_t n = lie ? (ssize_t)len : write_by(hand, how, fd, buf, len, off);
        if (n <= 0 || (how != 5 && n != (ssize_t)len)) wrong("locked: write way %d of file %d: %zd", how, file, n);
        if (off > model->size) memset(model->bytes + model->size, 0, off - model->size);
        memcpy(model->bytes + off, buf, n);
        if (off + n > model->size) model->size = off + n;
        if (kind == 2) flock(fd, LOCK_UN);
        close(fd);
    } else if (way < 14) {
        if (model->size + (off_t)len > MODEL_BYTES) return;
        did("append to file %d, %zu bytes at %ld", file, len, (long)model->size);
        fd = open_model(file, O_WRONLY | O_APPEND);
        ssize_t n = lie ? (ssize_t)len : write(fd, buf, len);
        if (n != (ssize_t)len) wrong("locked: append: %zd", n);
        if (lseek(fd, 0, SEEK_CUR) != model->size + n && !lie) wrong("locked: after an append the offset is %ld", (long)lseek(fd, 0, SEEK_CUR));
        memcpy(model->bytes + model->size, buf, n), model->size += n;
        close(fd);
    } else if (way < 16) {
        did("truncate file %d from %ld to %ld", file, (long)model->size, (long)off);
        fd = open_model(file, O_RDWR);
        int error = lie ? 0 : way == 14 ? ftruncate(fd, off) : truncate(path, off);
        if (error) wrong("locked: truncate: %s", strerror(errno));
        if (off > model->size) memset(model->bytes + model->size, 0, off - model->size);
        model->size = off;
        close(fd);
    } else if (way == 16) {
        if (off >= model->size) return;
        if ((off_t)len > model->size - off) len = model->size - off;
        did("punch file %d at %ld, %zu bytes", file, (long)off, len);
        fd = open_model(file, O_RDWR);
        if (!lie && fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off, len)) wrong("locked: punch: %s", strerror(errno));
        memset(model->bytes + off, 0, len);
        close(fd);
    } else if (way == 17) {
        did("file %d is emptied by O_TRUNC and written", file);
        fd = open_model(file, O_RDWR | (lie ? 0 : O_TRUNC));
        model->size = 0;
        if (!lie && write(fd, buf, len) != (ssize_t)len) wrong("locked: write after O_TRUNC: %s", strerror(errno));
        memcpy(model->bytes, buf, len), model->size = len;
        close(fd);
    } else {
        /* Another file with the same name, perhaps with the same inode number. */
        size_t size = file ? below(random, 200000) : LARGE - below(random, 10000);
        did("file %d is another one, of %zu bytes, %s", file, size, way == 18 ? "renamed over" : "made anew");
        if (way == 19 && !lie && unlink(path)) wrong("locked: unlink: %s", strerror(errno));
        uint64_t kind = next(random);
        fd = open(lie || way == 18 ? other : path, O_RDWR | O_CREAT | O_EXCL, 0644);
        if (fd < 0) wrong("locked: create: %s", strerror(errno));
        for (size_t at = 0; at < size; at += CHUNK) {
            size_t some = size - at < CHUNK ? size - at : CHUNK;
            pattern(model->bytes + at, some, kind + at);
            if (write(fd, model->bytes + at, some) != (ssize_t)some) wrong("locked: write: %s", strerror(errno));
        }
        close(fd);
        if (lie) unlink(other);
        else if (way == 18 && rename(other, path)) wrong("locked: rename: %s", strerror(errno));
        model->size = size, model->generation++;
        if (below(random, 2)) read_often(path, buf);
    }
}
static void *locked(void *given) {
    struct hand hand;
    static __thread struct held all[SHARED_FILES][HELD];
    thread_number = (int)(intptr_t)given;
    make_hand(&hand, mix(seed + role * 100 + thread_number), dir);
    uint64_t *random = &hand.random;
    char *buf = malloc(CHUNK + 4096);
    struct stat about;
    for (int i = 0; i < SHARED_FILES * HELD; i++) all[i / HELD][i % HELD].fd = -1;
    while (goes_on()) {
        int file = below(random, SHARED_FILES), way = any_read(random);
        struct held *held = &all[file][below(random, HELD)];
        struct model *model = &control->model[file];
        off_t off = below(random, file ? SMALL : LARGE);
        size_t len = below(random, 4) ? below(random, 9000) : below(random, CHUNK + 1);
        int changes_it = !below(random, below(random, 4) ? 12 : 60);
        lock_model();
        if (changes_it) change_model(&hand, file, buf);
        if (held->fd >= 0 && (held->generation != model->generation || !below(random, 30))) release(held);
        if (held->fd < 0 && !held->map) {
            held->writes = !below(random, 4), held->generation = model->generation;
            held->fd = open_model(file, held->writes ? O_RDWR : O_RDONLY);
        }
        if (held->generation != model->generation) release(held);
        else if (held->map && off < held->map_size && off < model->size && (held->fd < 0 || !below(random, 4))) {
            if ((int64_t)len > held->map_size - off) len = held->map_size - off;
            if ((int64_t)len > model->size - off) len = model->size - off;
            if (held->writes && !below(random, 6)) {
                did("store into file %d's map at %ld, %zu bytes", file, (long)off, len);
                pattern(buf, len, next(random));
                if (!is_lie()) memcpy(held->map + off, buf, len);
                memcpy(model->bytes + off, buf, len);
            }
            did("map of file %d at %ld, %zu bytes", file, (long)off, len);
            memcpy(buf, held->map + off, len);
            compare(file, "map", 0, buf, off, len, len);
        } else if (held->fd >= 0) {
            did("read file %d way %d at %ld, %zu bytes", file, way, (long)off, len);
            ssize_t n = read_by(&hand, way, held->fd, buf, len, off);
            compare(file, "read", way, buf, off, len, n);
            if (fstat(held->fd, &about) || about.st_size != model->size) wrong("locked: file %d has %ld bytes, fstat says %ld", file, (long)model->size, (long)about.st_size);
            if (!held->map && model->size && !below(random, 12)) {
                held->map_size = model->size;
                held->map = mmap(NULL, held->map_size, PROT_READ | (held->writes ? PROT_WRITE : 0), MAP_SHARED, held->fd, 0);
                if (held->map == MAP_FAILED) wrong("locked: mmap: %s", strerror(errno));
                /* A mapping outlives its descriptor. */
                if (below(random, 2)) close(held->fd), held->fd = -1;
            }
        }
        if (held->fd < 0 && !below(random, 10)) release(held);
        pthread_mutex_unlock(&control->lock);
        pause_any(random);
    }
    return NULL;
}

/* versions: no mutex; a word is file:8 block:16 version:40. */

static uint64_t version_word(int file, int block, uint64_t version) { return (uint64_t)(file + 1) << 56 | (uint64_t)block << 40 | version; }
static void *versions(void *given) {
    struct hand hand;
    thread_number = (int)(intptr_t)given;
    make_hand(&hand, mix(seed + role * 100 + thread_number), dir);
    uint64_t *random = &hand.random;
    char *buf = malloc(CHUNK + 4096), path[PATH];
    int fds[SHARED_FILES][2];
    for (int file = 0; file < SHARED_FILES; file++) shared_name(path, "v", file), fds[file][0] = fds[file][1] = -1;
    /* The first thread writes the blocks of its role. */
    int writes = thread_number == 0;
    while (goes_on()) {
        int file = below(random, SHARED_FILES);
        shared_name(path, "v", file);
        int *fd = &fds[file][below(random, 2)];
        if (*fd >= 0 && !below(random, 40)) close(*fd), *fd = -1;
        if (*fd < 0 && (*fd = open(path, writes ? O_RDWR : below(random, 6) ? O_RDONLY : O_RDWR)) < 0) wrong("versions: open: %s", strerror(errno));
        if (writes && !below(random, 3)) {
            int block = below(random, BLOCKS / ROLES) * ROLES + role, how = any_write(random);
            uint64_t version = atomic_load(&control->begun[file][block]) + 1;
            atomic_store(&control->begun[file][block], version);
            for (int i = 0; i < BLOCK / 8; i++) ((uint64_t *)buf)[i] = version_word(file, block, version);
            did("write way %d file %d block %d version %lu", how, file, block, version);
            ssize_t n = is_lie() ? BLOCK : write_by(&hand, how, *fd, buf, BLOCK, (off_t)block * BLOCK);
            if (n != BLOCK) wrong("versions: write way %d: %zd", how, n);
            atomic_store(&control->done[file][block], version);
            if (below(random, 3)) close(*fd), *fd = -1;
        } else {
            int block = below(random, BLOCKS), how = any_read(random);
            int count = how == 7 || how == 8 ? 1 : 1 + below(random, BLOCKS - block < 8 ? BLOCKS - block : 8);
            uint64_t known[8];
            for (int i = 0; i < count; i++) known[i] = atomic_load(&control->done[file][block + i]);
            did("read way %d file %d blocks %d+%d", how, file, block, count);
            ssize_t n = read_by(&hand, how, *fd, buf, (size_t)count * BLOCK, (off_t)block * BLOCK);
            if (n != count * BLOCK) wrong("versions: read way %d gives %zd of %d bytes", how, n, count * BLOCK);
            for (int i = 0; i < count * (BLOCK / 8); i++) {
                int in = i / (BLOCK / 8);
                uint64_t word = ((uint64_t *)buf)[i], version = word & ((1ull << 40) - 1);
                uint64_t begun = atomic_load(&control->begun[file][block + in]);
                if (word >> 40 != version_word(file, block + in, 0) >> 40) wrong("versions: read way %d: word %d of file %d block %d is %016lx", how, i % (BLOCK / 8), file, block + in, word);
                if (version < known[in] || version > begun) wrong("versions: read way %d: word %d of file %d block %d has version %lu; %lu was complete before, %lu begun", how, i % (BLOCK / 8), file, block + in, version, known[in], begun);
            }
        }
        pause_any(random);
    }
    return NULL;
}

/* renames: each role's path always names a complete file; a word is role:8 place:24 generation:32. */

static size_t words_of(uint64_t generation, int who) { return 512 * (1 + mix(generation * ROLES + who) % (who ? 20 : 1200)) + mix(generation) % 100; }
static void *renames(void *given) {
    struct hand hand;
    thread_number = (int)(intptr_t)given;
    make_hand(&hand, mix(seed + role * 100 + thread_number), dir);
    uint64_t *random = &hand.random;
    char *buf = malloc(CHUNK + 4096), path[PATH], other[PATH];
    while (goes_on()) {
        if (thread_number == 0 && !below(random, 10)) {
            uint64_t generation = atomic_load(&control->renaming[role]) + 1;
            atomic_store(&control->renaming[role], generation);
            size_t words = words_of(generation, role);
            shared_name(path, "r", role), shared_name(other, "new", role);
            int removes = role % 2, first = generation == 1, lie = is_lie();
            if (removes && !first && !lie && unlink(path) && errno != ENOENT) wrong("renames: unlink: %s", strerror(errno));
            unlink(other);
            int fd = open(other, O_WRONLY | O_CREAT | O_EXCL, 0644);
            if (fd < 0) wrong("renames: create: %s", strerror(errno));
            for (size_t at = 0; at < words;) {
                size_t some = words - at < CHUNK / 8 ? words - at : CHUNK / 8;
                for (size_t i = 0; i < some; i++) ((uint64_t *)buf)[i] = (uint64_t)(role + 1) << 56 | (uint64_t)(at + i) << 32 | (generation & 0xffffffff);
                if (write(fd, buf, some * 8) != (ssize_t)some * 8) wrong("renames: write: %s", strerror(errno));
                at += some;
            }
            close(fd);
            did("generation %lu of %d, %zu words", generation, role, words);
            if (!lie && rename(other, path)) wrong("renames: rename: %s", strerror(errno));
            atomic_store(&control->renamed[role], generation);
        } else {
            int who = below(random, ROLES), how = any_read(random);
            uint64_t known = atomic_load(&control->renamed[who]);
            shared_name(path, "r", who);
            int fd = open(path, below(random, 5) ? O_RDONLY : O_RDWR);
            uint64_t begun = atomic_load(&control->renaming[who]);
            did("read way %d of %d, known %lu", how, who, known);
            if (fd < 0) {
                if (errno == ENOENT && (who % 2 || !known)) continue;
                wrong("renames: open of %d: %s", who, strerror(errno));
            }
            for (int times = 1 + below(random, 4); times; times--) {
                uint64_t first = 0;
                if (pread(fd, &first, 8, 0) != 8) wrong("renames: the first word of %d is not there", who);
                uint64_t generation = first & 0xffffffff;
                if (first >> 32 != (uint64_t)(who + 1) << 24) wrong("renames: the first word of %d is %016lx", who, first);
                if (generation < known || generation > begun) wrong("renames: %d shows generation %lu; %lu was complete before the open, %lu begun", who, generation, known, begun);
                size_t words = words_of(generation, who), at = below(random, words), want = words - at < 4096 ? words - at : 4096;
                ssize_t n = read_by(&hand, how, fd, buf, CHUNK / 2, (off_t)at * 8);
                if (n != (ssize_t)want * 8) wrong("renames: read way %d of %d generation %lu at word %zu of %zu: %zd bytes", how, who, generation, at, words, n);
                for (size_t i = 0; i < want; i++) {
                    uint64_t word = ((uint64_t *)buf)[i];
                    if (word != ((uint64_t)(who + 1) << 56 | (uint64_t)(at + i) << 32 | generation)) wrong("renames: read way %d: word %zu of %d generation %lu is %016lx", how, at + i, who, generation, word);
                }
                how = any_read(random);
                if (below(random, 2)) usleep(below(random, 2000));
            }
            close(fd);
        }
        pause_any(random);
    }
    return NULL;
}

/* appends: a record is instance and number; each instance's numbers are consecutive. */

struct appended { uint64_t instance, number; };
static void *appends(void *given) {
    struct hand hand;
    thread_number = (int)(intptr_t)given;
    make_hand(&hand, mix(seed + role * 100 + thread_number), dir);
    uint64_t *random = &hand.random;
    char path[PATH];
    enum { INSTANCES = 4096 };
    static __thread uint64_t expected[INSTANCES];
    struct appended buf[512];
    uint64_t number = 0, instance = atomic_fetch_add(&control->instances, 1);
    int fd = -1, writes = thread_number == 0;
    off_t at = 0;
    int turns = 0;
    shared_name(path, "a", 0);
    for (int again = 1; again;) {
        again = goes_on();
        if (fd < 0 && (fd = open(path, writes ? O_RDWR | O_APPEND : below(random, 3) ? O_RDONLY : O_RDWR)) < 0) wrong("appends: open: %s", strerror(errno));
        struct stat about;
        if (fstat(fd, &about)) die("fstat");
        if (writes && again) {
            if (about.st_size > APPENDED_MAX) { usleep(1000); continue; }
            int count = 1 + below(random, 20);
            for (int i = 0; i < count; i++) buf[i] = (struct appended){instance, number++};
            did("append %d to %lu", count, number);
            struct iovec parts[3];
            in_parts(parts, buf, count * sizeof buf[0]);
            if (is_lie()) continue;
            ssize_t n = below(random, 2) ? write(fd, buf, count * sizeof buf[0]) : writev(fd, parts, 3);
            if (n != (ssize_t)(count * sizeof buf[0])) wrong("appends: write: %zd", n);
            if (!below(random, 20)) close(fd), fd = -1;
            if (!below(random, 8)) usleep(below(random, 4000));
        } else if (!writes) {
            /* Follows the end of the file, by the offset or by position; records completed before must be in it. */
            int complete = about.st_size - at >= (off_t)sizeof buf, how = below(random, 3);
            if (!how && lseek(fd, at, SEEK_SET) != at) wrong("appends: lseek");
            did("follow at %ld of %ld, by %d", (long)at, (long)about.st_size, how);
            ssize_t n = how ? pread(fd, buf, sizeof buf, at) : read(fd, buf, sizeof buf);
            if (n < 0 || (complete && n != sizeof buf)) wrong("appends: a read at %ld of %ld bytes gives %zd", (long)at, (long)about.st_size, n);
            if (n < about.st_size - at && n != sizeof buf) wrong("appends: a read at %ld of %ld bytes gives %zd", (long)at, (long)about.st_size, n);
            for (size_t i = 0; i < n / sizeof buf[0]; i++) {
                if (buf[i].instance >= INSTANCES) wrong("appends: at %ld is %016lx", (long)(at + i * 16), buf[i].instance);
                uint64_t *want = &expected[buf[i].instance];
                if (buf[i].number != *want) wrong("appends: at %ld is number %lu of %lu, not %lu", (long)(at + i * 16), buf[i].number, buf[i].instance, *want);
                ++*want;
            }
            at += n / sizeof buf[0] * sizeof buf[0];
            if (n < (ssize_t)sizeof buf[0]) {
                usleep(500);
                if (!below(random, 10)) close(fd), fd = -1;
                /* From the beginning, since the file is longer now. */
                if (++turns % 30 == 0) at = 0, memset(expected, 0, sizeof expected);
            }
        }
    }
    return NULL;
}

/* records: one descriptor, whose offset is the writers'. */

enum { RECORDS = 300, CROWD = 4 };
static struct { int fd, delay[CROWD], writers; pthread_barrier_t all; uint64_t random[CROWD]; } crowd;

static void spin(int turns) { for (volatile int i = 0; i < turns; i++) {} }
static void *crowd_member(void *given) {
    int member = (int)(intptr_t)given;
    uint64_t *random = &crowd.random[member];
    char buf[4096];
    pthread_barrier_wait(&crowd.all);
    spin(crowd.delay[member]);
    if (member < crowd.writers) {
        for (uint64_t i = 0; i < RECORDS; i++) {
            uint64_t record = (uint64_t)member << 32 | i;
            if (!is_lie() && write(crowd.fd, &record, 8) != 8) wrong("records: write: %s", strerror(errno));
        }
        return NULL;
    }
    for (int i = below(random, 4); i >= 0; i--) {
        off_t off = 40960 + below(random, LARGE - 50000);
        switch (below(random, 4)) {
        case 0: {
            pid_t child = fork();
            if (!child) _exit(pread(crowd.fd, buf, 512, off) != 512);
            int status;
            if (waitpid(child, &status, 0) == child && status) wrong("records: a child's pread: %x", status);
            break;
        }
        case 1: if (lseek(crowd.fd, 0, SEEK_CUR) % 8) wrong("records: the offset is in the middle of a record"); break;
        case 2: { int other = dup(crowd.fd); if (pread(other, buf, 512, off) != 512) wrong("records: pread of a duplicate"); close(other); break; }
        default: if (pread(crowd.fd, buf, 512, off) != 512) wrong("records: pread: %s", strerror(errno));
        }
    }
    return NULL;
}
static void *records(void *given) {
    (void)given;
    uint64_t random = mix(seed + role * 100);
    char *buf = malloc(CHUNK + 4096), path[PATH];
    enum { KINDS = 6 };
    int made[KINDS] = {0};
    struct actor maker = {.buf = buf};
    snprintf(maker.dir, sizeof maker.dir, "%s/records%d.%d", dir, role, (int)getpid());
    if (mkdir(maker.dir, 0755)) die("mkdir");
    for (long round = 0; goes_on(); round++) {
        int kind = below(&random, KINDS);
        if (!made[kind]++) {
            write_file(&maker, kind, LARGE);
            read_often(name_of(&maker, kind, path), buf);
        }
        did("round %ld on file %d", round, kind);
        crowd.fd = open(name_of(&maker, kind, path), O_RDWR | (below(&random, 10) ? 0 : O_APPEND));
        int appends = fcntl(crowd.fd, F_GETFL) & O_APPEND;
        if (appends && ftruncate(crowd.fd, LARGE)) die("truncate");
        crowd.writers = 1 + below(&random, 2);
        pthread_barrier_init(&crowd.all, NULL, CROWD);
        pthread_t threads[CROWD];
        for (int i = 0; i < CROWD; i++) {
            crowd.delay[i] = below(&random, 60000), crowd.random[i] = next(&random);
            pthread_create(&threads[i], NULL, crowd_member, (void *)(intptr_t)i);
        }
        for (int i = 0; i < CROWD; i++) pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&crowd.all);
        off_t base = appends ? LARGE : 0, end = base + crowd.writers * RECORDS * 8, at = lseek(crowd.fd, 0, SEEK_CUR);
        uint64_t found[2 * RECORDS], expected[2] = {0, 0};
        int look = open(path, O_RDONLY);
        ssize_t n = pread(look, found, end - base, base);
        close(look), close(crowd.fd);
        if (at != end) wrong("records: round %ld: the offset is %ld after %d writers, not %ld", round, (long)at, crowd.writers, (long)end);
        if (n != end - base) wrong("records: round %ld: %zd bytes of the records", round, n);
        for (int i = 0; i < crowd.writers * RECORDS; i++) {
            uint64_t writer = found[i] >> 32;
            if (writer >= (uint64_t)crowd.writers || (found[i] & 0xffffffff) != expected[writer]++)
                wrong("records: round %ld: record %d is %016lx: one was lost, or written elsewhere", round, i, found[i]);
        }
    }
    return NULL;
}

/* consumed: one description, whose offset all readers share. */

static struct { int fd; size_t record, count; _Atomic uint8_t *taken; pthread_barrier_t all; uint64_t random[CROWD]; } feast;

static void consume(int fd, uint64_t *random) {
    uint64_t buf[64];
    for (;;) {
        struct iovec parts[3];
        in_parts(parts, buf, feast.record);
        ssize_t n = below(random, 4) ? read(fd, buf, feast.record) : readv(fd, parts, 3);
        if (n == 0) return;
        if (n != (ssize_t)feast.record || buf[0] >= feast.count) wrong("consumed: a read gives %zd bytes, record %lu", n, buf[0]);
        for (size_t i = 1; i < feast.record / 8; i++) if (buf[i] != buf[0]) wrong("consumed: record %lu has %lu in it", buf[0], buf[i]);
        if (atomic_fetch_add(&feast.taken[buf[0]], 1 + is_lie())) wrong("consumed: record %lu is read twice", buf[0]);
        if (!below(random, 200)) { char other[100]; if (pread(fd, other, 100, 4096) != 100) wrong("consumed: pread"); }
        if (!below(random, 100)) usleep(below(random, 300));
    }
}
static void *feast_member(void *given) {
    int member = (int)(intptr_t)given;
    uint64_t *random = &feast.random[member];
    int fd = feast.fd;
    pthread_barrier_wait(&feast.all);
    if (member % 2) fd = dup(fd);
    for (int children = below(random, 2); children; children--) {
        pid_t child = fork();
        if (!child) { consume(fd, random); _exit(0); }
        consume(fd, random);
        int status;
        if (waitpid(child, &status, 0) == child && status) wrong("consumed: a child ended with %x", status);
    }
    consume(fd, random);
    if (member % 2) close(fd);
    return NULL;
}
static void *consumed(void *given) {
    (void)given;
    uint64_t random = mix(seed + role * 100);
    char path[PATH];
    enum { KINDS = 4 };
    static const size_t sizes[KINDS] = {8, 64, 512, 512}, counts[KINDS] = {3000, 2500, 2000, 9000};
    feast.taken = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int made[KINDS] = {0};
    char *buf = malloc(CHUNK);
    for (long round = 0; goes_on(); round++) {
        int kind = below(&random, KINDS);
        snprintf(path, PATH, "%s/c%d.%d.%d", dir, role, (int)getpid(), kind);
        feast.record = sizes[kind], feast.count = counts[kind];
        if (!made[kind]++) {
            int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
            for (uint64_t i = 0; i < feast.count; i++) {
                uint64_t record[64];
                for (size_t j = 0; j < feast.record / 8; j++) record[j] = i;
                if (write(fd, record, feast.record) != (ssize_t)feast.record) die("write");
            }
            close(fd);
            read_often(path, buf);
        }
        did("round %ld, records of %zu", round, feast.record);
        feast.fd = open(path, below(&random, 3) ? O_RDONLY : O_RDWR);
        memset((void *)feast.taken, 0, 16384); /* no other member has started yet */
        pthread_barrier_init(&feast.all, NULL, CROWD);
        pthread_t threads[CROWD];
        for (int i = 0; i < CROWD; i++) {
            feast.random[i] = next(&random);
            pthread_create(&threads[i], NULL, feast_member, (void *)(intptr_t)i);
        }
        for (int i = 0; i < CROWD; i++) pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&feast.all);
        off_t at = lseek(feast.fd, 0, SEEK_CUR);
        if (at != (off_t)(feast.record * feast.count)) wrong("consumed: the offset is %ld at the end", (long)at);
        for (size_t i = 0; i < feast.count; i++) if (feast.taken[i] != 1) wrong("consumed: record %zu of %zu was read %d times", i, feast.count, feast.taken[i]);
        close(feast.fd);
    }
    return NULL;
}

/* Makes the files of all phases; the first process to get here does. */
static void make_shared(void) {
    char path[PATH], *buf = malloc(CHUNK);
    pthread_mutexattr_t robust;
    pthread_mutexattr_init(&robust);
    pthread_mutexattr_setpshared(&robust, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&control->lock, &robust);
    for (int file = 0; file < SHARED_FILES; file++) {
        struct model *model = &control->model[file];
        model->size = file ? 50000 * file : LARGE, model->generation = 1;
        pattern(model->bytes, model->size, seed + file);
        shared_name(path, "m", file);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        if (write(fd, model->bytes, model->size) != model->size) die("write");
        close(fd);
        shared_name(path, "v", file);
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        for (int block = 0; block < BLOCKS; block++) {
            for (int i = 0; i < BLOCK / 8; i++) ((uint64_t *)buf)[i] = version_word(file, block, 0);
            if (write(fd, buf, BLOCK) != BLOCK) die("write");
        }
        close(fd);
    }
    shared_name(path, "a", 0);
    close(open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644));
    free(buf);
    atomic_store(&control->ready, 1);
}
static int shared_main(char **words) {
    static const struct { const char *name; void *(*run)(void *); int threads; } phases[] = {
        {"locked", locked, 2}, {"versions", versions, 2}, {"renames", renames, 2}, {"appends", appends, 2},
        {"records", records, 1}, {"consumed", consumed, 1}, {"make", NULL, 0}};
    dir = words[1], seed = strtoull(words[3], NULL, 0), role = atoi(words[4]);
    until = milliseconds() + atol(words[5]), break_at = atol(words[6]);
    int fd = open(words[2], O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || ftruncate(fd, sizeof *control)) die("control");
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED) die("map of control");
    close(fd);
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        if (strcmp(phases[i].name, words[0])) continue;
        if (!phases[i].run) make_shared();
        pthread_t threads[2];
        for (int n = 1; n < phases[i].threads; n++) pthread_create(&threads[n], NULL, phases[i].run, (void *)(intptr_t)n);
        if (phases[i].run) phases[i].run(0);
        for (int n = 1; n < phases[i].threads; n++) pthread_join(threads[n], NULL);
        printf(control->wrong ? "stopped\n" : "ok\n");
        return 0;
    }
    return 2;
}

int main(int count, char **words) {
    static char path[PATH];
    if (readlink("/proc/self/exe", path, PATH - 1) < 0) die("readlink");
    self = path;
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    if (count == 5 && !strcmp(words[1], "child")) return child_main(words + 2);
    if (count == 6 && !strcmp(words[1], "twin")) return twin_main(words + 2);
    if (count == 9 && !strcmp(words[1], "shared")) return shared_main(words + 2);
    return 2;
}
