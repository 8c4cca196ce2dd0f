/* Copies a file to standard output; it is linked without a dynamic linker, or gets a set-uid bit. */
#include <fcntl.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char room[4096];
    ssize_t bytes;
    int fd = argc > 1 ? open(argv[1], O_RDONLY) : -1;
    if (fd < 0) return 9;
    while ((bytes = read(fd, room, sizeof room)) > 0)
        if (write(1, room, bytes) != bytes) return 8;
    return 7;
}
