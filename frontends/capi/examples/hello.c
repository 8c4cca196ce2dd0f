#include <quinion.h>
#include <stdio.h>

int main(int argc, char **argv) {
    qn_cache_options options = {.size = sizeof options, .memory = 64 << 20};
    qn_cache *cache;
    qn_file *file;
    char buffer[4096];
    if (argc < 2 || qn_cache_open(&options, &cache) || qn_open(cache, argv[1], NULL, &file)) {
        fprintf(stderr, "%s\n", qn_error_message());
        return 1;
    }
    for (int round = 0; round < 2; round++) {
        qn_stats stats = {.size = sizeof stats};
        int64_t bytes = qn_pread(file, buffer, sizeof buffer, 0);
        qn_cache_stats(cache, &stats);
        printf("%lld bytes, %llu hits\n", (long long)bytes, (unsigned long long)stats.hits);
    }
    return qn_close(file) || qn_cache_close(cache);
}
