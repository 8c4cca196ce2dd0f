/* Becomes other programs, and spawns some, as few programs do.
 *
 *   execs crash WORD             a handler on a small stack becomes `echo WORD`
 *   execs spawn FILE OTHER       spawns a process by pidfd_spawn, in which OTHER takes FILE's number, and reads both on
 *
 * With -DSTANDIN: a library that has pidfd_spawn, for a C library that has it not. It calls the old version of
 * posix_spawn, which is no wrapper's, and whose child does inside the C library what that of pidfd_spawn does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int spawner(int *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, char *const[],
                    char *const[]);

#ifdef STANDIN

static spawner *old;

/* At the start: a call of dlopen gives the kernel its offsets. */
__attribute__((constructor)) static void find(void) {
    void *library = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    old = library ? (spawner *)dlvsym(library, "posix_spawn", "GLIBC_2.2.5") : NULL;
}

int pidfd_spawn(int *pidfd, const char *path, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) {
    int process, error = old ? old(&process, path, actions, attributes, arguments, environment) : ENOSYS;
    if (error) return error;
    *pidfd = (int)syscall(434 /* pidfd_open */, process, 0);
    return *pidfd < 0 ? errno : 0;
}

#else

extern char **environ;

static char *word;

static void handler(int number) {
    char *const arguments[] = {"echo", word, NULL};
    execve("/bin/echo", arguments, environ);
    _exit(9);
}

/* The stack has what the kernel needs, and 3 KiB, behind a page that may not be touched. */
static int crash(void) {
    unsigned long least = getauxval(51 /* AT_MINSIGSTKSZ */);
    size_t bytes = (least ? least : 2048) + 3072;
    size_t pages = (bytes + 4095) / 4096 * 4096;
    char *memory = mmap(NULL, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE) != 0) return 1;
    /* It ends at that page: an overflow is noticed at once. */
    stack_t stack = {.ss_sp = memory + 4096, .ss_size = bytes};
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&stack, NULL) != 0 || sigaction(SIGABRT, &action, NULL) != 0) return 2;
    raise(SIGABRT);
    return 3;
}

/* Of what is left at the offset, and of all, each read at its position. */
static unsigned long sum(int file) {
    char bytes[1000];
    unsigned long sum = 0;
    off_t position = 0;
    for (ssize_t count; (count = pread(file, bytes, sizeof bytes, position)) > 0; position += count)
        for (ssize_t at = 0; at < count; at++) sum = sum * 31 + (unsigned char)bytes[at];
    for (ssize_t count; (count = read(file, bytes, sizeof bytes)) > 0;)
        for (ssize_t at = 0; at < count; at++) sum = sum * 31 + (unsigned char)bytes[at];
    return sum;
}

static int spawn(const char *path, const char *second) {
    char bytes[4096];
    int file = open(path, O_RDONLY), other = open(second, O_RDONLY), process = -1;
    for (int turn = 0; turn < 20; turn++)
        if (read(file, bytes, 1000) != 1000 || read(other, bytes, 500) != 500) return 1;
    spawner *pidfd_spawn = (spawner *)dlsym(RTLD_DEFAULT, "pidfd_spawn");
    if (!pidfd_spawn) {
        puts("none");
        return 0;
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, other, file);
    posix_spawn_file_actions_addclose(&actions, other);
    char *const arguments[] = {"echo", "spawned", NULL}, *const missing[] = {"none", NULL};
    int error = pidfd_spawn(&process, "/bin/echo", &actions, NULL, arguments, environ);
    if (error) return printf("error %d\n", error), 0;
    siginfo_t info;
    if (waitid(3 /* P_PIDFD */, process, &info, WEXITED) != 0) return 2;
    printf("ended %d, closes at exec %d\n", info.si_status, fcntl(process, F_GETFD));
    printf("%lx\n", sum(file));
    printf("%lx\n", sum(other));
    /* Not opened before: reads at its offset are served as before the spawn. */
    int later = open(path, O_RDONLY);
    printf("%lx\n", sum(later));
    printf("missing %d\n", pidfd_spawn(&process, "/no/such", NULL, NULL, missing, environ));
    return 0;
}

int main(int count, char **words) {
    word = words[2];
    return strcmp(words[1], "crash") == 0 ? crash() : spawn(words[2], words[3]);
}

#endif
