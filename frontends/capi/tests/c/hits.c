/* Reads one page that is cached so many times: what a hit costs by the C functions. `examples/hits.rs` is its twin.
 *
 *   hits FILE READS BYTES */
#include "check.h"

int main(int argc, char **argv) {
    static char buffer[4096];
    if (argc != 4) return 2;
    qn_cache_options options = {.size = sizeof options, .memory = 16 << 20};
    qn_cache *cache;
    qn_file *file;
    CHECK(qn_cache_open(&options, &cache) == 0 && qn_open(cache, argv[1], NULL, &file) == 0);
    size_t length = strtoull(argv[3], NULL, 10);
    CHECK(length <= sizeof buffer && qn_pread(file, buffer, length, 8192) == (int64_t)length);
    for (long reads = atol(argv[2]); reads > 0; reads--)
        CHECK(qn_pread(file, buffer, length, 8192) == (int64_t)length);
    return 0;
}
