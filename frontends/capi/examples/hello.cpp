#include <quinion.hpp>

#include <array>
#include <iostream>

int main(int argc, char **argv) try {
    quinion::cache cache(64 << 20);
    quinion::file file = cache.open(argc > 1 ? argv[1] : "");
    std::array<std::byte, 4096> buffer;
    for (int round = 0; round < 2; round++) {
        std::size_t bytes = file.read(buffer.data(), buffer.size(), 0);
        std::cout << bytes << " bytes, " << cache.stats().hits << " hits\n";
    }
    quinion::pin pin = file.pinned(0, 4096);
    std::size_t pinned = 0;
    for (const qn_run &run : pin) pinned += run.length;
    if (pinned != pin.size()) return 2;
    file.close();
    cache.close(); // says whether what was written is durable; the destructor cannot
} catch (const quinion::error &error) {
    std::cerr << error.what() << '\n';
    return 1;
}
