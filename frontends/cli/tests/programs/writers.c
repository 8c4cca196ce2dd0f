/*
 * Writers: reads one command a line, does to files what it says, and answers with one line each.
 * A descriptor is named by a letter. Numbers are decimal; an error is "error NUMBER".
 *
 *   open D PATH FLAGS   read D LEN   pread D LEN AT   pwrite D BYTE LEN AT   write D BYTE LEN   close D
 *   dup D E   truncate PATH LEN   ftruncate D LEN   map D LEN   store BYTE LEN AT   unmap   lock D   fork   exit
 *   orphan D BYTE LEN AT   a child that only writes, whenever it gets a signal
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned char buf[1 << 20], *map;
static size_t map_len;
static int fds[26];

static int line(char *to, size_t room) {
    size_t at = 0;
    while (at + 1 < room && read(0, to + at, 1) == 1)
        if (to[at++] == '\n') { to[at - 1] = 0; return 1; }
    return 0;
}
static void say(const char *text) {
    struct { char text[128]; } out;
    int len = snprintf(out.text, sizeof out.text, "%s\n", text);
    if (write(1, out.text, len) != len) exit(2);
}
static void say_number(long value) {
    char text[64];
    if (value < 0) snprintf(text, sizeof text, "error %d", errno);
    else snprintf(text, sizeof text, "%ld", value);
    say(text);
}
static void say_bytes(ssize_t len) {
    uint64_t digest = 14695981039346656037ull;
    char text[64];
    if (len < 0) { say_number(len); return; }
    for (ssize_t i = 0; i < len; i++) digest = (digest ^ buf[i]) * 1099511628211ull;
    snprintf(text, sizeof text, "%ld %016lx", (long)len, digest);
    say(text);
}

int main(void) {
    char text[4096], what[32], name[4000], d, e;
    long a, b, c;
    for (int i = 0; i < 26; i++) fds[i] = -1;
    while (line(text, sizeof text)) {
        what[0] = 0;
        sscanf(text, "%31s", what);
        if (!strcmp(what, "open") && sscanf(text, "%*s %c %3999s %ld", &d, name, &a) == 3)
            say_number((fds[d - 'a'] = open(name, (int)a, 0600)) < 0 ? -1 : 0);
        else if (!strcmp(what, "read") && sscanf(text, "%*s %c %ld", &d, &a) == 2)
            say_bytes(read(fds[d - 'a'], buf, a));
        else if (!strcmp(what, "pread") && sscanf(text, "%*s %c %ld %ld", &d, &a, &b) == 3)
            say_bytes(pread(fds[d - 'a'], buf, a, b));
        else if (!strcmp(what, "pwrite") && sscanf(text, "%*s %c %ld %ld %ld", &d, &a, &b, &c) == 4) {
            memset(buf, (int)a, b);
            say_number(pwrite(fds[d - 'a'], buf, b, c));
        } else if (!strcmp(what, "write") && sscanf(text, "%*s %c %ld %ld", &d, &a, &b) == 3) {
            memset(buf, (int)a, b);
            say_number(write(fds[d - 'a'], buf, b));
        } else if (!strcmp(what, "close") && sscanf(text, "%*s %c", &d) == 1)
            say_number(close(fds[d - 'a']));
        else if (!strcmp(what, "dup") && sscanf(text, "%*s %c %c", &d, &e) == 2)
            say_number((fds[e - 'a'] = dup(fds[d - 'a'])) < 0 ? -1 : 0);
        else if (!strcmp(what, "truncate") && sscanf(text, "%*s %3999s %ld", name, &a) == 2)
            say_number(truncate(name, a));
        else if (!strcmp(what, "ftruncate") && sscanf(text, "%*s %c %ld", &d, &a) == 2)
            say_number(ftruncate(fds[d - 'a'], a));
        else if (!strcmp(what, "map") && sscanf(text, "%*s %c %ld", &d, &a) == 2) {
            map = mmap(NULL, map_len = a, PROT_READ | PROT_WRITE, MAP_SHARED, fds[d - 'a'], 0);
            say_number(map == MAP_FAILED ? -1 : 0);
        } else if (!strcmp(what, "store") && sscanf(text, "%*s %ld %ld %ld", &a, &b, &c) == 3) {
            memset(map + c, (int)a, b);
            say_number(0);
        } else if (!strcmp(what, "unmap"))
            say_number(munmap(map, map_len));
        else if (!strcmp(what, "lock") && sscanf(text, "%*s %c", &d) == 1) {
            struct flock l = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
            say_number(fcntl(fds[d - 'a'], F_SETLK, &l));
        } else if (!strcmp(what, "fork")) { /* the child continues, and the parent waits for it */
            pid_t child = fork();
            if (child > 0) { waitpid(child, NULL, 0); say("back"); }
            else say_number(child);
        } else if (!strcmp(what, "orphan") && sscanf(text, "%*s %c %ld %ld %ld", &d, &a, &b, &c) == 4) {
            int number;
            sigset_t set;
            sigemptyset(&set);
            sigaddset(&set, SIGUSR1);
            sigprocmask(SIG_BLOCK, &set, NULL);
            memset(buf, (int)a, b);
            pid_t child = fork();
            while (!child && !sigwait(&set, &number)) say_number(pwrite(fds[d - 'a'], buf, b, c));
            say_number(child);
        } else if (!strcmp(what, "exit"))
            _exit(0);
        else
            say("what?");
    }
    return 0;
}
